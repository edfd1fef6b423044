"""Every call of the communicator beside mpi4py's, from 4 bytes on: the overhead of our side of a call.

    python -m bagua_comm run -n 2 -m benchmarks.latency
    python -m benchmarks.latency                        # one rank: no other is waited for
    python -m benchmarks.latency --report benchmarks/results/latency-*.json

Both sides call in batches, in turn, on the same arrays of float32. A batch begins and ends with a barrier of
MPI's, and its time is divided by its calls. mpi4py has a duplicate of the world to itself, and is given buffers
with their MPI type, as its documentation has it for speed. Bytes are those of the larger array of a rank. The
table has the medians over the batches, and the median and quartiles of the differences of pairs of batches;
`#wrong` counts elements that differ between the two sides. Names that end with `-any` are calls of ours that may
add in any order (`op_order="any"`); in those that end with `-tag`, our tag is a text. All messages of ours carry
their tag, dtype and size.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import bagua_comm
from bagua_comm import Communicator
from bagua_comm.arrays import Array

from .bench import RESULTS
from .bench.arguments import add_json_argument, at_least
from .bench.record import Record, begin_record, header_lines, listed, write_json
from .bench.report import markdown_table
from .bench.table import Column, Table, number
from .bench.timing import Spread, in_us

SIZES = (4, 256, 2 << 10, 16 << 10, 32 << 10, 128 << 10, 512 << 10, 8 << 20)
ANY = "-any"
"""Ends the name of a call with `op_order="any"`."""

TAGGED = "-tag"
"""Ends the name of a call whose messages have a tag that is a text."""

REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
CALLS = (
    *("barrier", "allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "sendrecv"),
    "sendrecv" + TAGGED,
    *(name + ANY for name in REDUCTIONS),
)

TABLE = Table(
    (
        Column("call", width=15),
        Column("size", "(B)", 10),
        Column("ours", "(us)", 9),
        Column("mpi4py", "(us)", 9),
        Column("more", "(us)", 9),
        Column("q1", "(us)", 9),
        Column("q3", "(us)", 9),
        Column("ratio", width=7),
        Column("#wrong", width=6),
    )
)

Side = Callable[[], object]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or write its report."""
    options = parse_arguments(argv)
    if options.report:
        text = markdown([json.loads(path.read_text()) for path in options.report])
        (RESULTS / "latency.md").write_text(text)
        return 0
    with bagua_comm.connect(gpu="none") as comm:
        bagua_comm.kernels.compile_now()
        record = begin_record("latency", options, comm=comm)
        if comm.rank == 0:
            print(*header_lines(record), *TABLE.header(), sep="\n", flush=True)
        record["results"] = [
            measured(comm, name, nbytes, options)
            for name in options.calls
            for nbytes in (options.sizes if name != "barrier" else [0])
        ]
        if comm.rank == 0 and options.json:
            write_json(options.json, record)
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("calls", nargs="*", metavar="call", help=f"any of {', '.join(CALLS)}")
    parser.add_argument("-s", "--sizes", nargs="+", type=at_least(4), default=list(SIZES), help="bytes")
    parser.add_argument("-n", "--batches", type=at_least(2), default=15, help="batches of each side")
    parser.add_argument("--report", nargs="+", type=Path, help="write results/latency.md from these records")
    add_json_argument(parser)
    options = parser.parse_args(argv)
    for name in options.calls:
        if name not in CALLS:
            parser.error(f"call is {name!r}, expected any of {', '.join(CALLS)}")
    options.calls = options.calls or list(CALLS)
    return options


