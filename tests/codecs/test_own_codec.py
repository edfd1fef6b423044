"""A codec as users write one: a size, encode and decode on NumPy arrays, by public names alone."""

from dataclasses import dataclass

import numpy as np
import pytest

from bagua_comm import (
    Codec,
    Engine,
    ErrorFeedback,
    GradientAllReduce,
    Hierarchical,
    Plan,
    Quantized,
    TensorSpec,
    quantized_allreduce,
)
from bagua_comm.codecs import largest_finite, padded
from bagua_comm.testing import check_algorithm, check_codec, run_ranks, sample


@dataclass(frozen=True)
class MinMaxUInt4(Codec):
    """Four bits for each element, between the minimum and the maximum of its block; two codes share a byte.

    The minima and maxima of all blocks come first, in the dtype of the elements, then the codes.
    """

    block: int = 128

    @property
    def granule(self):
        return self.block

    def wire_nbytes(self, count, dtype):
        return self._start(count, dtype) + padded(-(-count // 2))

    def _start(self, count, dtype):
        """The byte at which the codes begin."""
        return padded(2 * self._blocks(count) * dtype.itemsize)

    def _blocks(self, count):
        return -(-count // self.block)

    def _encode(self, chunks, wire):
        (n, m), dtype = chunks.shape, chunks.dtype
        whole = np.zeros((n, self._blocks(m) * self.block), np.float32)
        whole[:, :m] = chunks
        whole[:, m:] = whole[:, m - 1 : m]  # the last block may be shorter
        blocks = whole.reshape(n, -1, self.block)
        with np.errstate(all="ignore"):
            ends = np.stack([blocks.min(-1), blocks.max(-1)], axis=-1)
            ends[~np.isfinite(ends).all(-1)] = np.nan
            low, high = ends[..., :1], ends[..., 1:]
            codes = np.rint((blocks - low) / (high / 15 - low / 15))
            codes = np.nan_to_num(np.clip(codes, 0, 15)).astype(np.uint8).reshape(n, -1)[:, :m]
        codes = np.pad(codes, ((0, 0), (0, m % 2)))
        wire[...] = 0
        wire[:, : ends[0].size * dtype.itemsize] = ends.astype(dtype).reshape(n, -1).view(np.uint8)
        start = self._start(m, dtype)
        wire[:, start : start + codes.shape[1] // 2] = codes[:, ::2] | codes[:, 1::2] << 4

    def _decode(self, wire, out):
        (n, m), dtype = out.shape, out.dtype
        blocks, start = self._blocks(m), self._start(m, dtype)
        ends = wire[:, : 2 * blocks * dtype.itemsize].copy().view(dtype).astype(np.float32).reshape(n, blocks, 2)
        packed = wire[:, start : start + -(-m // 2)]
        codes = np.zeros((n, blocks * self.block), np.float32)
        codes[:, :m] = np.stack([packed & 15, packed >> 4], axis=-1).reshape(n, -1)[:, :m]
        low, high = ends[..., :1], ends[..., 1:]
        with np.errstate(all="ignore"):
            x = low + codes.reshape(n, blocks, self.block) * (high / 15 - low / 15)
        limit = largest_finite(dtype)
        out[...] = np.clip(x.reshape(n, -1)[:, :m], -limit, limit).astype(dtype)


def test_two_methods_and_a_size_are_a_codec():
    check_codec(MinMaxUInt4(), error=1 / 16)
    check_codec(MinMaxUInt4(block=33), error=1 / 16)
    with pytest.raises(AssertionError, match="off by"):
        check_codec(MinMaxUInt4())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_it_combines_like_decoding_adding_and_encoding(dtype, op):
    codec = MinMaxUInt4(block=8)
    x = sample(0, (3, 50), dtype)
    wire = codec.encode(x)
    decoded = codec.decode(wire, np.empty_like(x)).astype(np.float32)
    total = (decoded[0] + decoded[1]) + decoded[2]
    expected = codec.encode((total / np.float32(3) if op == "avg" else total)[None].astype(x.dtype))
    assert codec.combine(wire, op=op, count=50, dtype=x.dtype).tobytes() == expected.tobytes()
    out = np.empty_like(expected)
    codec.steps(50, x).combine(wire, out, op=op)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("count", [0, 1, 5, 10_001, 300_000])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_averages_to_the_same_bytes_on_all_ranks(ranks, count):
    def body(comm):
        x = sample(comm.rank, (count,), "float32")
        mean = quantized_allreduce(comm, x, codec=MinMaxUInt4(), op="avg")
        comm.check_consistency(mean)
        return mean, comm.allreduce(x, op="avg")

    mean, exact = run_ranks(ranks, body)[0]
    np.testing.assert_allclose(mean, exact, atol=2 * 8 / 15)  # two roundings, of values between about -4 and 4


@pytest.mark.parametrize(
    "average",
    [
        Quantized(MinMaxUInt4(), min_bytes=0),
        ErrorFeedback(Quantized(MinMaxUInt4())),
        Hierarchical(Quantized(MinMaxUInt4())),
    ],
    ids=repr,
)
def test_algorithms_train_with_it(average):
    check_algorithm(GradientAllReduce(average), sizes=(2,))


def test_a_codec_without_decode_cannot_be_made():
    class OneWay(Codec):
        def wire_nbytes(self, count, dtype):
            return count

        def _encode(self, chunks, wire):
            wire[...] = 0

    with pytest.raises(TypeError, match="_decode"):
        OneWay()


def test_an_engine_lets_codecs_compile_before_its_lane_works():
    class Slow(MinMaxUInt4):
        coded = 0
        __hash__ = None

        def _encode(self, chunks, wire):
            Slow.coded += 1
            super()._encode(chunks, wire)

    def body(comm):
        plan = Plan.pack([TensorSpec("weight", (3,), "float32")])
        with Engine(comm, GradientAllReduce(Quantized(Slow())), plan, plan.allocate()):
            return Slow.coded

    assert min(run_ranks(2, body)) > 0
