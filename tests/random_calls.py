"""Random calls of a communicator, compared with NumPy bit for bit: the same sequence on every rank, from a seed.

`RandomCalls(comm, seed).run(range(300))` makes calls 0 to 299 of a seed. Each call is drawn from (seed, number)
alone, so one that fails can be made again by itself. The tests make a few hundred over each transport. To make
more:

    python -m bagua_comm run -n 4 tests/random_calls.py --seconds 600 --seed 7
    python -m bagua_comm run -n 3 tests/random_calls.py --seconds 600 --small     # all thresholds tiny
    python tests/random_calls.py --threads 4 --seconds 60
    python -m bagua_comm run -n 3 tests/random_calls.py --seconds 60 --op-order any    # floats by MPI
    python -m bagua_comm run -n 4 tests/random_calls.py --seed 7 --only 1234      # one call again

A call is a row of `CASES`: a function that takes a `Draw`, and returns a `Call`. To add a primitive, write such a
function: draw shape, dtype and operands (`draw.operands` gives the operands of all ranks, the same on each rank),
lay out this rank's operand at random (`draw.laid_out`), and say what to call and what NumPy expects.
"""

import argparse
import hashlib
import importlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bagua_comm import (
    ArrayError,
    CommMismatch,
    Float16,
    Int4,
    MinMaxUInt8,
    UnsupportedError,
    arrays,
    quantized_allgather,
    quantized_reduce_scatter,
)
from bagua_comm.arrays import BITWISE_OPS, FLOATS, INTEGERS, dtype_named
from bagua_comm.testing import reduced, sample, whole_range
from bagua_comm.testing.transports import assert_reduced, assert_same

REDUCED = sorted(INTEGERS | FLOATS)
MOVED = sorted(arrays.MOVABLE)
SIZES = (1 << 11, 1 << 12, 1 << 16, 1 << 17)
"""The larger arrays, or a rank's parts of them, have about these sizes in bytes."""

TAGS = (0, 1, "1", "halo")

LAYOUTS = ("plain", "fortran", "backwards", "gaps", "odd byte", "records", "part")
ON_DEVICE = ("plain", "gaps", "part")


@dataclass
class Call:
    """One rank's part in one call."""

    text: str
    run: Callable[[Any], Any]
    """Makes the call on a communicator."""
    check: Callable[[Any], None]
    """Raises AssertionError unless this result of `run` is right."""
    alike: bool = False
    """Whether all ranks get the same bytes."""


