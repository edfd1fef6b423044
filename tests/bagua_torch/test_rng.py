"""PyTorch's default generators, used from several threads."""

import subprocess
import sys

import pytest
import torch

from bagua_comm import Own
from bagua_comm.testing import run_ranks
from bagua_torch import Checkpoints
from bagua_torch.tensors.rng import fork

PROGRAM = """
import gc
import threading

import pytest
import torch
from bagua_torch.tensors.rng import fork


def work():
    start.wait()
    for _ in range(600):
        garbage = [torch.ones(2)]
        garbage.append(garbage)
        del garbage
        with fork():
            torch.manual_seed(1)


gc.set_threshold(20)
start = threading.Barrier(4)
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("all are done")
"""


@pytest.mark.slow
def test_threads_never_wait_for_each_other_for_ever():
    """In a separate process: threads would keep the interpreter's lock, and block the test."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert "all are done" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


def test_the_body_may_fork_again_and_nothing_of_it_is_left():
    before = torch.get_rng_state()
    with fork():
        torch.manual_seed(1)
        first = torch.rand(1)
        with fork():
            torch.rand(5)
        second = torch.rand(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.cat([first, second]), torch.rand(2, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("ranks", [2, 3])
def test_generators_are_restored_on_as_many_ranks_and_dropped_on_others(tmp_path, ranks):
    """As docs/guides/train.md says: a checkpoint with them loads on any number of ranks."""
    states = [torch.Generator().manual_seed(rank).get_state() for rank in range(3)]

    def save(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.save(1, rng=Own(states[comm.rank], "drop"), epoch=4)

    def load(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            return checkpoints.load().tree

    run_ranks(2, save)
    for rank, tree in enumerate(run_ranks(ranks, load)):
        assert tree["epoch"] == 4
        if ranks == 2:
            assert torch.equal(torch.as_tensor(tree["rng"]), states[rank])
        else:
            assert tree["rng"] is None
