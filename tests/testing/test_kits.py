"""The conformance kits must fail for what breaks the contract."""

import time
from dataclasses import dataclass

import numpy as np
import pytest

from bagua_comm import (
    Algorithm,
    ByteGrad,
    Codec,
    CommMismatch,
    CommTimeout,
    GradientAllReduce,
    Hierarchical,
    MinMaxUInt8,
    Quantized,
    after,
    every,
)
from bagua_comm.testing import (
    Recording,
    check_algorithm,
    check_codec,
    check_transport,
    reduced,
    run_ranks,
    whole_range,
)


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


def test_the_error_of_a_lanes_task_that_nobody_has_asked_for_is_raised():
    def body(comm):
        comm.lane().submit(int, "three" if comm.rank == 1 else "3")

    with pytest.raises(ValueError, match="three"):
        run_ranks(2, body)


def test_a_rank_that_does_not_stop_is_abandoned():
    def body(comm):
        if comm.rank == 0:
            raise LookupError("no")
        while True:
            time.sleep(0.01)  # sleeps: a rank that does not end

    with pytest.raises(CommTimeout, match=r"rank 1 \(in body test_kits.py"):
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


@pytest.mark.parametrize("in_rank_order", [True, False])
def test_check_transport_notices_ranks_with_different_bits(in_rank_order):
    def allreduce(self, x, out, op):
        self.inner.allreduce(x, out, op)
        if out.dtype == np.float32 and self.rank == 1:
            out[...] = np.nextafter(out, np.float32(np.inf))

    def wrap(inner):
        transport = break_transport(allreduce=allreduce)(inner)
        transport.adds_in_rank_order = in_rank_order
        return transport

    expected = "allreduce .* float32: .* elements are wrong" if in_rank_order else "check_consistency: x differs"
    with pytest.raises((AssertionError, CommMismatch), match=expected):
        run_ranks(2, check_transport, wrap=wrap)


def saturated(self, x, out, op):
    """Integer sums as some libraries' vector instructions make them."""
    self.inner.allreduce(x, out, op)
    if op == "sum" and x.dtype == np.int8:
        total = x.astype(np.int64)
        self.inner.allreduce(total, total, op)
        whole = x.size // 16 * 16
        out.reshape(-1)[:whole] = np.clip(total.reshape(-1)[:whole], -128, 127)


def added_backwards(self, x, out, op):
    if op != "sum" or x.dtype != np.float64:
        return self.inner.allreduce(x, out, op)
    table = np.empty((self.size, x.size))
    self.inner.allgather(x, table)
    out[...] = table[::-1].sum(axis=0).reshape(out.shape)
    return None


def flushed(self, x, out, op):
    self.inner.allreduce(x, out, op)
    if x.dtype == np.float32:
        out[np.abs(out) < np.finfo(np.float32).tiny] = 0


def widened(self, x, out, op):
    """float16 sums that are rounded once each time, not once at the end."""
    if op != "sum" or x.dtype != np.float16:
        return self.inner.allreduce(x, out, op)
    table = np.empty((self.size, x.size), x.dtype)
    self.inner.allgather(x, table)
    with np.errstate(all="ignore"):
        out[...] = ((table[0] + table[1]) + table[2]).reshape(out.shape)
    return None


@pytest.mark.parametrize("broken", [saturated, added_backwards, flushed, widened])
def test_check_transport_finds_mistakes_that_small_values_hide(broken):
    with pytest.raises(AssertionError, match="elements are wrong"):
        run_ranks(3, check_transport, wrap=break_transport(allreduce=broken))


def test_check_transport_finds_mistakes_above_a_size():
    def allgather(self, x, out):
        self.inner.allgather(x, out)
        if x.nbytes > 65536 and self.rank:
            out.reshape(-1)[-1:] = 0

    with pytest.raises(AssertionError, match="allgather of 65537 int8"):
        run_ranks(2, check_transport, wrap=break_transport(allgather=allgather))


