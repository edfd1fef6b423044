"""The quantized collectives over a transport, as a part of its test."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import arrays
from ..arrays import Array
from ..averages import quantized_allgather, quantized_allreduce, quantized_reduce_scatter
from ..codecs import MinMaxUInt8
from ..comm import Communicator
from .values import reduced, sample


def check_quantized(comm: Communicator, asarray: Callable[[Array], Array]) -> None:
    """Compare reduce-scatter, allgather and allreduce of encoded arrays with NumPy, and with each other.

    Collective. In chunks of equal and unequal sizes.

    Raises:
        AssertionError: A result is wrong; the message names the call.
        CommMismatch: Ranks hold different bytes where all should hold the same.
    """
    p, codec, dtype = comm.size, MinMaxUInt8(block=32), np.dtype(np.float32)
    for count in (96, 20_000):
        xs = [sample(r, (p * count,), "float32", seed=6) for r in range(p)]
        coded = [codec.decode(codec.encode(x.reshape(p, count)), np.empty((p, count), dtype)) for x in xs]
        coded = coded if p > 1 else [xs[0].reshape(1, count)]  # nothing is encoded
        mine = asarray(xs[comm.rank])
        for op in ("sum", "avg"):
            chunk = quantized_reduce_scatter(comm, mine, op=op, codec=codec)
            expected = reduced([rows[comm.rank] for rows in coded], op)
            _assert_same(chunk, expected, f"quantized_reduce_scatter {op} of {p * count}")
            both = quantized_allgather(comm, chunk, codec=codec).reshape(-1)
            total = quantized_allreduce(comm, mine, op=op, codec=codec)
            _assert_same(total, arrays.to_host(both), f"quantized_allreduce {op} of {p * count}")
        counts = [min(32 * (r + 1), count) if r != 1 else 0 for r in range(p)]
        part = quantized_reduce_scatter(comm, mine[: sum(counts)], op="sum", codec=codec, counts=counts)
        comm.check_consistency(quantized_allgather(comm, part, codec=codec, counts=counts))
        start = sum(counts[: comm.rank])
        rows = [rows.reshape(-1)[start : start + counts[comm.rank]] for rows in coded]
        _assert_same(part, reduced(rows, "sum"), f"quantized_reduce_scatter by {counts}")


def _assert_same(actual: Array, expected: Array, what: str) -> None:
    assert arrays.to_host(actual).tobytes() == expected.tobytes(), (
        f"{what} differs from NumPy's, or from its parts"
    )