@dataclass
class Draw:
    """The source of a case's random numbers: `shared` gives the same on all ranks, `own` does not."""

    comm: Any
    seed: list[int]
    exact: bool = True
    on_device: bool = False
    sizes: tuple[int, ...] = SIZES
    shared: np.random.Generator = field(init=False)
    own: np.random.Generator = field(init=False)

    def __post_init__(self):
        self.shared = np.random.default_rng(self.seed)
        self.own = np.random.default_rng([*self.seed, 1 + self.comm.rank])

    def one_of(self, values):
        return values[int(self.shared.integers(len(values)))]

    def rank(self):
        return int(self.shared.integers(self.comm.size))

    def count(self):
        """A number of elements: mostly small; sometimes near a size in `sizes`, in all or for a rank's part."""
        if self.shared.random() < 0.8:
            return int(self.shared.integers(0, 70))
        about = self.one_of(self.sizes) // self.one_of((1, 2, 4, 8)) // self.one_of((1, self.comm.size))
        return max(0, about + int(self.shared.integers(-2, 3)))

    def shape(self, multiple=None):
        """A shape of any number of dimensions; with `multiple` not 0-d, and the first a multiple of it."""
        count = self.count()
        if multiple is None and count == 1 and self.shared.random() < 0.5:
            return ()
        columns = self.one_of((1, 1, 2, 3, 5))
        rows = -(-count // columns // (multiple or 1)) * (multiple or 1)
        if columns > 1 and self.shared.random() < 0.3:
            return (rows, 1, columns)
        return (rows, columns) if columns > 1 else (rows,)

    def counts(self):
        """How many elements each rank has; some ranks have none."""
        return [self.count() * self.one_of((0, 1, 1)) for _ in range(self.comm.size)]

    def op(self, dtype):
        return self.one_of(arrays.ARITHMETIC_OPS + (BITWISE_OPS if dtype in INTEGERS else ()))

    def operands(self, shape, dtype, op="max"):
        """The operands of all ranks."""
        seed = int(self.shared.integers(1 << 30))
        rounded = dtype in FLOATS | arrays.COMPLEX and op not in ("min", "max") and not self.exact
        draw = sample if rounded else whole_range
        return [draw(rank, shape, dtype, seed) for rank in range(self.comm.size)]

    def laid_out(self, values, writable=True):
        """A copy of `values` in a random layout of memory, which differs between ranks."""
        layout = str(self.own.choice(ON_DEVICE if self.on_device else LAYOUTS))
        shape, dtype = values.shape, values.dtype
        if self.on_device:
            import cupy

            memory = cupy.zeros((2, *shape) if layout == "part" else (*shape, 2), dtype)
            copy = cupy.asarray(values)
            if layout != "plain":
                place = memory[1, ...] if layout == "part" else memory[..., 1]
                place[...] = copy
                return place
            return copy
        if layout == "fortran":
            out = values.copy(order="F")
        elif layout == "backwards":
            reverse = (..., *[slice(None, None, -1)] * values.ndim)
            out = values[reverse].copy()[reverse]
        elif layout == "gaps":
            out = np.zeros((*shape, 3), dtype)[..., 1]
        elif layout == "odd byte":
            out = np.frombuffer(bytearray(values.nbytes + 1), np.uint8)[1:].view(dtype).reshape(shape)
        elif layout == "records":
            out = np.zeros(shape, [("tag", "u1"), ("value", dtype)])["value"]
        elif layout == "part":
            out = np.zeros((3, *shape), dtype)[1, ...]
        else:
            out = np.zeros(shape, dtype)
        out[...] = values
        if not writable and self.own.random() < 0.3:
            out.flags.writeable = False
        return out

    def out(self, shape, dtype, x=None):
        """An array for a result: None, other memory, or `x` if that is given."""
        choice = self.own.random()
        if choice < 0.3:
            return None
        if choice < 0.6 and x is not None:
            return x
        return self.place(shape, dtype)

    def place(self, shape, dtype):
        return self.laid_out(np.full(shape, 1, dtype_named(dtype)))


def host(x):
    return x if isinstance(x, np.ndarray) else x.get()


def moving(text, run, expected, alike=False):
    """A call whose result has the bytes of `expected`, or is None if that is."""

    def check(result):
        if expected is None:
            assert result is None
        else:
            assert_same(result, expected, text)

    return Call(text, run, check, alike)


def reducing(draw, text, run, xs, op, chunk=..., alike=False):
    """A call whose result is this chunk of the reduction of `xs`."""

    def check(result):
        assert_reduced(result, reduced(xs, op)[chunk], op, draw.exact, text)

    return Call(text, run, check, alike)


# ---------------------------------------------------------------------------------------------------
# Reductions
# ---------------------------------------------------------------------------------------------------


def allreduce(draw):
    dtype, shape = draw.one_of(REDUCED), draw.shape()
    op = draw.op(dtype)
    xs = draw.operands(shape, dtype, op)
    x = draw.laid_out(xs[draw.comm.rank])
    out = draw.out(shape, dtype, x)
    text = f"allreduce of {dtype}{shape}, op={op}"

    def check(result):
        assert out is None or result is out
        assert_reduced(result, reduced(xs, op), op, draw.exact, text)
        if out is not x:
            assert_same(x, xs[draw.comm.rank], f"the operand of {text}")

    return Call(text, lambda comm: comm.allreduce(x, out, op=op), check, alike=True)


def reduce(draw):
    dtype, shape, root = draw.one_of(REDUCED), draw.shape(), draw.rank()
    op = draw.op(dtype)
    xs = draw.operands(shape, dtype, op)
    x = draw.laid_out(xs[draw.comm.rank])
    out = draw.out(shape, dtype, x)
    text = f"reduce of {dtype}{shape}, op={op}, root={root}"

    if draw.comm.rank != root:
        return moving(text, lambda comm: comm.reduce(x, out, root=root, op=op), None)
    return reducing(draw, text, lambda comm: comm.reduce(x, out, root=root, op=op), xs, op)


def reduce_scatter(draw):
    p, rank = draw.comm.size, draw.comm.rank
    dtype, shape = draw.one_of(REDUCED), draw.shape(multiple=p)
    op = draw.op(dtype)
    xs = draw.operands(shape, dtype, op)
    x = draw.laid_out(xs[rank])
    chunk = slice(rank * (shape[0] // p), (rank + 1) * (shape[0] // p))
    own = x[chunk] if arrays.is_contiguous(x) else None
    out = draw.out((shape[0] // p, *shape[1:]), dtype, own)
    text = f"reduce_scatter of {dtype}{shape}, op={op}"
    return reducing(draw, text, lambda comm: comm.reduce_scatter(x, out, op=op), xs, op, chunk)


def reduce_scatter_by_counts(draw):
    rank, dtype = draw.comm.rank, draw.one_of(REDUCED)
    counts, op = draw.counts(), draw.op(dtype)
    xs = draw.operands((sum(counts),), dtype, op)
    x, out = draw.laid_out(xs[rank], writable=False), draw.out((counts[rank],), dtype)
    text = f"reduce_scatter of {dtype}, counts={counts}, op={op}"
    chunk = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    return reducing(draw, text, lambda comm: comm.reduce_scatter(x, out, op=op, counts=counts), xs, op, chunk)


def quantized_shards(draw):
    """A quantized reduce-scatter by counts, and an allgather of its results."""
    p, rank, counts = draw.comm.size, draw.comm.rank, draw.counts()
    codecs = MinMaxUInt8(block=16), MinMaxUInt8(), Float16(), Int4()
    op, codec = draw.one_of(("sum", "avg")), draw.one_of(codecs)
    xs = [x.astype(np.float32) for x in draw.operands((sum(counts),), "float16", op)]
    x, out = draw.laid_out(xs[rank], writable=False), draw.out((counts[rank],), "float32")
    bounds = [slice(sum(counts[:r]), sum(counts[: r + 1])) for r in range(p)]

    def decoded(x):
        rows = x.reshape(1, -1)
        return codec.decode(codec.encode(rows), np.empty_like(rows))[0] if p > 1 and x.size else x

    chunks = [reduced([decoded(x[chunk]) for x in xs], op) if p > 1 else xs[0] for chunk in bounds]
    everything = np.concatenate([decoded(chunk) for chunk in chunks])

    def run(comm):
        mine = quantized_reduce_scatter(comm, x, out, op=op, codec=codec, counts=counts)
        return mine, quantized_allgather(comm, mine, codec=codec, counts=counts)

    def check(result):
        assert_same(result[0], chunks[rank], text)
        assert_same(result[1], everything, text)

    text = f"quantized reduce_scatter and allgather, counts={counts}, op={op}, codec={codec}"
    return Call(text, run, check)


def scan(draw, exclusive=False):
    rank, dtype, shape = draw.comm.rank, draw.one_of(REDUCED), draw.shape()
    op = draw.op(dtype)
    xs = draw.operands(shape, dtype, op)
    x = draw.laid_out(xs[rank])
    out = draw.out(shape, dtype, x)
    text = f"{'exscan' if exclusive else 'scan'} of {dtype}{shape}, op={op}"
    before = None if out is None else host(out).copy()

    def check(result):
        if exclusive and rank == 0:
            assert result is out
            if out is not None:
                assert_same(result, before, text)
        else:
            assert_reduced(result, reduced(xs[: rank + (not exclusive)], op), op, draw.exact, text)

    return Call(text, lambda comm: (comm.exscan if exclusive else comm.scan)(x, out, op=op), check)


def exscan(draw):
    return scan(draw, exclusive=True)


def complex_sum(draw):
    dtype, shape, op = draw.one_of(sorted(arrays.COMPLEX)), draw.shape(), draw.one_of(("sum", "avg"))
    xs = draw.operands(shape, dtype, op)
    x = draw.laid_out(xs[draw.comm.rank])
    out = draw.out(shape, dtype, x)
    text = f"allreduce of {dtype}{shape}, op={op}"
    parts = [each.reshape(-1).view(each.real.dtype) for each in xs]

    def check(result):
        found = host(result)
        assert (found.shape, found.dtype) == (shape, dtype)
        found = np.ascontiguousarray(found).reshape(-1).view(parts[0].dtype)
        assert_reduced(found, reduced(parts, op), op, draw.exact, text)

    return Call(text, lambda comm: comm.allreduce(x, out, op=op), check, alike=True)


def allreduce_many(draw):
    rank, op = draw.comm.rank, draw.one_of(arrays.ARITHMETIC_OPS)
    kinds = [(draw.one_of(REDUCED), draw.shape()) for _ in range(int(draw.shared.integers(0, 6)))]
    xs = [draw.operands(shape, dtype, op) for dtype, shape in kinds]
    mine = [draw.laid_out(each[rank]) for each in xs]
    outs = [draw.out(shape, dtype, x) for (dtype, shape), x in zip(kinds, mine, strict=True)]
    text = f"allreduce_many of {kinds}, op={op}"

    def check(results):
        for result, each in zip(results, xs, strict=True):
            assert_reduced(result, reduced(each, op), op, draw.exact, text)

    return Call(text, lambda comm: comm.allreduce_many(mine, outs, op=op), check)


# ---------------------------------------------------------------------------------------------------
# Movement
# ---------------------------------------------------------------------------------------------------


def broadcast(draw):
    dtype, shape, root = draw.one_of(MOVED), draw.shape(), draw.rank()
    xs = draw.operands(shape, dtype)
    x = draw.laid_out(xs[draw.comm.rank], writable=draw.comm.rank != root)
    text = f"broadcast of {dtype}{shape}, root={root}"
    return moving(text, lambda comm: comm.broadcast(x, root=root), xs[root], alike=True)


def allgather(draw):
    p, rank = draw.comm.size, draw.comm.rank
    dtype, shape = draw.one_of(MOVED), draw.shape()
    xs = draw.operands(shape, dtype)
    x, out = draw.laid_out(xs[rank], writable=False), draw.out((p, *shape), dtype)
    if out is not None and arrays.is_contiguous(out) and draw.own.random() < 0.5:
        x = out[rank, ...]
        x[...] = draw.laid_out(xs[rank])
    text = f"allgather of {dtype}{shape}"
    return moving(text, lambda comm: comm.allgather(x, out), np.stack(xs), alike=True)


def alltoall(draw):
    p, rank = draw.comm.size, draw.comm.rank
    dtype, shape = draw.one_of(MOVED), draw.shape(multiple=p)
    xs = draw.operands(shape, dtype)
    x = draw.laid_out(xs[rank])
    out = draw.out(shape, dtype, x)
    text = f"alltoall of {dtype}{shape}"
    chunk = slice(rank * (shape[0] // p), (rank + 1) * (shape[0] // p))
    return moving(text, lambda comm: comm.alltoall(x, out), np.concatenate([each[chunk] for each in xs]))


def gather(draw):
    p, rank = draw.comm.size, draw.comm.rank
    dtype, shape, root = draw.one_of(MOVED), draw.shape(), draw.rank()
    xs = draw.operands(shape, dtype)
    x, out = draw.laid_out(xs[rank], writable=False), draw.out((p, *shape), dtype)
    text = f"gather of {dtype}{shape}, root={root}"
    return moving(text, lambda comm: comm.gather(x, out, root=root), np.stack(xs) if rank == root else None)


def scatter(draw):
    p, rank = draw.comm.size, draw.comm.rank
    dtype, shape, root = draw.one_of(MOVED), draw.shape(), draw.rank()
    xs = draw.operands((p, *shape), dtype)
    x = draw.laid_out(xs[root], writable=False) if rank == root else None
    out = draw.out(shape, dtype) if rank == root else draw.place(shape, dtype)
    text = f"scatter of {dtype}{(p, *shape)}, root={root}"
    return moving(text, lambda comm: comm.scatter(x, out, root=root), xs[root][rank, ...])


def allgather_by_counts(draw):
    rank, dtype = draw.comm.rank, draw.one_of(MOVED)
    counts = draw.counts()
    xs = [draw.operands((count,), dtype)[r] for r, count in enumerate(counts)]
    x, out = draw.laid_out(xs[rank], writable=False), draw.place((sum(counts),), dtype)
    text = f"allgather of {dtype}, counts={counts}"
    return moving(text, lambda comm: comm.allgather(x, out, counts=counts), np.concatenate(xs), alike=True)


def alltoall_by_counts(draw):
    p, rank = draw.comm.size, draw.comm.rank
    dtype = draw.one_of(MOVED)
    counts = [[draw.count() * draw.one_of((0, 1)) for _ in range(p)] for _ in range(p)]  # [i][j]: from i to j
    xs = [draw.operands((sum(row),), dtype)[i] for i, row in enumerate(counts)]
    incoming = [row[rank] for row in counts]
    x, out = draw.laid_out(xs[rank], writable=False), draw.place((sum(incoming),), dtype)
    expected = np.concatenate([xs[i][sum(counts[i][:rank]) :][: counts[i][rank]] for i in range(p)])
    text = f"alltoall of {dtype}, counts={counts}"
    return moving(text, lambda comm: comm.alltoall(x, out, counts=counts[rank], out_counts=incoming), expected)


def gather_by_counts(draw):
    rank, dtype, root = draw.comm.rank, draw.one_of(MOVED), draw.rank()
    counts = draw.counts()
    xs = [draw.operands((count,), dtype)[r] for r, count in enumerate(counts)]
    x, out = draw.laid_out(xs[rank], writable=False), draw.out((sum(counts),), dtype)
    text = f"gather of {dtype}, counts={counts}, root={root}"
    given, expected = (counts, np.concatenate(xs)) if rank == root else (None, None)
    return moving(text, lambda comm: comm.gather(x, out, root=root, counts=given), expected)


def scatter_by_counts(draw):
    rank, dtype, root = draw.comm.rank, draw.one_of(MOVED), draw.rank()
    counts = draw.counts()
    whole = draw.operands((sum(counts),), dtype)[root]
    x = draw.laid_out(whole, writable=False) if rank == root else None
    out = draw.out((counts[rank],), dtype) if rank == root else draw.place((counts[rank],), dtype)
    text = f"scatter of {dtype}, counts={counts}, root={root}"
    given, expected = counts if rank == root else None, whole[sum(counts[:rank]) :][: counts[rank]]
    return moving(text, lambda comm: comm.scatter(x, out, root=root, counts=given), expected)


def broadcast_many(draw):
    rank, root = draw.comm.rank, draw.rank()
    kinds = [(draw.one_of(MOVED), draw.shape()) for _ in range(int(draw.shared.integers(0, 6)))]
    xs = [draw.operands(shape, dtype) for dtype, shape in kinds]
    mine = [draw.laid_out(each[rank]) for each in xs]
    text = f"broadcast_many of {kinds}, root={root}"

    def check(results):
        for result, each in zip(results, xs, strict=True):
            assert_same(result, each[root], text)

    return Call(text, lambda comm: comm.broadcast_many(mine, root=root), check)


# ---------------------------------------------------------------------------------------------------
# Point to point, objects, and calls that must fail
# ---------------------------------------------------------------------------------------------------


def sendrecv(draw):
    p, rank = draw.comm.size, draw.comm.rank
    dtype, shape, hop = draw.one_of(MOVED), draw.shape(), draw.rank()
    xs = draw.operands(shape, dtype)
    x, out = draw.laid_out(xs[rank], writable=False), draw.place(shape, dtype)
    dest, source = (rank + hop) % p, (rank - hop) % p
    text = f"sendrecv of {dtype}{shape} over {hop} ranks"
    return moving(text, lambda comm: comm.sendrecv(x, out, dest=dest, source=source), xs[source])


def send_and_recv(draw):
    """From one rank to another, while the others do something else."""
    rank, dtype, shape = draw.comm.rank, draw.one_of(MOVED), draw.shape()
    source, dest = draw.rank(), draw.rank()
    xs = draw.operands(shape, dtype)
    x, out = draw.laid_out(xs[rank], writable=False), draw.place(shape, dtype)
    text = f"send of {dtype}{shape} from {source} to {dest}"

    def run(comm):
        if source == dest == rank:
            comm.exchange([(dest, x)], [(source, out)])
        elif rank == source:
            comm.send(x, dest=dest)
        elif rank == dest:
            comm.recv(out, source=source)

    def check(result):
        if rank == dest:
            assert_same(out, xs[source], text)

    return Call(text, run, check)


def exchange(draw):
    """Any messages between any ranks, several between the same two, unless `exchange` refuses them.

    Those of a tag are in order; tags are not.
    """
    p, rank = draw.comm.size, draw.comm.rank
    messages, alike = [], Counter()
    for _ in range(int(draw.shared.integers(0, 3 * p))):
        source, dest, dtype, shape = draw.rank(), draw.rank(), draw.one_of(MOVED), draw.shape()
        tag = draw.one_of(TAGS)
        x = draw.operands(shape, dtype)[source]
        alike[source, dest, tag, x.nbytes] += 1
        if min(alike[source, dest, tag, x.nbytes], alike[dest, source, tag, x.nbytes]) < 2:
            messages.append((source, dest, tag, x))
    sends = [(dest, draw.laid_out(x, writable=False), tag) for source, dest, tag, x in messages if source == rank]
    order = draw.own.permutation(len(TAGS))
    expected = [(source, tag, x) for source, dest, tag, x in messages if dest == rank]
    expected.sort(key=lambda message: order[TAGS.index(message[1])])
    recvs = [(source, draw.laid_out(np.zeros_like(x)), tag) for source, tag, x in expected]
    text = f"exchange of {[(source, dest, tag, x.dtype.name, x.shape) for source, dest, tag, x in messages]}"

    def check(result):
        for (_, out, _), (_, _, x) in zip(recvs, expected, strict=True):
            assert_same(out, x, text)

    return Call(text, lambda comm: comm.exchange(sends, recvs), check)


def recv_of_another_size(draw):
    """The receiver gets an error, and both ranks can go on."""
    p, rank = draw.comm.size, draw.comm.rank
    source, hop, count = draw.rank(), draw.rank(), draw.count() // 2 * 2
    dest = (source + hop) % p  # as `count` + 1 is odd, they can go on even if messages are split at an even size
    if source == dest or draw.on_device:
        return barrier(draw)

    def run(comm):
        if rank == source:
            comm.send(np.zeros(count, np.int8), dest=dest)
        if rank == dest:
            raises(CommMismatch, lambda: comm.recv(np.zeros(count + 1, np.int8), source=source))

    return Call(f"recv of {count + 1} bytes where {count} come, {source} to {dest}", run, lambda result: None)


def barrier(draw):
    return Call("barrier", lambda comm: comm.barrier(), lambda result: None)


def objects(draw):
    root, count = draw.rank(), draw.count() // 10
    everyone = [{"rank": rank, "text": "x" * (count * (rank + 1) % 1000)} for rank in range(draw.comm.size)]

    def run(comm):
        mine = everyone[comm.rank]
        return comm.broadcast_object(mine if comm.rank == root else None, root=root), comm.allgather_object(mine)

    def check(result):
        assert result == (everyone[root], everyone)

    return Call(f"objects, root={root}", run, check)


def consistency(draw):
    dtype, shape, odd = draw.one_of(MOVED), draw.shape(), draw.rank()
    values = draw.operands(shape, dtype)[0]
    x = draw.laid_out(values)
    differ = draw.comm.size > 1 and draw.shared.random() < 0.5
    if differ and draw.comm.rank == odd:
        x = draw.laid_out(np.append(values.reshape(-1), values.dtype.type(0)))

    def run(comm):
        if differ:
            raises(CommMismatch, lambda: comm.check_consistency(x))
        else:
            comm.check_consistency(x)

    return Call(f"check_consistency of {dtype}{shape}, odd={odd if differ else None}", run, lambda result: None)


def wrong(draw):
    """A call that every rank must refuse before it sends anything."""
    p, dtype = draw.comm.size, draw.one_of(REDUCED)
    shape = (p * (1 + draw.count()), 2)
    values = draw.operands(shape, dtype)[draw.comm.rank]
    x = draw.laid_out(values)
    beyond = draw.one_of((-1, p, p + 7, 1.5, None))
    flat = np.zeros(p * 3 + 1, np.float32)
    text, error, run = draw.one_of(
        [
            ("op", ArrayError, lambda comm: comm.allreduce(x, op="mean")),
            ("bitwise floats", UnsupportedError, lambda comm: comm.allreduce(flat, op="bor")),
            ("complex", UnsupportedError, lambda comm: comm.reduce(flat.astype("c8"), root=0, op="max")),
            ("bool", UnsupportedError, lambda comm: comm.reduce_scatter(np.zeros(p, bool), op="max")),
            ("byte order", UnsupportedError, lambda comm: comm.allgather(flat.astype(flat.dtype.newbyteorder()))),
            ("objects", UnsupportedError, lambda comm: comm.alltoall(np.full(p, None))),
            ("a list", UnsupportedError, lambda comm: comm.allreduce([1, 2])),
            ("out's shape", ArrayError, lambda comm: comm.allreduce(x, draw.place((shape[0] + 1, 2), dtype))),
            ("out's dtype", ArrayError, lambda comm: comm.alltoall(flat[1:], flat[1:].astype("f8"))),
            (
                "out is read-only",
                ArrayError,
                lambda comm: comm.allreduce(flat, np.broadcast_to(flat[:1], flat.shape)),
            ),
            ("out overlaps", ArrayError, lambda comm: comm.alltoall(flat[1:], flat[:-1])),
            ("uneven", ArrayError, lambda comm: comm.reduce_scatter(flat[: p + 1] if p > 1 else flat[0])),
            ("root", ArrayError, lambda comm: comm.broadcast(x, root=beyond)),
            ("root", ArrayError, lambda comm: comm.gather(x, root=beyond)),
            ("dest", ArrayError, lambda comm: comm.send(x, dest=beyond or p)),
            ("counts", ArrayError, lambda comm: comm.allgather(x, x, counts=[1] * (p + 1))),
            ("counts", ArrayError, lambda comm: comm.alltoall(flat, flat, counts=[-1] * p, out_counts=[1] * p)),
            ("color", ArrayError, lambda comm: comm.split(-1)),
            ("lane", ArrayError, lambda comm: comm.lane("fast")),
        ]
    )

    def check(result):
        assert_same(x, values, "the operand of a wrong call")

    return Call(f"wrong: {text}", lambda comm: raises(error, lambda: run(comm)), check)


CASES = {
    allreduce: 4,
    reduce: 2,
    reduce_scatter: 3,
    broadcast: 2,
    allgather: 2,
    alltoall: 2,
    gather: 1,
    scatter: 1,
    allgather_by_counts: 1,
    alltoall_by_counts: 1,
    sendrecv: 1,
    send_and_recv: 1,
    exchange: 1,
    recv_of_another_size: 1,
    barrier: 1,
    objects: 1,
    reduce_scatter_by_counts: 1,
    quantized_shards: 1,
    scan: 1,
    exscan: 1,
    complex_sum: 1,
    allreduce_many: 1,
    gather_by_counts: 1,
    scatter_by_counts: 1,
    broadcast_many: 1,
    consistency: 1,
    wrong: 3,
}
"""How often each case is drawn."""


def raises(error, call):
    try:
        call()
    except error:
        return
    raise AssertionError(f"expected {error.__name__}")


# ---------------------------------------------------------------------------------------------------
# The sequence
# ---------------------------------------------------------------------------------------------------

GROUP_CALLS = 60
"""After this many calls, new groups are split off."""


class RandomCalls:
    """Makes the calls of a seed. Collective.

    Args:
        comm: The ranks; calls are made on it, on groups of its ranks and on its lane.
        seed: The seed of all random numbers.
        on_device: Whether arrays are CuPy's.
        sizes: Sizes in bytes; the larger arrays are about as large.
        lanes: Whether some calls are made on a lane, beside others.
    """

    def __init__(self, comm, seed=0, *, on_device=False, sizes=SIZES, lanes=True):
        self.comm, self.seed, self.on_device, self.sizes, self.lanes = comm, seed, on_device, tuple(sizes), lanes
        x = importlib.import_module("cupy" if on_device else "numpy").zeros(1)
        self.exact = comm.transport_for(x).adds_in_rank_order
        self.groups, self.lane = [], None
        self.made = 0

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if error is None:
            self._drop_groups()

    def run(self, numbers):
        """Make these calls; raises AssertionError, with the number of the call, if one is wrong."""
        for number in numbers:
            try:
                self._one(number)
            except Exception as exc:
                where = f"call {number} of seed {self.seed}, rank {self.comm.rank} of {self.comm.size}"
                raise AssertionError(f"{where}: {type(exc).__name__}: {exc}") from exc
            self.made += 1

    def _one(self, number):
        if self.made % GROUP_CALLS == 0:
            self._split_groups(number)
        shared = np.random.default_rng([self.seed, number])
        comm = ([self.comm] * 3 + self.groups)[int(shared.integers(3 + len(self.groups)))]
        on_lane = self.lane is not None and comm is self.comm and shared.random() < 0.15
        draws = [Draw(comm, [self.seed, number, i], self.exact, self.on_device, self.sizes) for i in range(4)]
        calls = [self._drawn(draw) for draw in (draws if on_lane else draws[:1])]
        if on_lane:
            waiting = [self.lane.submit(call.run, self.lane.comm) for call in calls[1:]]
            results = [calls[0].run(comm)]
            self.lane.wait()
            results += [future.result() for future in waiting]
        else:
            results = [calls[0].run(comm)]
        for call, result in zip(calls, results, strict=True):
            try:
                call.check(result)
                if call.alike:
                    self._compare(comm, host(result))
            except AssertionError as exc:
                raise AssertionError(f"{call.text} on {comm!r}{' on a lane' * on_lane}: {exc}") from exc

    def _drawn(self, draw):
        cases = list(CASES)
        weights = np.array([CASES[case] for case in cases], float)
        return cases[int(draw.shared.choice(len(cases), p=weights / weights.sum()))](draw)

    def _compare(self, comm, result):
        digest = hashlib.blake2b(result.tobytes(), digest_size=8).digest()
        everyones = comm.allgather(np.frombuffer(digest, np.uint64))
        assert (everyones == everyones[0]).all(), f"ranks hold different bytes: {everyones[:, 0].tolist()}"

    def _split_groups(self, number):
        self._drop_groups()
        shared = np.random.default_rng([self.seed, number, 7])
        colors, keys = shared.integers(0, 2, self.comm.size), shared.permutation(self.comm.size)
        self.groups = [self.comm.split(int(colors[self.comm.rank]), int(keys[self.comm.rank])), self.comm.dup()]
        if self.lanes:
            self.lane = self.comm.lane()

    def _drop_groups(self):
        for group in self.groups:
            group.close()
        if self.lane is not None:
            self.lane.close()
        self.groups, self.lane = [], None


SMALL = {
    "mpi.tuning": {
        "MESSAGE_BYTES": 102,
        "EAGER_BYTES": 200,
        "NATIVE_BYTES": 600,
        "PIECE_BYTES": 300,
        "FAST_PIECE_BYTES": 300,
        "PACED_BYTES": 300,
        "PACED_CODED_BYTES": 300,
        "LONG_BYTES": 2000,
        "LONG_PIECE_BYTES": 400,
        "SHOWN_BYTES": 1000,
        "SHARED_BYTES": 1500,
    },
    "mpi.shared_window": {"SLOT_BYTES": 1024, "PIECE_BYTES": 300},
}
"""Thresholds of transports, by module, with which small arrays take all the ways that large ones take."""

SMALL_SIZES = (101, 200, 300, 600, 1024, 1500, 3000)


def shrink_thresholds(assign=setattr):
    """Set the thresholds of `SMALL`; in a process of its own, or with an `assign` that is undone."""
    for module, thresholds in SMALL.items():
        for name, nbytes in thresholds.items():
            assign(importlib.import_module(f"bagua_comm.transports.{module}"), name, nbytes)


def main():
    parser = argparse.ArgumentParser(description="Compare random calls with NumPy.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="make this call alone")
    parser.add_argument("--small", action="store_true", help="thresholds of a few hundred bytes")
    parser.add_argument("--op-order", choices=("rank", "any"), default="rank")
    parser.add_argument("--threads", type=int, help="ranks are threads of this process")
    options = parser.parse_args()
    sizes = SMALL_SIZES if options.small else (*SIZES, 1 << 20)

    def body(comm):
        with RandomCalls(comm, options.seed, sizes=sizes) as calls:
            if options.only is not None:
                calls.run([options.only])
                return
            until, start = time.monotonic() + options.seconds, 0
            while comm.broadcast_object(time.monotonic() < until, root=0):
                calls.run(range(start, start + 100))
                start += 100
            if comm.rank == 0:
                print(f"{start} calls of seed {options.seed} on {comm.size} ranks gave what NumPy gives")

    if options.threads:
        from bagua_comm.testing import run_ranks

        run_ranks(options.threads, body)
        return
    import bagua_comm

    if options.small:
        shrink_thresholds()
    with bagua_comm.connect(timeout_s=60, op_order=options.op_order) as comm:
        body(comm)


if __name__ == "__main__":
    main()
