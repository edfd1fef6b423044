"""Collectives, timed and checked in the form of nccl-tests, beside mpi4py's own calls.

    mpirun -n 4 python benchmarks/collectives.py -b 8 -e 64M -f 4 -n 20 -w 5
    mpirun -n 4 python benchmarks/collectives.py quantized_allreduce --codec minmax float16
    mpirun -n 2 python benchmarks/collectives.py overhead
    mpirun -n 2 python benchmarks/collectives.py allreduce --gloo -b 1M -e 32M -f 2
    python benchmarks/collectives.py allreduce -e 1M

Runs of ours and of mpi4py's alternate call by call, on the same arrays: ours, theirs, ours, theirs. Both
read and write plain NumPy arrays; mpi4py has a duplicate of the world to itself. Before every call the
input is put back and the output poisoned, and after it every element is compared with NumPy's result.

Columns are those of nccl-tests; on their right, for each of the two forms, the time of mpi4py's call and
`ratio`, the median over the pairs of calls of ours / theirs. Instead of `#wrong`, quantized_allreduce has
`error`, the L2 distance from the float64 result relative to it; its bandwidths count the bytes of the
array, not those on the wire, which stand in `wire`: what rank 0 sent in one call. `overhead` compares the
fixed cost of a call: 8 bytes, in alternating batches. --gloo sets PyTorch's gloo beside allreduce too.

A dash is a call that does not exist: broadcast is always in place, as are gloo's calls, MPI does not add
float16, and without mpirun there is no MPI.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from common import (
    ERROR,
    SIZE_COLUMNS,
    WRONG,
    Call,
    Check,
    Column,
    Measurement,
    Spread,
    Table,
    add_sweep_arguments,
    allreduce_factor,
    at_least,
    bandwidth_gbs,
    begin_record,
    chunks_factor,
    header_lines,
    in_us,
    measure,
    number,
    out_of_bounds,
    poison,
    root_factor,
    sweep,
    time_columns,
    trailer,
    write_json,
)

import bagua_comm
from bagua_comm import (
    BaguaError,
    BFloat16,
    Codec,
    Communicator,
    Float16,
    MinMaxUInt8,
    quantized_allreduce,
)
from bagua_comm.arrays import (
    ARITHMETIC_OPS,
    BITWISE_OPS,
    FLOATS,
    INTEGERS,
    Array,
    DType,
    check_reduction,
    dtype_named,
)

CODECS: dict[str, Codec] = {
    "minmax": MinMaxUInt8(),
    "bagua": MinMaxUInt8.bagua(),
    "float16": Float16(),
    "bfloat16": BFloat16(),
}

# ---------------------------------------------------------------------------------------------------
# What a call works on
# ---------------------------------------------------------------------------------------------------

_PERIOD = 13
_MPI_DTYPES = INTEGERS | {"float32", "float64"}

_REDUCTIONS: dict[str, Any] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


@dataclass(frozen=True)
class Setting:
    """One call: which rank of how many makes it, and with what."""

    rank: int
    size: int
    count: int
    """As nccl-tests count: the elements of the array, or of one of its p chunks."""
    dtype: DType
    op: str
    root: int
    in_place: bool = False

    @cached_property
    def is_float(self) -> bool:
        """Whether an average is rounded rather than truncated."""
        return self.dtype.name in FLOATS

    @cached_property
    def in_mpi(self) -> bool:
        """Whether MPI knows the dtype."""
        return self.dtype.name in _MPI_DTYPES

    def chunk(self, x: Array) -> Array:
        """View this rank's chunk of `x`, (p * count,)."""
        return x[self.rank * self.count : (self.rank + 1) * self.count]

    def values(self, rank: int, count: int) -> Array:
        """Small integers, different for each rank, that repeat: their sums are exact in every dtype."""
        return _repeated(self._period(rank).astype(self.dtype), count)

    def reduced(self, count: int) -> Array:
        """What the reduction of all ranks' `values` should be."""
        total = _REDUCTIONS[self.op].reduce([self._period(rank) for rank in range(self.size)])
        if self.op == "avg":
            total = total / self.size if self.is_float else total // self.size
        return _repeated(total.astype(self.dtype), count)

    def _period(self, rank: int) -> Array:
        values = (np.arange(_PERIOD) + 5 * rank) % _PERIOD
        return 1 + values % 2 if self.op == "prod" else values

    def normal(self, rank: int) -> Array:
        """Normally distributed numbers, as gradients roughly are."""
        x = np.random.default_rng(rank).standard_normal(self.count, dtype=np.float32)
        return x.astype(self.dtype, copy=False)

    def reduced_normal(self) -> Array:
        """The float64 sum or mean of all ranks' `normal`."""
        total = np.zeros(self.count)
        for rank in range(self.size):
            total += self.normal(rank)
        return total / self.size if self.op == "avg" else total


