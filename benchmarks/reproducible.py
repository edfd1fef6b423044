"""The error and the cost of reproducible sums, beside exact ones in the same run.

    python -m bagua_comm run -n 2 -m benchmarks.reproducible --json benchmarks/results/reproducible.json

*Error*: the relative L2 error of a sum of 8 arrays, against float64, of `Reproducible` and of float32 in rank
order. *Cost*: the bytes that a rank sends, and the time, of an average in place: the median of calls in turn, and
its ratio to that of `Exact`. The ratio is the figure to compare; the times are those of this machine, with all
ranks on it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from bagua_comm import Communicator, Exact, Reproducible, connect
from bagua_comm.arrays import Array
from bagua_comm.testing import run_ranks

from .bench.arguments import add_sweep_arguments, sweep
from .bench.record import begin_record, header_lines, write_json
from .bench.table import Column, Table, number
from .bench.timing import Call, measure

ADDENDS, ELEMENTS = 8, 1 << 20

Random = np.random.Generator


def lognormal_scales(deviation: float, random: Random) -> Array:
    """Normal values, each of them times a factor whose natural logarithm has this standard deviation."""
    return random.standard_normal(ELEMENTS) * random.lognormal(0, deviation, ELEMENTS)


DISTRIBUTIONS: dict[str, Callable[[Random], Array]] = {
    "normal": lambda random: random.standard_normal(ELEMENTS),
    "Student-t(3)": lambda random: random.standard_t(3, ELEMENTS),
    **{f"lognormal scales({d})": partial(lognormal_scales, d) for d in (1, 2, 3)},
}
"""The terms: `ELEMENTS` values."""

ERRORS = Table(
    (
        Column("values", width=21),
        *(Column(title, "rel. L2", 12) for title in ("reproducible", "float32")),
        Column("ratio", width=6),
    )
)
COSTS = Table(
    (
        Column("size", "(B)", 10),
        *(Column(title, "(B)", 10, "wire") for title in ("exact", "reproducible")),
        *(Column(title, "(ms)", 9, "time") for title in ("exact", "reproduc.")),
        Column("ratio", width=6, group="time"),
    )
)


def main() -> None:
    """Run the benchmark."""
    options = parse_arguments()
    with connect() as comm:
        show = print if comm.rank == 0 else _silent
        record = begin_record("reproducible", options, comm=comm)
        show(*header_lines(record), sep="\n")
        show(f"# a sum of {ADDENDS} arrays of {ELEMENTS} elements, block {options.block}")
        show(*ERRORS.header(), sep="\n")
        record["errors"] = []
        for name in DISTRIBUTIONS if comm.rank == 0 else ():
            record["errors"].append(found := errors(name, options.block))
            losses = [found["reproducible"], found["float32"]]
            show(ERRORS.row([name, *(f"{loss:.2e}" for loss in losses), number(losses[0] / losses[1])]))
        show(*COSTS.header(), sep="\n")
        record["results"] = []
        for nbytes in sweep(options.minbytes, options.maxbytes, options.stepfactor):
            record["results"].append(result := costs(comm, nbytes, options))
            show(COSTS.row(_cells(result)), flush=True)
        if comm.rank == 0 and options.json:
            write_json(options.json, record)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_sweep_arguments(parser)
    parser.add_argument("--block", type=int, default=128, help="elements that share a unit")
    parser.set_defaults(minbytes=1 << 16, maxbytes=1 << 24, stepfactor=16)
    return parser.parse_args(argv)


def errors(name: str, block: int) -> dict[str, Any]:
    """The relative L2 errors of a sum of arrays of one distribution, over threads."""
    values = [DISTRIBUTIONS[name](np.random.default_rng(i)).astype(np.float32) for i in range(ADDENDS)]
    exact = np.sum(values, axis=0, dtype=np.float64)

    def means(comm: Communicator) -> list[Array]:
        mine = values[comm.rank]
        return [average.bind(comm)(mine.copy()) for average in (Reproducible(block), Exact())]

    reproducible, floats = (np.float64(ADDENDS) * mean for mean in run_ranks(ADDENDS, means)[0])
    norm = np.linalg.norm(exact)
    return {
        "values": name,
        "reproducible": float(np.linalg.norm(reproducible - exact) / norm),
        "float32": float(np.linalg.norm(floats - exact) / norm),
    }


def costs(comm: Communicator, nbytes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Bytes and seconds of both averages of an array of this size. Collective."""
    values = np.random.default_rng(comm.rank).standard_normal(nbytes // 4).astype(np.float32)
    x = values.copy()
    calls = [
        Call(run=partial(average.bind(comm), x), prepare=partial(np.copyto, x, values), expected=None)
        for average in (Exact(), Reproducible(options.block))
    ]
    found = measure(comm, calls, barrier=comm.barrier, warmup=options.warmup_iters, iterations=options.iters)
    exact, reproducible = (float(np.median(one.seconds)) for one in found)
    return {
        "nbytes": x.nbytes,
        "wire_bytes": {"exact": found[0].wire_bytes, "reproducible": found[1].wire_bytes},
        "median_s": {"exact": exact, "reproducible": reproducible},
        "ratio": reproducible / exact,
    }


def _cells(result: dict[str, Any]) -> list[str]:
    wire = [str(nbytes) for nbytes in result["wire_bytes"].values()]
    times = [number(1e3 * seconds) for seconds in result["median_s"].values()]
    return [str(result["nbytes"]), *wire, *times, number(result["ratio"])]


def _silent(*_: object, **__: object) -> None:
    """Print nothing, on all ranks but the first."""


if __name__ == "__main__":
    main()
