"""Work of each rank alone, whose error all ranks raise."""

import threading

import pytest

from bagua_comm import ArrayError, BaguaError, CheckpointError, CommMismatch
from bagua_comm.comm.outcomes import on_all_ranks, on_root
from bagua_comm.testing import run_ranks


class Misfit(ArrayError):
    """A program's own error, which no text alone makes."""

    def __init__(self, what, count):
        super().__init__(f"{count} misfits in {what}")


def locked(error):
    """An error that holds what cannot be pickled."""
    error.lock = threading.Lock()
    return error


each_error = pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: Misfit("a", 2), CheckpointError, "2 misfits in a"),
        (lambda: locked(ArrayError("no such name")), ArrayError, "no such name"),
        (lambda: locked(KeyError("b")), CheckpointError, "KeyError: 'b'"),
        (lambda: CommMismatch("other calls", left=1), CommMismatch, "other calls"),
    ],
)


def errors_of(call):
    def body(comm):
        with pytest.raises(BaguaError) as caught:
            call(comm)
        return type(caught.value), str(caught.value)

    return run_ranks(2, body)


@each_error
def test_any_error_of_one_rank_is_raised_on_all_ranks_with_its_text(make, kind, text):
    def call(comm):
        def work():
            if comm.rank == 1:
                raise make()

        on_all_ranks(comm, "load", work, CheckpointError)

    assert errors_of(call) == [(kind, f"load: rank 1: {text}")] * 2


@each_error
def test_any_error_of_rank_0_is_raised_on_all_ranks_with_its_text(make, kind, text):
    def work():
        raise make()

    assert errors_of(lambda comm: on_root(comm, work, CheckpointError)) == [(kind, text)] * 2
