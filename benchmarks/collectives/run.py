"""Collectives, timed and checked in the form of nccl-tests, beside mpi4py's calls, gloo and textbook algorithms.

    python -m bagua_comm run -n 4 -m benchmarks.collectives -b 8 -e 64M -f 4 -n 20 -w 5
    python -m bagua_comm run -n 4 -m benchmarks.collectives quantized_allreduce --codec minmax float16
    python -m bagua_comm run -n 2 -m benchmarks.collectives overhead
    python -m bagua_comm run -n 2 -m benchmarks.collectives allreduce --beside mpi4py,gloo -b 1M -e 32M -f 2
    python -m benchmarks.collectives allreduce -e 1M
    python -m benchmarks.netlab run --hosts 4 --rate 1gbit -m benchmarks.collectives --beside gloo,ring -b 1M

Our calls and those of the others (`--beside`, see rivals.py) take turns, on the same NumPy arrays: ours, theirs,
ours, theirs. mpi4py uses a duplicate of the world. Before every call the input is restored and the output is
poisoned, and after it every element is compared with NumPy's result.

Columns are those of nccl-tests. They are followed, for each other implementation and each form, by the time of
its call and `ratio`, the median over the pairs of calls of ours / theirs. Instead of `#wrong`,
quantized_allreduce has `error`, the L2 distance from the float64 result relative to it; its bandwidths count the
bytes of the array, and `wire` the bytes that rank 0 sent in one call. Our exact allreduce is timed beside it.
`overhead` compares the fixed cost of a call with mpi4py's: 8 bytes, in alternating batches.

A dash is a call that does not exist: broadcast is always in place, MPI does not add float16, and without mpirun
there is no MPI. Gloo's rendezvous is at MASTER_ADDR if it is set, as by benchmarks.netlab.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import bagua_comm
from bagua_comm import BaguaError, Communicator
from bagua_comm.arrays import (
    ARITHMETIC_OPS,
    BITWISE_OPS,
    FLOATS,
    INTEGERS,
    Array,
    check_reduction,
    dtype_named,
)

from ..bench.arguments import add_sweep_arguments, at_least, comma_list, one_of, sweep
from ..bench.checking import ERROR, Check, poison
from ..bench.named import CODECS
from ..bench.record import begin_record, header_lines, write_json
from ..bench.table import Column, Table, number
from ..bench.timing import Call, Measurement, Spread, bandwidth_gbs, in_us, measure
from .cases import EXACT, FORMS, IN_PLACE, Case, Setting, quantized
from .rivals import RIVALS, Gloo, Mpi4py, OverMpi, Rival, gathered

OPERATIONS = (*EXACT, "quantized_allreduce", "overhead")

# ---------------------------------------------------------------------------------------------------
# The sweep
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """Both sides: our communicator, and the others that can run here."""

    comm: Communicator
    rivals: dict[str, Rival]

    @property
    def mpi4py(self) -> Mpi4py | None:
        """mpi4py's calls, if they are wanted and ranks communicate by MPI."""
        rival = self.rivals.get("mpi4py")
        return rival if isinstance(rival, Mpi4py) else None

    @property
    def barrier(self) -> Callable[[], object]:
        """The barrier before every call, the same for both: MPI's own if there is one."""
        over_mpi = (rival.comm.Barrier for rival in self.rivals.values() if isinstance(rival, OverMpi))
        return next(over_mpi, self.comm.barrier)

    def say(self, *lines: str) -> None:
        """Print, on rank 0."""
        if self.comm.rank == 0:
            print(*lines, sep="\n", flush=True)