def test_values_from_the_whole_range_include_nan_infinities_and_tiny_numbers():
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        x = whole_range(0, (3, 1000), dtype).astype(np.float64)
        tiny = np.abs(x[x != 0])
        assert np.isnan(x).any()
        assert {-np.inf, np.inf} <= set(x.reshape(-1).tolist())
        assert {True, False} == set(np.signbit(x[x == 0]).tolist())
        assert np.nanmin(tiny) < {"float16": 6.2e-5, "float64": 2.3e-308}.get(dtype, 1.2e-38)
    assert whole_range(1, (2, 3), "complex64").shape == (2, 3)
    assert set(whole_range(1, (50,), "bool").tolist()) == {True, False}
    assert whole_range(2, (), "uint64").shape == ()


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
def test_check_codec_finds_breaches_of_the_contract(codec):
    with pytest.raises(AssertionError):
        check_codec(codec())


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


def test_kits_pass_classes_that_keep_the_contract():
    check_codec(MinMaxUInt8(block=33))
    check_algorithm(ByteGrad(), sizes=(1, 3))


@dataclass(frozen=True)
class Nothing(Algorithm):
    """An algorithm of a user, made of parts."""

    payload = "grad"
    window = GradientAllReduce().window
    average: object = None

    def check(self, dtype):
        pass

    def init(self, bucket, comm):
        return None

    def exchange(self, bucket, comm, state):
        comm.allreduce(bucket.flat, out=bucket.flat, op="avg")

    def commit(self, bucket, state):
        pass


@pytest.mark.parametrize(
    "algorithm",
    [
        every(2, Nothing()),
        after(2, GradientAllReduce(), every(2, Nothing())),
        GradientAllReduce(Quantized(OfYourOwn(block=9))),
        GradientAllReduce(Hierarchical(Quantized(OfYourOwn(block=9)))),
        Nothing((OfYourOwn(), [OfYourOwn(3)], {"a": OfYourOwn(4)})),
    ],
    ids=repr,
)
def test_check_algorithm_finds_the_classes_of_the_parts_of_an_algorithm(algorithm):
    check_algorithm(algorithm, sizes=(1,))


@dataclass(frozen=True)
class FourBits(Codec):
    """Codes of four bits, one to a byte, behind the least value and the step of a chunk."""

    dtypes = frozenset({"float32"})

    def wire_nbytes(self, count, dtype):
        return 8 + count

    def _encode(self, chunks, wire):
        with np.errstate(all="ignore"):
            for x, row in zip(chunks, wire, strict=True):
                low, high = (x.min(), x.max()) if x.size else (np.float32(0), np.float32(0))
                step = np.float32(np.float64(high) / 15 - np.float64(low) / 15)
                row[:8] = np.array([low, step], np.float32).view(np.uint8)
                codes = np.rint(x.astype(np.float64) / step - low / np.float64(step))
                row[8:] = np.nan_to_num(np.clip(codes, 0, 15))

    def _decode(self, wire, out):
        with np.errstate(all="ignore"):
            for x, row in zip(out, wire, strict=True):
                low, step = row[:8].view(np.float32).astype(np.float64)
                x[...] = low + row[8:] * step

    def _combine(self, wire, out, op, count, dtype):
        x = np.empty((len(wire), count), np.float32)
        self._decode(wire, x)
        self._encode(reduced(list(x), op)[None], out)


def test_a_codec_of_four_bits_passes_with_an_error_of_its_own():
    check_codec(FourBits(), error=1 / 16)
    with pytest.raises(AssertionError, match="off by"):
        check_codec(FourBits())


@dataclass(frozen=True)
class Zeros(Nothing):
    def exchange(self, bucket, comm, state):
        bucket.flat[...] = 0


def test_check_algorithm_notices_gradients_replaced_by_zeros():
    with pytest.raises(AssertionError, match="replaced all gradients by zeros"):
        check_algorithm(Zeros(), sizes=(1,))


def test_check_codec_says_that_a_repr_hides_the_settings():
    class Bare(OfYourOwn):
        __repr__ = object.__repr__

    with pytest.raises(AssertionError, match=r"Bare object at .* hides the settings"):
        check_codec(Bare())