def measured(comm: Communicator, name: str, nbytes: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row: both sides of a call in turn. Collective."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Dup()
    comm.op_order = "any" if name.endswith(ANY) else "rank"
    try:
        sides, (mine, theirs) = sides_of(comm, world, name.removesuffix(ANY), nbytes)
        calls = max(2, min(400, (16 << 20) // max(nbytes, 1 << 12)))
        seconds = np.array([[batch(world, side, calls) for side in sides] for _ in range(options.batches)])
    finally:
        world.Free()
    ours, mpis = comm.allgather(seconds).max(axis=0)[1:].T  # the first pair warms up
    result = {
        "call": name,
        "bytes": nbytes,
        "ours_us": in_us(ours),
        "mpi4py_us": in_us(mpis),
        "more_us": in_us(ours - mpis),
        "ratio": asdict(Spread.of(ours / mpis)),
        "wrong": int(comm.allreduce(np.array((mine != theirs).sum(), np.int64))),
    }
    if comm.rank == 0:
        print(TABLE.row(cells(result)), flush=True)
    return result


def batch(world: Any, side: Side, calls: int) -> float:
    """The time of a call in a batch of them, in seconds. Collective."""
    world.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        side()
    world.Barrier()
    return (time.perf_counter() - start) / calls


def sides_of(
    comm: Communicator, world: Any, name: str, nbytes: int
) -> tuple[tuple[Side, Side], tuple[Array, Array]]:
    """Our call and mpi4py's, and the arrays that they fill."""
    from mpi4py import MPI

    p, rank = comm.size, comm.rank
    chunked = name in ("allgather", "reduce_scatter", "alltoall")
    count = max(nbytes // 4 // (p if chunked else 1), 1)
    whole = count * p
    sent = np.arange(whole if name in ("reduce_scatter", "alltoall") else count, dtype=np.float32) + rank
    mine, theirs = (np.zeros(whole if name in ("allgather", "alltoall") else count, np.float32) for _ in range(2))
    x, y = [sent, MPI.FLOAT], [theirs, MPI.FLOAT]
    after, before = (rank + 1) % p, (rank - 1) % p

    if name == "broadcast":
        mine[:] = theirs[:] = sent
    sides: dict[str, tuple[Side, Side]] = {
        "barrier": (comm.barrier, world.Barrier),
        "allreduce": (lambda: comm.allreduce(sent, mine), lambda: world.Allreduce(x, y)),
        "reduce": (
            lambda: comm.reduce(sent, mine, root=0),
            lambda: world.Reduce(x, y if rank == 0 else None, MPI.SUM, 0),
        ),
        "broadcast": (lambda: comm.broadcast(mine, root=0), lambda: world.Bcast(y, 0)),
        "allgather": (lambda: comm.allgather(sent, mine), lambda: world.Allgather(x, y)),
        "reduce_scatter": (lambda: comm.reduce_scatter(sent, mine), lambda: world.Reduce_scatter_block(x, y)),
        "alltoall": (lambda: comm.alltoall(sent, mine), lambda: world.Alltoall(x, y)),
        "sendrecv": (
            lambda: comm.sendrecv(sent, mine, dest=after, source=before),
            lambda: world.Sendrecv(x, after, 0, y, before, 0),
        ),
        "sendrecv" + TAGGED: (
            lambda: comm.sendrecv(sent, mine, dest=after, source=before, tag="edge of the field"),
            lambda: world.Sendrecv(x, after, 7, y, before, 7),
        ),
    }
    return sides[name], (mine, theirs)


def cells(result: dict[str, Any]) -> list[str]:
    """One row of the table."""
    more = result["more_us"]
    return [
        result["call"],
        str(result["bytes"]),
        *(number(result[side]["median"]) for side in ("ours_us", "mpi4py_us")),
        *(number(more[key]) for key in ("median", "q1", "q3")),
        number(result["ratio"]["median"]),
        str(result["wrong"]),
    ]


def markdown(records: Sequence[Record]) -> str:
    """A table for each number of ranks."""
    lines = ["# Calls beside mpi4py's own", ""]
    lines += ['Names that end with `-any`: with `op_order="any"`; with `-tag`: a text is the tag.']
    for record in sorted(records, key=lambda record: int(record["ranks"])):
        count = record["ranks"]
        lines += ["", f"## {count} rank{'s' * (count != 1)}", ""]
        lines += [
            f"{record['machine']['cpu']}, {record['machine']['cores']} cores; {listed(record['versions'])}.",
            "",
        ]
        titles = ["call", "bytes", "ours (us)", "mpi4py (us)", "more (us)", "quartiles", "ours / mpi4py"]
        lines += markdown_table(titles, list(rows(record)), "lrrrrrr")
    return "\n".join(lines) + "\n"


def rows(record: Record) -> Iterator[list[object]]:
    """The rows of a table of the report."""
    for result in record["results"]:
        if result["wrong"]:
            raise ValueError(f"{result['call']} of {result['bytes']} bytes: {result['wrong']} elements are wrong")
        more = result["more_us"]
        yield [
            result["call"],
            result["bytes"],
            number(result["ours_us"]["median"]),
            number(result["mpi4py_us"]["median"]),
            number(more["median"]),
            f"{number(more['q1'])} to {number(more['q3'])}",
            f"{result['ratio']['median']:.2f}",
        ]


if __name__ == "__main__":
    sys.exit(main())
