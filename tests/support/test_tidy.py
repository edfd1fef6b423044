"""Everything that a test leaves behind is found, reported and cleaned up."""

import os
import threading

import pytest

import bagua_comm
from support import tidy


def test_a_default_communicator_is_found_and_closed():
    before = tidy.state()
    comm = bagua_comm.default()
    (said,) = tidy.differences(before)
    assert said == f"the default communicator is open, {comm}: close() it"
    assert bagua_comm.bootstrap.current() is None


def test_an_environment_variable_and_a_folder_are_found_and_put_back(tmp_path):
    before = tidy.state()
    os.environ["BAGUA_LEFT"] = "1"
    home = os.environ.pop("HOME")
    os.chdir(tmp_path)
    variables, folder = tidy.differences(before)
    assert variables == "environment variables changed, BAGUA_LEFT, HOME: use monkeypatch"
    assert folder == f"the working directory is {tmp_path}: use monkeypatch.chdir()"
    assert ("BAGUA_LEFT" in os.environ, os.environ["HOME"]) == (False, home)
    assert tidy.differences(before) == []


@pytest.mark.needs("torch")
def test_a_process_group_is_found_and_destroyed():
    from torch import distributed

    before = tidy.state()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    assert tidy.differences(before) == ["torch.distributed is initialized: call destroy_process_group()"]
    assert not distributed.is_initialized()


def test_a_thread_is_found_unless_it_ends(monkeypatch):
    before, go_on = tidy.state(), threading.Event()
    threading.Thread(target=go_on.wait, name="left").start()
    with monkeypatch.context() as patch:
        patch.setattr(tidy, "ENDING_S", 0.01)
        assert tidy.differences(before) == ["threads are running, left: end them"]
    go_on.set()
    assert tidy.differences(before) == []
