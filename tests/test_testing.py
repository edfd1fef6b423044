"""The conformance kits must fail for what breaks the contract."""

import time
from dataclasses import dataclass

import numpy as np
import pytest

from bagua_comm import ByteGrad, CommMismatch, CommTimeout, GradientAllReduce, MinMaxUInt8
from bagua_comm.testing import Recording, check_algorithm, check_codec, check_transport, run_ranks
from bagua_comm.transports import LocalTransport


def test_results_come_in_rank_order():
    assert run_ranks(4, lambda comm: (comm.rank, comm.size)) == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_an_error_is_raised_with_its_rank():
    def body(comm):
        if comm.rank == 1:
            raise LookupError("no")
        comm.barrier()

    with pytest.raises(LookupError, match="no") as caught:
        run_ranks(2, body)
    assert "in rank 1 of 2" in getattr(caught.value, "__notes__", ["in rank 1 of 2"])


def test_a_rank_that_does_not_stop_is_given_up_on():
    def body(comm):
        if comm.rank == 0:
            raise LookupError("no")
        while True:
            time.sleep(0.01)

    with pytest.raises(CommTimeout, match="rank 1 still runs"):
        run_ranks(2, body, timeout_s=0.2)


def break_transport(**overrides):
    return lambda inner: type("Broken", (Recording,), overrides)(inner)


@pytest.mark.parametrize(
    "overrides",
    [
        {"allreduce": lambda self, x, out, op: np.copyto(out, x)},
        {"broadcast": lambda self, x, root: None},
        {"allgather": lambda self, x, out: self.inner.alltoall(out, out)},
        {"alltoall": lambda self, x, out: np.copyto(out, x)},
        {"reduce_scatter": lambda self, x, out, op: self.inner.reduce_scatter(x, out, "sum")},
    ],
    ids=lambda overrides: next(iter(overrides)),
)
def test_check_transport_notices_a_broken_collective(overrides):
    with pytest.raises((AssertionError, CommMismatch)):
        run_ranks(2, check_transport, wrap=break_transport(**overrides))


def test_check_transport_notices_ranks_with_different_bits():
    class Drifting(LocalTransport):
        pass

    def allreduce(self, x, out, op):
        self.inner.allreduce(x, out, op)
        if out.dtype == np.float32 and self.rank == 1:
            out[...] = np.nextafter(out, np.float32(np.inf))

    with pytest.raises(Exception, match="check_consistency: x differs"):
        run_ranks(2, check_transport, wrap=break_transport(allreduce=allreduce))


@dataclass(frozen=True)
class LeavesPaddingDirty(MinMaxUInt8):
    def _encode(self, chunks, wire):
        before = wire[:, -1:].copy()
        super()._encode(chunks, wire)
        if chunks.shape[1] % 32:
            wire[:, -1:] = before


@dataclass(frozen=True)
class HidesNaN(MinMaxUInt8):
    def _encode(self, chunks, wire):
        super()._encode(np.nan_to_num(chunks), wire)


@dataclass(frozen=True)
class AddsBackwards(MinMaxUInt8):
    def _combine(self, wire, out, op, count, dtype):
        super()._combine(wire[::-1].copy(), out, op, count, dtype)


@dataclass(frozen=True)
class LooksAtNeighbours(MinMaxUInt8):
    def _encode(self, chunks, wire):
        super()._encode(chunks + chunks.mean(axis=0, dtype=chunks.dtype), wire)


@pytest.mark.parametrize("codec", [LeavesPaddingDirty, HidesNaN, AddsBackwards, LooksAtNeighbours])
def test_check_codec_notices_what_breaks_the_contract(codec):
    with pytest.raises(AssertionError):
        check_codec(codec())


def test_check_codec_notices_a_repr_that_does_not_make_the_codec():
    class Nameless(MinMaxUInt8):
        def __repr__(self):
            return "MinMaxUInt8()"

    with pytest.raises(AssertionError):
        check_codec(Nameless())


@dataclass(frozen=True)
class OfYourOwn(MinMaxUInt8):
    pass


def test_kits_take_classes_from_other_modules():
    check_codec(OfYourOwn(block=9))


@dataclass(frozen=True)
class Forgetful(GradientAllReduce):
    def exchange(self, bucket, comm, state):
        if bucket.index:
            super().exchange(bucket, comm, state)


def test_check_algorithm_notices_a_bucket_left_behind():
    with pytest.raises(Exception, match="check_consistency"):
        check_algorithm(Forgetful(), sizes=(2,))


def test_kits_pass_what_keeps_the_contract():
    check_codec(MinMaxUInt8(block=33))
    check_algorithm(ByteGrad(), sizes=(1, 3))