def run_case(world: World, case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Sweep one collective over the sizes, print its table, and return its rows for JSON.

    Collective.
    """
    table = _table(case, options)
    world.say(f"# Collective test starting: {case.title}", *table.header())
    results = []
    for setting in _settings(world.comm, case, options):
        measured = {
            form: _measure_form(world, case, setting, form, options)
            for form in options.forms
            if form in case.forms
        }
        result = _result(case, setting, measured)
        world.say(table.row(_cells(case, result, options)))
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
    for name, rival in world.rivals.items():
        call = rival.call(case, s)
        if call:
            runs[name] = partial(call, s, x, out)
    if case.codec:
        runs["exact"] = partial(EXACT[case.exact].ours, world.comm, s, x, out)
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

    def figures(side: Measurement) -> dict[str, Any]:
        algbw = bandwidth_gbs(nbytes, float(np.median(side.seconds)))
        bandwidths = {"algbw_gbs": algbw, "busbw_gbs": algbw * bus_factor}
        return {"time_us": in_us(side.seconds), **bandwidths, **_fault(case, side)}

    return {
        **figures(ours),
        "wire_bytes": ours.wire_bytes,
        "beside": {
            name: {**figures(side), "ratio": asdict(Spread.of(ours.seconds / side.seconds))}
            for name, side in sides.items()
            if name != "ours"
        },
    }


def _fault(case: Case, side: Measurement) -> dict[str, float]:
    return {"error": side.fault} if case.check is ERROR else {"wrong": int(side.fault)}


SIZE_COLUMNS = (
    Column("size", "(B)", 12),
    Column("count", "(elements)", 12),
    Column("type", width=8),
    Column("redop"),
    Column("root"),
)


def _time_columns(group: str, check: Check) -> tuple[Column, ...]:
    return (
        Column("time", "(us)", 7, group),
        Column("algbw", "(GB/s)", 6, group),
        Column("busbw", "(GB/s)", 6, group),
        Column(check.title, "", 7, group),
    )


def _table(case: Case, options: argparse.Namespace) -> Table:
    wire = (Column("wire", "(B)", 12),) if case.codec else ()
    beside = [
        column
        for name in _beside(case, options)
        for form in options.forms
        for column in (
            Column("time", "(us)", 9, f"{name} {form}"),
            Column("ratio", "", 8, f"{name} {form}"),
        )
    ]
    times = [column for form in options.forms for column in _time_columns(form, case.check)]
    return Table((*SIZE_COLUMNS, *times, *wire, *beside))


def _beside(case: Case, options: argparse.Namespace) -> list[str]:
    """Rivals whose columns come last."""
    return [*options.beside, *(["exact"] if case.codec else [])]


def _cells(case: Case, result: dict[str, Any], options: argparse.Namespace) -> list[str]:
    cells = [str(result[key]) for key in ("size_bytes", "count", "dtype", "op", "root")]
    forms = [result["forms"].get(form) for form in options.forms]
    for form in forms:
        cells += _time_cells(form) if form else ["-"] * 4
    if case.codec:
        cells.append(str(next(iter(result["forms"].values()))["wire_bytes"]))
    for name in _beside(case, options):
        for form in forms:
            side = form["beside"].get(name) if form else None
            time_us = number(side["time_us"]["median"]) if side else "-"
            cells += [time_us, f"{side['ratio']['median']:.2f}" if side else "-"]
    return cells


def _time_cells(form: dict[str, Any]) -> list[str]:
    fault = str(form["wrong"]) if "wrong" in form else f"{form['error']:.1e}"
    bandwidths = [f"{form[key]:.2f}" for key in ("algbw_gbs", "busbw_gbs")]
    return [number(form["time_us"]["median"]), *bandwidths, fault]


def trailer(wrong: int, bandwidths: Sequence[float]) -> list[str]:
    """The last lines of a table, as in nccl-tests.

    >>> trailer(0, [1.0, 2.0])
    ['# Out of bounds values : 0 OK', '# Avg bus bandwidth    : 1.5', '#']
    """
    average = sum(bandwidths) / len(bandwidths)
    return [out_of_bounds(wrong), f"# Avg bus bandwidth    : {average:g}", "#"]


def out_of_bounds(wrong: int) -> str:
    """The line with the number of wrong results."""
    return f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}"


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
    for form in options.forms:
        result = {"operation": "overhead", **_measure_overhead(world, form, options)}
        world.say(table.row(_overhead_cells(result)))
        results.append(result)
    world.say(out_of_bounds(sum(_wrong(result) for result in results)), "#")
    return results


def _measure_overhead(world: World, form: str, options: argparse.Namespace) -> dict[str, Any]:
    comm, mpi, calls = world.comm, world.mpi4py, range(options.calls)
    # Numbers that add up to 0: in place, where each call adds up the sums of the one before, nothing overflows.
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
        theirs_comm, send = mpi.comm, mpi.in_place if form == IN_PLACE else x

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
    result = {"form": form, "ours_us": in_us(seconds[0]), "wrong": int(measured[0].fault)}
    if mpi:
        result["mpi4py_us"] = in_us(seconds[1])
        result["difference_us"] = in_us(seconds[0] - seconds[1])
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
        help="the reduction; by default sum, and avg for quantized_allreduce",
    )
    parser.add_argument("-r", "--root", type=at_least(0), default=0, help="root of broadcast and reduce")
    parser.add_argument(
        "--codec", nargs="+", choices=tuple(CODECS), default=["minmax"], help="codecs of quantized_allreduce"
    )
    parser.add_argument(
        "--beside",
        type=comma_list(one_of(RIVALS, "rival")),
        default=["mpi4py"],
        metavar="A,B",
        help=f"what to time beside our calls, any of {','.join(RIVALS)}",
    )
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="forms to time")
    parser.add_argument("--batches", type=at_least(1), default=200, help="batches of overhead, on each side")
    parser.add_argument("--calls", type=at_least(1), default=50, help="calls in each batch of overhead")
    parser.add_argument("--rounds", type=at_least(1), default=1, help="how often to go through all operations")
    parser.add_argument("--label", default="", help="kept in the record: which network this is")
    options = parser.parse_args(argv)

    for name in options.operations:
        if name not in OPERATIONS:
            parser.error(f"there is no operation {name!r}; expected one of {', '.join(OPERATIONS)}")
        refusal = _refusal(name, options)
        if refusal:
            parser.error(f"{name}: {refusal}")
    if "gloo" in options.beside and options.datatype not in Gloo.dtypes:
        parser.error(f"--beside gloo: gloo adds up float32 and float64 here, not {options.datatype}")
    everything = (name for name in OPERATIONS if name != "overhead" and not _refusal(name, options))
    options.operations = options.operations or list(everything)
    return options


def _refusal(name: str, options: argparse.Namespace) -> str | None:
    """Why an operation cannot run with these arguments; None if it can."""
    if name == "quantized_allreduce":
        if options.op not in (None, "sum", "avg"):
            return f"it has no op={options.op!r}, only sum and avg"
        for codec in (CODECS[key] for key in options.codec):
            if options.datatype not in codec.dtypes:
                return f"{codec} cannot code {options.datatype}"
    if name in EXACT and EXACT[name].reduces and options.op:
        try:
            check_reduction(name, options.op, dtype_named(options.datatype))
        except BaguaError as exc:
            return str(exc)
    if name in EXACT and not set(options.forms) & set(EXACT[name].forms):
        return f"it has no {options.forms[0]} form"
    return None


def _notes(world: World, options: argparse.Namespace) -> list[str]:
    time = "of a call, from a barrier until its slowest rank is done; median over the calls"
    notes = [f"# time      : {time}"]
    if world.rivals or "quantized_allreduce" in options.operations:
        notes.append("# ratio     : ours / theirs, calls alternating; median over the pairs")
    if world.rivals and (options.op == "avg" or "quantized_allreduce" in options.operations):
        notes.append("# avg       : the others have none; there the sum is divided within the timed call")
    return [*notes, "#"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if any element was wrong."""
    options = parse_arguments(argv)
    with ExitStack() as stack:
        comm = stack.enter_context(bagua_comm.connect(gpu="none"))
        if options.root >= comm.size:
            print(f"-r: root is {options.root}, but there are {comm.size} ranks", file=sys.stderr)
            return 2
        world = World(comm, stack.enter_context(gathered(options.beside, comm)))
        packages = ["torch"] if "gloo" in world.rivals else []
        record = begin_record("collectives", options, comm=comm, packages=packages)
        world.say(*header_lines(record), *_notes(world, options))

        results = []
        for number in range(options.rounds):
            results += [{"round": number, **result} for result in _round(world, options)]

        if options.json and comm.rank == 0:
            write_json(options.json, {**record, "results": results})
    return 1 if any(_wrong(result) for result in results) else 0


def _round(world: World, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All operations once, at all sizes. Collective."""
    results = []
    for name in options.operations:
        if name == "overhead":
            results += run_overhead(world, options)
            continue
        for case in [EXACT[name]] if name in EXACT else [quantized(CODECS[key]) for key in options.codec]:
            results += run_case(world, case, options)
    return results


def _wrong(result: dict[str, Any]) -> int:
    """Wrong elements in one row, on both sides. An error that is not finite counts as one wrong element."""
    forms = result.get("forms", {"": result}).values()
    sides = [side for form in forms for side in (form, *form.get("beside", {}).values())]
    return sum(side["wrong"] if "wrong" in side else not math.isfinite(side["error"]) for side in sides)