def _repeated(period: Array, count: int) -> Array:
    return np.tile(period, -(-count // _PERIOD))[:count]


# ---------------------------------------------------------------------------------------------------
# mpi4py's side
# ---------------------------------------------------------------------------------------------------


class Mpi4py:
    """mpi4py's own calls, on a duplicate of the world; only under mpirun. Collective."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.MPI = MPI
        self.comm = MPI.COMM_WORLD.Dup()
        self._in_place = MPI.IN_PLACE
        self._ops = {
            "sum": MPI.SUM,
            "avg": MPI.SUM,
            "prod": MPI.PROD,
            "min": MPI.MIN,
            "max": MPI.MAX,
            "band": MPI.BAND,
            "bor": MPI.BOR,
            "bxor": MPI.BXOR,
        }

    def allreduce(self, s: Setting, x: Array, out: Array) -> Array:
        """Allreduce."""
        self.comm.Allreduce(self._in_place if s.in_place else x, out, self._ops[s.op])
        return _averaged(s, out)

    def reduce(self, s: Setting, x: Array, out: Array | None) -> Array | None:
        """Reduce."""
        if out is None or s.rank != s.root:
            self.comm.Reduce(x, None, self._ops[s.op], s.root)
            return None
        self.comm.Reduce(self._in_place if s.in_place else x, out, self._ops[s.op], s.root)
        return _averaged(s, out)

    def reduce_scatter(self, s: Setting, x: Array, out: Array) -> Array:
        """Reduce_scatter_block, which in place leaves its result at the start of `x`."""
        if not s.in_place:
            self.comm.Reduce_scatter_block(x, out, self._ops[s.op])
            return _averaged(s, out)
        self.comm.Reduce_scatter_block(self._in_place, x, self._ops[s.op])
        return _averaged(s, x[: s.count])

    def allgather(self, s: Setting, x: Array, out: Array) -> Array:
        """Allgather."""
        self.comm.Allgather(self._in_place if s.in_place else _movable(s, x), _movable(s, out))
        return out

    def alltoall(self, s: Setting, x: Array, out: Array) -> Array:
        """Alltoall."""
        self.comm.Alltoall(self._in_place if s.in_place else _movable(s, x), _movable(s, out))
        return out

    def broadcast(self, s: Setting, x: Array, out: Array) -> Array:
        """Bcast."""
        self.comm.Bcast(_movable(s, out), s.root)
        return out

    def close(self) -> None:
        """Free the duplicate. Collective."""
        self.comm.Free()


def _averaged(s: Setting, out: Array) -> Array:
    """MPI has no average: whoever wants one divides the sum."""
    if s.op != "avg":
        return out
    divide = np.divide if s.is_float else np.floor_divide
    result: Array = divide(out, s.size, out=out)
    return result


def _movable(s: Setting, x: Array) -> Array:
    """`x`, or its bytes if MPI does not know the dtype."""
    return x if s.in_mpi else x.view(np.uint8)


class Gloo:
    """PyTorch's gloo, over the same ranks and the loopback interface. Collective."""

    def __init__(self, comm: Communicator) -> None:
        import torch
        from torch import distributed

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._torch, self._distributed = torch, distributed
        with tempfile.TemporaryDirectory() as folder:
            store = comm.broadcast_object(f"file://{folder}/store", root=0)
            distributed.init_process_group("gloo", init_method=store, rank=comm.rank, world_size=comm.size)
            comm.barrier()

    def allreduce(self, s: Setting, x: Array, out: Array) -> Array:
        """all_reduce, in place."""
        op = getattr(self._distributed.ReduceOp, "SUM" if s.op == "avg" else s.op.upper())
        self._distributed.all_reduce(self._torch.from_numpy(out), op)
        return _averaged(s, out)

    def close(self) -> None:
        """End the process group. Collective."""
        self._distributed.destroy_process_group()


# ---------------------------------------------------------------------------------------------------
# The collectives
# ---------------------------------------------------------------------------------------------------

Ours = Callable[[Communicator, Setting, Array, Any], Any]
Theirs = Callable[[Mpi4py, Setting, Array, Any], Any]
OUT_OF_PLACE, IN_PLACE = "out-of-place", "in-place"
FORMS = (OUT_OF_PLACE, IN_PLACE)


@dataclass(frozen=True)
class Case:
    """One collective: what goes in, what must come out, how both sides call it, its bus bandwidth.

    Args:
        name: Of the operation.
        given: This rank's input.
        expected: This rank's result; None if it gets none.
        in_place: The arguments `x` and `out` of an in-place call, made from those of another.
        ours: Our call; returns the result.
        theirs: mpi4py's.
        bus_factor: Bus bandwidth / algorithm bandwidth, from the number of ranks.
        chunks: Whether the size is that of p chunks, of which `count` is one.
        reduces: Whether there is an `op`.
        rooted: Whether there is a `root`.
        forms: Out of place, in place, or both.
        check: How a result is judged.
        exact: Another call of ours to set beside.
        codec: What travels, if not the elements themselves.
        rivals: What ours is timed beside.
    """

    name: str
    given: Callable[[Setting], Array]
    expected: Callable[[Setting], Array | None]
    in_place: Callable[[Setting, Array, Any], tuple[Array, Array]]
    ours: Ours
    theirs: Theirs
    bus_factor: Callable[[int], float]
    chunks: bool = False
    reduces: bool = False
    rooted: bool = False
    forms: tuple[str, ...] = FORMS
    check: Check = WRONG
    exact: Ours | None = None
    codec: Codec | None = None
    rivals: tuple[str, ...] = ("mpi4py",)

    @property
    def title(self) -> str:
        """The operation, and its codec."""
        return f"{self.name} {self.codec}" if self.codec else self.name


def _whole(s: Setting, x: Array, out: Any) -> tuple[Array, Array]:
    return x, x


ALLREDUCE = Case(
    "allreduce",
    given=lambda s: s.values(s.rank, s.count),
    expected=lambda s: s.reduced(s.count),
    in_place=_whole,
    ours=lambda comm, s, x, out: comm.allreduce(x, out, op=s.op),
    theirs=Mpi4py.allreduce,
    bus_factor=allreduce_factor,
    reduces=True,
)

ALLGATHER = Case(
    "allgather",
    given=lambda s: s.values(s.rank, s.count),
    expected=lambda s: np.concatenate([s.values(rank, s.count) for rank in range(s.size)]),
    in_place=lambda s, x, out: (s.chunk(out), out),
    ours=lambda comm, s, x, out: comm.allgather(x, out),
    theirs=Mpi4py.allgather,
    bus_factor=chunks_factor,
    chunks=True,
)

REDUCE_SCATTER = Case(
    "reduce_scatter",
    given=lambda s: s.values(s.rank, s.size * s.count),
    expected=lambda s: s.chunk(s.reduced(s.size * s.count)),
    in_place=lambda s, x, out: (x, s.chunk(x)),
    ours=lambda comm, s, x, out: comm.reduce_scatter(x, out, op=s.op),
    theirs=Mpi4py.reduce_scatter,
    bus_factor=chunks_factor,
    chunks=True,
    reduces=True,
)

ALLTOALL = Case(
    "alltoall",
    given=lambda s: s.values(s.rank, s.size * s.count),
    expected=lambda s: np.concatenate([s.chunk(s.values(rank, s.size * s.count)) for rank in range(s.size)]),
    in_place=_whole,
    ours=lambda comm, s, x, out: comm.alltoall(x, out),
    theirs=Mpi4py.alltoall,
    bus_factor=chunks_factor,
    chunks=True,
)

BROADCAST = Case(
    "broadcast",
    given=lambda s: s.values(s.rank, s.count),
    expected=lambda s: s.values(s.root, s.count),
    in_place=_whole,
    ours=lambda comm, s, x, out: comm.broadcast(out, root=s.root),
    theirs=Mpi4py.broadcast,
    bus_factor=root_factor,
    rooted=True,
    forms=(IN_PLACE,),
)

REDUCE = Case(
    "reduce",
    given=lambda s: s.values(s.rank, s.count),
    expected=lambda s: s.reduced(s.count) if s.rank == s.root else None,
    in_place=_whole,
    ours=lambda comm, s, x, out: comm.reduce(x, out, root=s.root, op=s.op),
    theirs=Mpi4py.reduce,
    bus_factor=root_factor,
    reduces=True,
    rooted=True,
)


def quantized(codec: Codec) -> Case:
    """The quantized allreduce through `codec`, beside our exact one and mpi4py's."""
    return Case(
        "quantized_allreduce",
        given=lambda s: s.normal(s.rank),
        expected=Setting.reduced_normal,
        in_place=_whole,
        ours=lambda comm, s, x, out: quantized_allreduce(comm, x, out, codec=codec, op=s.op),
        theirs=Mpi4py.allreduce,
        bus_factor=allreduce_factor,
        reduces=True,
        check=ERROR,
        exact=ALLREDUCE.ours,
        codec=codec,
        rivals=("mpi4py", "exact"),
    )


EXACT = {case.name: case for case in (ALLREDUCE, ALLGATHER, REDUCE_SCATTER, ALLTOALL, BROADCAST, REDUCE)}
OPERATIONS = (*EXACT, "quantized_allreduce", "overhead")

# ---------------------------------------------------------------------------------------------------
# The sweep
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """Both sides: our communicator, and mpi4py's if mpirun started this process; gloo if asked for."""

    comm: Communicator
    mpi: Mpi4py | None
    gloo: Gloo | None = None

    @property
    def barrier(self) -> Callable[[], object]:
        """The barrier before every call, the same for both."""
        return self.mpi.comm.Barrier if self.mpi else self.comm.barrier

    def say(self, *lines: str) -> None:
        """Print, on rank 0."""
        if self.comm.rank == 0:
            print(*lines, sep="\n", flush=True)


def run_case(world: World, case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Sweep one collective over the sizes, print its table, and return its rows for JSON.

    Collective.
    """
    table = _table(case)
    world.say(f"# Collective test starting: {case.title}", *table.header())
    results = []
    for setting in _settings(world.comm, case, options):
        measured = {form: _measure_form(world, case, setting, form, options) for form in case.forms}
        result = _result(case, setting, measured)
        world.say(table.row(_cells(case, result)))
        results.append(result)
    forms = [form for result in results for form in result["forms"].values()]
    wrong = sum(_wrong(result) for result in results)
    world.say(*trailer(wrong, [form["busbw_gbs"] for form in forms]))
    return results


def _settings(comm: Communicator, case: Case, options: argparse.Namespace) -> list[Setting]:
    """A setting per size; small sizes are rounded up to an element per chunk, large ones down."""
    dtype = dtype_named(options.datatype)
    part = dtype.itemsize * (comm.size if case.chunks else 1)
    sizes = sweep(options.minbytes, options.maxbytes, options.stepfactor)
    counts = dict.fromkeys(max(1, size // part) for size in sizes)
    op = options.op or ("avg" if case.codec else "sum")
    return [Setting(comm.rank, comm.size, n, dtype, op, options.root) for n in counts]


def _measure_form(
    world: World, case: Case, setting: Setting, form: str, options: argparse.Namespace
) -> dict[str, Measurement]:
    """Ours and its rivals, call by call in turn, on the same two arrays. Collective."""
    s = replace(setting, in_place=form == IN_PLACE)
    given, expected = case.given(s), case.expected(s)
    x = np.empty_like(given)
    out = None if expected is None else np.empty(expected.shape, s.dtype)
    if s.in_place:
        x, out = case.in_place(s, x, out)

    def prepare() -> None:
        if out is not None:
            poison(out)
        x[...] = given

    runs: dict[str, Callable[[], Any]] = {"ours": partial(case.ours, world.comm, s, x, out)}
    if world.mpi and (s.in_mpi or not case.reduces):
        runs["mpi4py"] = partial(case.theirs, world.mpi, s, x, out)
    if world.gloo and "gloo" in case.rivals and s.in_place:
        runs["gloo"] = partial(world.gloo.allreduce, s, x, out)
    if case.exact:
        runs["exact"] = partial(case.exact, world.comm, s, x, out)
    calls = [Call(run, prepare, expected, case.check) for run in runs.values()]
    measured = measure(
        world.comm,
        calls,
        barrier=world.barrier,
        warmup=options.warmup_iters,
        iterations=options.iters,
    )
    return dict(zip(runs, measured, strict=True))


def _result(case: Case, s: Setting, measured: dict[str, dict[str, Measurement]]) -> dict[str, Any]:
    """One row, for JSON."""
    nbytes = s.count * s.dtype.itemsize * (s.size if case.chunks else 1)
    return {
        "operation": case.name,
        "codec": repr(case.codec) if case.codec else None,
        "size_bytes": nbytes,
        "count": s.count,
        "dtype": s.dtype.name,
        "op": s.op if case.reduces else "none",
        "root": s.root if case.rooted else -1,
        "forms": {
            form: _form_result(case, nbytes, case.bus_factor(s.size), sides) for form, sides in measured.items()
        },
    }


def _form_result(case: Case, nbytes: int, bus_factor: float, sides: dict[str, Measurement]) -> dict[str, Any]:
    ours = sides["ours"]
    time_s = Spread.of(ours.seconds)
    algbw = bandwidth_gbs(nbytes, time_s.median)
    return {
        "time_us": in_us(time_s),
        "algbw_gbs": algbw,
        "busbw_gbs": algbw * bus_factor,
        **_fault(case, ours),
        "wire_bytes": ours.wire_bytes,
        "beside": {
            name: {
                "time_us": in_us(Spread.of(side.seconds)),
                "ratio": asdict(Spread.of(ours.seconds / side.seconds)),
                **_fault(case, side),
            }
            for name, side in sides.items()
            if name != "ours"
        },
    }


def _fault(case: Case, side: Measurement) -> dict[str, float]:
    return {"error": side.fault} if case.check is ERROR else {"wrong": int(side.fault)}


def _table(case: Case) -> Table:
    wire = (Column("wire", "(B)", 12),) if case.codec else ()
    beside = [
        column
        for name in case.rivals
        for form in FORMS
        for column in (
            Column("time", "(us)", 9, f"{name} {form}"),
            Column("ratio", "", 8, f"{name} {form}"),
        )
    ]
    times = [column for form in FORMS for column in time_columns(form, case.check)]
    return Table((*SIZE_COLUMNS, *times, *wire, *beside))


def _cells(case: Case, result: dict[str, Any]) -> list[str]:
    cells = [str(result[key]) for key in ("size_bytes", "count", "dtype", "op", "root")]
    forms = [result["forms"].get(form) for form in FORMS]
    for form in forms:
        cells += _time_cells(form) if form else ["-"] * 4
    if case.codec:
        cells.append(str(result["forms"][OUT_OF_PLACE]["wire_bytes"]))
    for name in case.rivals:
        for form in forms:
            side = form["beside"].get(name) if form else None
            time_us = number(side["time_us"]["median"]) if side else "-"
            cells += [time_us, f"{side['ratio']['median']:.2f}" if side else "-"]
    return cells


def _time_cells(form: dict[str, Any]) -> list[str]:
    fault = str(form["wrong"]) if "wrong" in form else f"{form['error']:.1e}"
    bandwidths = [f"{form[key]:.2f}" for key in ("algbw_gbs", "busbw_gbs")]
    return [number(form["time_us"]["median"]), *bandwidths, fault]


# ---------------------------------------------------------------------------------------------------
# The fixed cost of a call
# ---------------------------------------------------------------------------------------------------

_OVERHEAD_COLUMNS = (
    Column("form", width=12),
    Column("ours", "(us)", 8),
    Column("mpi4py", "(us)", 8),
    *(Column(title, "(us)", 8, "difference") for title in ("median", "q1", "q3")),
    Column("#wrong"),
)


def run_overhead(world: World, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Allreduce of float64[1], in alternating batches; prints its table, returns its rows.

    Collective. Times are those of a call: a batch's, divided by its calls.
    """
    table = Table(_OVERHEAD_COLUMNS)
    world.say(
        f"# Overhead test starting: allreduce of 8 bytes, {options.batches} batches "
        f"of {options.calls} calls on each side",
        *table.header(),
    )
    results = []
    for form in FORMS:
        result = {"operation": "overhead", **_measure_overhead(world, form, options)}
        world.say(table.row(_overhead_cells(result)))
        results.append(result)
    world.say(out_of_bounds(sum(_wrong(result) for result in results)), "#")
    return results


def _measure_overhead(world: World, form: str, options: argparse.Namespace) -> dict[str, Any]:
    comm, mpi, calls = world.comm, world.mpi, range(options.calls)
    # Numbers that add up to 0, so that a sum over the sums is 0 too, and nothing overflows in place.
    given, expected = np.array([2.0 * comm.rank - (comm.size - 1)]), np.zeros(1)
    x = np.empty(1)
    out = x if form == IN_PLACE else np.empty(1)

    def prepare() -> None:
        poison(out)
        x[...] = given

    def ours() -> Array:
        for _ in calls:
            comm.allreduce(x, out=out)
        return out

    sides = [Call(ours, prepare, expected)]
    if mpi:
        theirs_comm, send = mpi.comm, mpi.MPI.IN_PLACE if form == IN_PLACE else x

        def theirs() -> Array:
            for _ in calls:
                theirs_comm.Allreduce(send, out)
            return out

        sides.append(Call(theirs, prepare, expected))
    measured = measure(
        comm,
        sides,
        barrier=world.barrier,
        warmup=options.warmup_iters,
        iterations=options.batches,
    )
    seconds = [side.seconds / options.calls for side in measured]
    result = {"form": form, "ours_us": in_us(Spread.of(seconds[0])), "wrong": int(measured[0].fault)}
    if mpi:
        result["mpi4py_us"] = in_us(Spread.of(seconds[1]))
        result["difference_us"] = in_us(Spread.of(seconds[0] - seconds[1]))
    return result


def _overhead_cells(result: dict[str, Any]) -> list[str]:
    cells = [result["form"], number(result["ours_us"]["median"])]
    if "mpi4py_us" in result:
        difference = result["difference_us"]
        cells.append(number(result["mpi4py_us"]["median"]))
        cells += [number(difference[key]) for key in ("median", "q1", "q3")]
    else:
        cells += ["-"] * 4
    return [*cells, str(result["wrong"])]


# ---------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; without operations, all collectives that the dtype and op allow."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("operations", nargs="*", metavar="operation", help=f"any of {', '.join(OPERATIONS)}")
    add_sweep_arguments(parser)
    parser.add_argument("-d", "--datatype", choices=sorted(INTEGERS | FLOATS), default="float32", metavar="DTYPE")
    parser.add_argument(
        "-o",
        "--op",
        choices=ARITHMETIC_OPS + BITWISE_OPS,
        metavar="OP",
        help="the reduction; by default sum, or avg where quantized",
    )
    parser.add_argument("-r", "--root", type=at_least(0), default=0, help="of broadcast and reduce")
    parser.add_argument(
        "--codec", nargs="+", choices=tuple(CODECS), default=["minmax"], help="of the quantized ones"
    )
    parser.add_argument(
        "--gloo", action="store_true", help="set PyTorch's gloo beside allreduce of float32 or 64"
    )
    parser.add_argument("--batches", type=at_least(1), default=200, help="of overhead, on each side")
    parser.add_argument("--calls", type=at_least(1), default=50, help="of overhead, in each batch")
    options = parser.parse_args(argv)

    for name in options.operations:
        if name not in OPERATIONS:
            parser.error(f"there is no operation {name!r}; expected any of {', '.join(OPERATIONS)}")
        refusal = _refusal(name, options)
        if refusal:
            parser.error(f"{name}: {refusal}")
    if options.gloo and options.datatype not in ("float32", "float64"):
        parser.error(f"--gloo: gloo is set beside float32 and float64, not {options.datatype}")
    everything = (name for name in OPERATIONS if name != "overhead" and not _refusal(name, options))
    options.operations = options.operations or list(everything)
    return options


def _refusal(name: str, options: argparse.Namespace) -> str | None:
    """Why an operation cannot run with these arguments; None if it can."""
    if name == "quantized_allreduce":
        if options.op not in (None, "sum", "avg"):
            return f"there is no op={options.op!r}, only sum and avg"
        for codec in (CODECS[key] for key in options.codec):
            if options.datatype not in codec.dtypes:
                return f"{codec} cannot code {options.datatype}"
    elif name in EXACT and EXACT[name].reduces and options.op:
        try:
            check_reduction(name, options.op, dtype_named(options.datatype))
        except BaguaError as exc:
            return str(exc)
    return None


def _notes(world: World, options: argparse.Namespace) -> list[str]:
    time = "of a call, from a barrier until its slowest rank is done; median over the calls"
    notes = [f"# time      : {time}"]
    if world.mpi or "quantized_allreduce" in options.operations:
        notes.append("# ratio     : ours / theirs, calls alternating; median over the pairs")
    if world.mpi and (options.op == "avg" or "quantized_allreduce" in options.operations):
        notes.append("# mpi4py    : has no avg; there its sum is divided within the timed call")
    return [*notes, "#"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if any element was wrong."""
    options = parse_arguments(argv)
    with bagua_comm.connect() as comm:
        if options.root >= comm.size:
            print(f"-r: root is {options.root}, but there are {comm.size} ranks", file=sys.stderr)
            return 2
        under_mpi = comm.transports[0].name == "mpi"
        world = World(comm, Mpi4py() if under_mpi else None, Gloo(comm) if options.gloo else None)
        record = begin_record("collectives", options, ranks=comm.size, mpi=world.mpi.MPI if world.mpi else None)
        world.say(*header_lines(record), *_notes(world, options))

        results = []
        for name in options.operations:
            if name == "overhead":
                results += run_overhead(world, options)
                continue
            cases = [EXACT[name]] if name in EXACT else [quantized(CODECS[k]) for k in options.codec]
            if options.gloo and name == "allreduce":
                cases = [replace(ALLREDUCE, rivals=("mpi4py", "gloo"))]
            for case in cases:
                results += run_case(world, case, options)

        if options.json and comm.rank == 0:
            write_json(options.json, {**record, "results": results})
        for side in filter(None, (world.mpi, world.gloo)):
            side.close()
    return 1 if any(_wrong(result) for result in results) else 0


def _wrong(result: dict[str, Any]) -> int:
    """Wrong elements in one row, on both sides. An error that is not finite counts as one."""
    forms = result.get("forms", {"": result}).values()
    sides = [side for form in forms for side in (form, *form.get("beside", {}).values())]
    return sum(side["wrong"] if "wrong" in side else not math.isfinite(side["error"]) for side in sides)


if __name__ == "__main__":
    sys.exit(main())
