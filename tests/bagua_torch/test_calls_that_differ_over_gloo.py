"""Ranks that make different calls over gloo: each raises `CommMismatch`, at once, which names both calls."""

import re
import time

import numpy as np
import pytest
from support.gloo import run_threads

from bagua_comm import CommAborted, CommError, CommMismatch, Communicator, MinMaxUInt8, quantized_allreduce
from bagua_torch.process_group.verdicts import Verdict

TIMEOUT_S = 60.0
"""Ranks that know that their calls differ do not wait for this long."""

AT_ONCE_S = 30.0


def outcomes(ranks, call):
    """The error of `call(comm, odd)` on each rank, or None; `odd` is True on the last rank."""

    def body(transport):
        comm, start = Communicator([transport]), time.monotonic()
        try:
            call(comm, comm.rank == comm.size - 1)
        except CommError as error:
            found = error
        else:
            found = None
        assert time.monotonic() - start < AT_ONCE_S
        if found is None:  # the peers have broken it
            with pytest.raises((CommMismatch, CommAborted)):
                comm.barrier()
        return found

    return run_threads(ranks, body, timeout_s=TIMEOUT_S)


def counts(comm, odd):
    """Elements that each rank gives, as this rank counts them; the odd rank counts more of rank 0's."""
    return [3 + 2000 * odd] + [3] * (comm.size - 1)


def allgather(comm, odd):
    each = counts(comm, odd)
    comm.allgather(np.zeros(each[comm.rank]), counts=each)


def alltoall(comm, odd):
    out = counts(comm, odd)
    comm.alltoall(np.zeros(3 * comm.size), counts=[3] * comm.size, out_counts=out)


def gather(comm, odd):
    each, root = counts(comm, odd), comm.size - 1
    comm.gather(np.zeros(3), root=root, counts=each if odd else None)


COLLECTIVES = {
    "broadcast, size": (lambda comm, odd: comm.broadcast(np.zeros(3 + odd), root=0), ["24 bytes", "32 bytes"]),
    "broadcast, large size": (
        lambda comm, odd: comm.broadcast(np.zeros(500_000 + odd), root=0),
        ["500000 x float64", "500001 x float64"],
    ),
    "broadcast, dtype": (
        lambda comm, odd: comm.broadcast(np.zeros(4, "i4" if odd else "f4"), root=0),
        [r"broadcast\(float32, root=0\)", r"broadcast\(int32, root=0\)"],
    ),
    "broadcast, root": (lambda comm, odd: comm.broadcast(np.zeros(4), root=int(odd)), ["root=0", "root=1"]),
    "broadcast, root, large": (
        lambda comm, odd: comm.broadcast(np.zeros(500_000), root=int(odd)),
        ["root=0", "root=1"],
    ),
    "allreduce, op": (
        lambda comm, odd: comm.allreduce(np.zeros(5), op="max" if odd else "min"),
        ["op=min", "op=max"],
    ),
    "allreduce, large size": (
        lambda comm, odd: comm.allreduce(np.zeros(700_000 + odd)),
        ["700000 x float64", "700001 x float64"],
    ),
    "reduce, root": (lambda comm, odd: comm.reduce(np.zeros(5000), root=int(odd)), ["root=0", "root=1"]),
    "gather, root": (lambda comm, odd: comm.gather(np.zeros(5), root=int(odd)), ["root=0", "root=1"]),
    "scatter, root": (
        lambda comm, odd: comm.scatter(np.zeros((comm.size, 4)), np.zeros(4), root=int(odd)),
        ["root=0", "root=1"],
    ),
    "allgather, counts": (allgather, ["rank 0 sends 24 bytes to rank", "which expects 16024 bytes"]),
    "alltoall, counts": (alltoall, ["rank 0 sends 24 bytes to rank", "which expects 16024 bytes"]),
    "gather, counts": (gather, ["rank 0 sends 24 bytes to rank", "which expects 16024 bytes"]),
    "alltoall, counts on some ranks": (
        lambda comm, odd: comm.alltoall(
            np.zeros(comm.size), **{name: [1] * comm.size for name in ("counts", "out_counts") if odd}
        ),
        [r"alltoall\(float64\)", r"alltoall\(float64, with counts\)"],
    ),
    "codec": (
        lambda comm, odd: quantized_allreduce(comm, np.zeros(5000, "f4"), codec=MinMaxUInt8(64 if odd else 128)),
        ["128", "64"],
    ),
    "another call": (
        lambda comm, odd: comm.barrier() if odd else comm.allreduce(np.zeros(5)),
        [r"allreduce\(float64, op=sum\)", r"barrier\(\)"],
    ),
    "another call, along a tree": (
        lambda comm, odd: comm.allgather(np.zeros(5)) if odd else comm.broadcast(np.zeros(700_000), root=1),
        [r"broadcast\(float64, root=1\)", r"allgather\(float64\)"],
    ),
    "an object": (
        lambda comm, odd: comm.allgather_object(1) if odd else comm.broadcast_object("a", root=0),
        [r"broadcast_object\(, root=0\)", r"allgather_object\(\)"],
    ),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_all_ranks_raise_at_once_and_name_both_calls(name, ranks):
    call, texts = COLLECTIVES[name]
    for error in outcomes(ranks, call):
        assert isinstance(error, CommMismatch)
        for text in texts:
            assert re.search(text, str(error))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_long_message_that_does_not_fit_is_an_error_of_its_receiver_alone(ranks):
    """It is received all the same, so that its sender does not wait."""

    def around(comm, odd):
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        out = [(left, np.zeros(300_000 + odd * (k == 0))) for k in range(2)]
        comm.exchange([(right, np.zeros(300_000))] * 2, out)

    *others, error = outcomes(ranks, around)
    assert others == [None] * (ranks - 1)
    assert isinstance(error, CommMismatch)
    assert f"expected float64[300001] from rank {ranks - 2}, which sent float64[300000]" in str(error)


def test_a_rank_that_has_closed_is_named_to_ranks_that_call():
    def body(transport):
        if transport.rank == 2:
            return None  # it closes
        time.sleep(0.3 * transport.rank)  # sleeps: until rank 2 has heard from rank 0
        with pytest.raises(CommMismatch) as caught:
            Communicator([transport]).allreduce(np.zeros(3))
        return caught.value

    for error in run_threads(3, body)[:2]:
        call = r"called allreduce\(float64, op=sum\) of 3 x float64 \(24 bytes\), but rank 2 has closed"
        assert re.search(call, str(error))
        assert error.left == 2


def test_the_contents_of_a_store_do_not_outlive_its_process():
    class Gone:
        def check(self, keys):
            raise RuntimeError("the store is gone")

    with pytest.raises(ConnectionError):
        Verdict(Gone()).read()
