"""The variables of torchrun and of mpirun: the launcher and the rank of a process."""

import os
from pathlib import Path

import pytest

import bagua_comm
from bagua_comm import BootstrapError
from bagua_comm.bootstrap.environment import number_from_torchrun, torchrun_job, under_torchrun


def test_torchrun_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert under_torchrun()
    with pytest.raises(BootstrapError, match=r"call bagua_torch.connect\(\).*mpirun.*python -m bagua_comm run"):
        bagua_comm.connect()


def test_mpiruns_own_numbers_in_torchruns_names_are_not_torchrun(monkeypatch):
    for name in ("RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    assert not under_torchrun()
    monkeypatch.setenv("WORLD_SIZE", "4")  # another world than mpirun's
    assert under_torchrun()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # mpirun has started torchrun
    assert under_torchrun()


def test_two_jobs_of_torchrun_with_one_run_id_share_no_folder(monkeypatch):
    assert torchrun_job() == ""
    for name, text in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "team/run",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, text)
    first = torchrun_job()
    assert Path(first).name == first  # one folder, which needs no parent
    monkeypatch.setenv("MASTER_PORT", "2")  # as after a restart
    assert torchrun_job() == first
    monkeypatch.setattr(os, "getppid", os.getpid)  # another agent
    assert torchrun_job() != first


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("WORLD_SIZE", "abc"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", ""),
        ("RANK", "abc"),
        ("RANK", "2"),
        ("RANK", "-1"),
        ("LOCAL_RANK", "first"),
    ],
)
def test_a_variable_of_torchrun_that_is_no_such_number_is_named(monkeypatch, name, text):
    for variable, value in {"RANK": "0", "WORLD_SIZE": "2", name: text}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(BootstrapError, match=f"connect: the environment variable {name} is '{text}', expected "):
        number_from_torchrun(name) if name == "LOCAL_RANK" else bagua_comm.connect()
