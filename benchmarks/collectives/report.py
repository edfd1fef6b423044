"""Tables and a plot of collectives on several networks, each of which is a record of benchmarks.collectives.

    python -m benchmarks.collectives.report benchmarks/results/network-*.json

One of the forms is shown, the first that a record has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..bench import RESULTS
from ..bench.arguments import add_out_argument
from ..bench.record import Record, header_lines
from ..bench.report import markdown_table, or_dash, read_records, write_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {
    "ours": "ours",
    "gloo": "gloo",
    "mpi4py": "MPI's own",
    "ring": "ring",
    "halving_doubling": "halving-doubling",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="JSON files of benchmarks.collectives")
    add_out_argument(parser, RESULTS / "network", "md", "png")
    options = parser.parse_args(argv)
    records = read_records(options.files)
    records.sort(key=lambda record: record["arguments"]["label"].rjust(10))  # 1gbit before 10gbit
    try:
        write_report(options.out, lambda picture: markdown(records), lambda: draw(records))
    except ValueError as exc:
        print(exc, file=sys.stderr)
        return 2
    return 0


def markdown(records: Sequence[Record]) -> str:
    """A table for each record: bus bandwidth of all who were timed, and ours over gloo's."""
    lines = [
        "# Collectives on slow networks",
        "",
        "Bus bandwidth in GB/s, from the median time of calls in turn, in one run; float32. A quantized "
        "allreduce counts the float32 elements, not the bytes sent.",
    ]
    for record in records:
        lines += ["", f"## {record['arguments']['label']}", "", "```"]
        lines += [line.removeprefix("# ") for line in header_lines(record)[1:4]]
        rows = []
        for (operation, nbytes), found in cells(record).items():
            ratio = found["ours"] / found["gloo"] if "gloo" in found else None
            figures = (or_dash(found.get(name), "{:.4f}") for name in NAMES)
            rows.append([operation, nbytes, *figures, or_dash(ratio, "{:.2f}")])
        titles = ["operation", "bytes", *NAMES.values(), "ours / gloo"]
        lines += ["```", "", *markdown_table(titles, rows, "l" + "r" * (len(titles) - 1))]
    return "\n".join(lines) + "\n"


def cells(record: Record) -> dict[tuple[str, int], dict[str, float]]:
    """By operation and size: the bus bandwidth of ours and of each of the others.

    Raises:
        ValueError: A result was wrong.
    """
    table: dict[tuple[str, int], dict[str, float]] = {}
    rows = former_rows(record) if record["benchmark"] == "network" else rows_of(record)
    for operation, nbytes, name, busbw_gbs, right in rows:
        if not right:
            raise ValueError(f"{operation} of {nbytes} bytes: the result of {name} is wrong")
        table.setdefault((operation, nbytes), {})[name] = busbw_gbs
    return table


Row = tuple[str, int, str, float, bool]
"""Operation, bytes, who was timed, bus bandwidth, and whether the results were right."""


def rows_of(record: Record) -> Iterator[Row]:
    """The rows of a record of benchmarks.collectives."""
    for result in record["results"]:
        form = next(iter(result["forms"].values()))
        for name, side in {"ours": form, **form["beside"]}.items():
            right = side["error"] <= 0.02 if "error" in side else side["wrong"] == 0
            yield result["operation"], result["size_bytes"], name, side["busbw_gbs"], right


def former_rows(record: Record) -> Iterator[Row]:
    """The rows of results/network-*.json, in which those who were timed had rows of their own."""
    for row in record["results"]:
        name = {"mpi": "mpi4py"}.get(row["contender"], row["contender"])
        yield row["operation"], row["bytes"], name, row["busbw_gbs"], row["right"]


def draw(records: Sequence[Record]) -> Figure:
    """Bus bandwidth over size: a row for each record, a panel for each operation."""
    from matplotlib.figure import Figure

    tables = [cells(record) for record in records]
    operations = list(dict.fromkeys(operation for table in tables for operation, _ in table))
    figure = Figure(figsize=(3.2 * len(operations), 2.9 * len(records)), layout="tight")
    axes = figure.subplots(len(records), len(operations), squeeze=False)
    for panels, record, table in zip(axes, records, tables, strict=True):
        for axis, operation in zip(panels, operations, strict=True):
            for name, label in NAMES.items():
                points = [
                    (nbytes, found[name])
                    for (measured, nbytes), found in table.items()
                    if measured == operation and name in found
                ]
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.set_title(f"{operation}, {record['arguments']['label']}", fontsize=9)
            axis.set_xlabel("bytes")
    axes[0][0].set_ylabel("bus bandwidth (GB/s)")
    axes[0][0].legend(fontsize=7)
    return figure


if __name__ == "__main__":
    sys.exit(main())
