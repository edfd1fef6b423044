"""Random calls over threads, and over stand-ins for devices; random_calls.py says how to make more of them."""

import importlib

import numpy as np
import pytest
from random_calls import CASES, Draw, RandomCalls
from support.device_ranks import policies_in_turn, run_on_devices

from bagua_comm import Communicator
from bagua_comm.testing import Recording, run_ranks


def make(comm, numbers, **options):
    with RandomCalls(comm, seed=2026, **options) as calls:
        calls.run(numbers)


@pytest.mark.parametrize(
    ("ranks", "numbers"), [(1, range(20)), (2, range(100, 140)), (3, range(200, 250)), (5, range(300, 320))]
)
def test_random_calls_over_threads_give_the_results_of_numpy(ranks, numbers):
    run_ranks(ranks, lambda comm: make(comm, numbers))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_kind_of_call_is_made_and_checked(case):
    def body(comm):
        for number in range(3):
            call = case(Draw(comm, [5, number]))
            call.check(call.run(comm))

    run_ranks(2, body)


@pytest.mark.covering(1)
@policies_in_turn(
    ("kind", "ranks", "numbers"),
    [
        ("nccl", 2, range(400, 408)),
        ("nccl", 3, range(430, 438)),
        ("staged", 2, range(460, 468)),
        ("staged", 3, range(490, 498)),
        ("local", 2, range(520, 528)),
    ],
)
def test_random_calls_on_devices_give_the_results_of_numpy(device, kind, ranks, numbers, monkeypatch):
    staged = importlib.import_module("bagua_comm.transports.staged")
    monkeypatch.setattr(staged, "PIECE_BYTES", 1000)
    # A task of a lane on a thread would be watched for the order of streams that only its own work keeps.
    run_on_devices(
        device, ranks, kind, lambda comm: make(comm, numbers, on_device=True, sizes=(1000, 3000), lanes=False)
    )


def test_calls_of_ranks_that_compare_each_call_first():
    run_ranks(3, lambda comm: make(comm, range(600, 620), lanes=False), check=True)


class Saturating(Recording):
    """Adds integers as some libraries' vector instructions do."""

    def allreduce(self, x, out, op):
        if x.dtype.kind not in "iu" or x.dtype.itemsize > 4 or op != "sum":
            return self.inner.allreduce(x, out, op)
        total, limits = x.astype(np.int64), np.iinfo(x.dtype)
        self.inner.allreduce(total, total, op)
        out[...] = np.clip(total, limits.min, limits.max)
        return None


class TooGenerous(Communicator):
    """Refuses nothing that a lane is asked for."""

    def lane(self, kind=None):
        return super().lane()


def test_a_wrong_sum_is_reported_with_the_number_of_its_call():
    with pytest.raises(AssertionError, match=r"call \d+ of seed 2026, rank \d of 2.*allreduce of u?int"):
        run_ranks(2, lambda comm: make(comm, range(380, 1000), lanes=False), wrap=Saturating)


def test_a_wrong_call_that_goes_through_is_reported():
    def body(comm):
        make(TooGenerous(comm.transports), range(1000), lanes=False)

    with pytest.raises(AssertionError, match="expected ArrayError"):
        run_ranks(1, body)
