"""`Grid.exchange_halos` beside `Sendrecv` of mpi4py with derived datatypes, in two and three dimensions.

    python -m bagua_comm run -n 2 -m benchmarks.halos
    python -m benchmarks.halos --report benchmarks/results/halos-*.json

Arrays of float64, a width of one element, a periodic grid whose lengths `balanced_dims` chooses. mpi4py has a
subarray type for each side, and makes two calls of `Sendrecv` an axis. Both sides call in short batches, in turn.
A time is the least of the batches, by the slowest rank: others may be at work on the machine. `#wrong` counts
elements that differ between the two sides.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import bagua_comm
from bagua_comm import Communicator, Grid
from bagua_comm.arrays import Array

from .bench import RESULTS
from .bench.arguments import add_json_argument, at_least
from .bench.record import Record, begin_record, header_lines, listed, write_json
from .bench.report import markdown_table
from .bench.table import Column, Table, number
from .latency import Side, batch

SIDES = {2: (16, 128, 1024, 4096), 3: (8, 32, 96, 192)}
"""Lengths of the inner part of an array, by number of dimensions."""

CALLS = 4
"""Of a batch."""

GOAL = 1.0
"""The time of ours divided by mpi4py's, at most."""

TABLE = Table(
    (
        Column("array", width=16),
        Column("ours", "(us)", 9),
        Column("mpi4py", "(us)", 9),
        Column("more", "(us)", 9),
        Column("ratio", width=7),
        Column("goal", width=5),
        Column("#wrong", width=6),
    )
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or write its report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-s", "--sides", nargs="+", type=at_least(1), help="lengths of the inner part")
    parser.add_argument("-n", "--batches", type=at_least(2), default=100, help="batches of each side")
    parser.add_argument("--report", nargs="+", type=Path, help="write results/halos.md from these records")
    add_json_argument(parser)
    options = parser.parse_args(argv)
    if options.report:
        (RESULTS / "halos.md").write_text(markdown([json.loads(path.read_text()) for path in options.report]))
        return 0
    with bagua_comm.connect(gpu="none") as comm:
        record = begin_record("halos", options, comm=comm)
        if comm.rank == 0:
            print(*header_lines(record), *TABLE.header(), sep="\n", flush=True)
        record["results"] = [
            measured(comm, (side,) * count, options.batches)
            for count, sides in SIDES.items()
            for side in options.sides or sides
        ]
        if comm.rank == 0 and options.json:
            write_json(options.json, record)
    return 0


def measured(comm: Communicator, inner: tuple[int, ...], batches: int) -> dict[str, Any]:
    """One row: both sides in turn. Collective."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Dup()
    grid = Grid(comm, (0,) * len(inner), periodic=True)
    mine = np.random.default_rng(comm.rank).random([n + 2 for n in inner])
    theirs = mine.copy()
    sides = [lambda: grid.exchange_halos(mine), sendrecv_of(world, grid.dims, theirs)]
    try:
        seconds = np.array([[batch(world, side, CALLS) for side in sides] for _ in range(batches)])
    finally:
        world.Free()
    ours, mpis = (comm.allgather(seconds).max(axis=0).min(axis=0) * 1e6).tolist()
    result = {
        "inner": inner,
        "dims": grid.dims,
        "ours_us": ours,
        "mpi4py_us": mpis,
        "wrong": int(comm.allreduce(np.array((mine != theirs).sum(), np.int64))),
    }
    if comm.rank == 0:
        print(TABLE.row(cells(result)), flush=True)
    return result


def sendrecv_of(world: Any, dims: Sequence[int], x: Array) -> Side:
    """A function that exchanges the halos of `x` by mpi4py alone."""
    from mpi4py import MPI

    cart, calls = world.Create_cart(dims, [True] * len(dims)), []
    for axis, n in enumerate(x.shape):
        low, high = cart.Shift(axis, 1)

        def part(start: int, axis: int = axis) -> list[Any]:
            starts, lengths = [0] * x.ndim, list(x.shape)
            starts[axis], lengths[axis] = start, 1
            return [x, 1, MPI.DOUBLE.Create_subarray(x.shape, lengths, starts).Commit()]

        calls += [(part(1), low, part(n - 1), high), (part(n - 2), high, part(0), low)]

    def exchange() -> None:
        for out, dest, into, source in calls:
            cart.Sendrecv(out, dest, 0, into, source, 0)

    return exchange


def cells(result: dict[str, Any]) -> list[str]:
    """One row of the table."""
    ours, mpis = result["ours_us"], result["mpi4py_us"]
    figures = [number(ours), number(mpis), number(ours - mpis), f"{ours / mpis:.2f}", f"{GOAL:.2f}"]
    return ["x".join(map(str, result["inner"])), *figures, str(result["wrong"])]


def markdown(records: Sequence[Record]) -> str:
    """A table for each number of ranks."""
    lines = ["# Halos beside Sendrecv with derived datatypes"]
    for record in sorted(records, key=lambda record: int(record["ranks"])):
        lines += ["", f"## {record['ranks']} ranks", ""]
        lines += [
            f"{record['machine']['cpu']}, {record['machine']['cores']} cores; {listed(record['versions'])}."
        ]
        titles = ["array of a rank", "ours (us)", "mpi4py (us)", "more (us)", "ours / mpi4py", "goal, at most"]
        lines += ["", *markdown_table(titles, list(rows(record)), "lrrrrr")]
    return "\n".join(lines) + "\n"


def rows(record: Record) -> Iterator[list[object]]:
    """The rows of a table of the report."""
    for result in record["results"]:
        if result["wrong"]:
            raise ValueError(f"{result['inner']}: {result['wrong']} elements are wrong")
        yield [*cells(result)[:-1]]


if __name__ == "__main__":
    sys.exit(main())
