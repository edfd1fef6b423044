"""Tables and a plot of collectives on several networks, each of which is a record of benchmarks.collectives.

    python -m benchmarks.collectives.report benchmarks/results/network-*.json

Only the first form of a record is shown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..bench import RESULTS
from ..bench.arguments import add_out_argument
from ..bench.record import Record, header_lines
from ..bench.report import markdown_table, read_records, write_report
from ..bench.timing import Spread

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


LINES = {"1gbit": 0.125 * 1448 / 1514}
"""Bytes of data that a link carries in a second, in 10**9, by label: its rate without the overhead of TCP and
Ethernet. At 10 Gbit/s two cores carry less than the links of four hosts, so gloo is the only measure."""

EXACT_SHARE = 0.97
"""Target for exact collectives, relative to the better of the line and gloo."""

QUANTIZED_TIMES = {1 << 20: 2.5, 8 << 20: 3.6, 32 << 20: 3.6}
"""Target for a quantized allreduce, relative to gloo's bandwidth, by bytes."""


def goal(operation: str, nbytes: int, label: str, gloo: float) -> float | None:
    """The bus bandwidth that ours should reach beside gloo's; None if there is no target.

    >>> goal("alltoall", 1 << 20, "1gbit", 0.2), goal("quantized_allreduce", 1 << 20, "1gbit", 0.1)
    (0.194, 0.25)
    """
    if operation == "quantized_allreduce":
        return QUANTIZED_TIMES[nbytes] * gloo if nbytes in QUANTIZED_TIMES else None
    return EXACT_SHARE * max(gloo, LINES.get(label, 0.0))


def markdown(records: Sequence[Record]) -> str:
    """A table for each record: bus bandwidths, ours over gloo's, and in how many rounds that was enough."""
    lines = [
        "# Collectives on slow networks",
        "",
        "Bus bandwidth in GB/s, from the median time of calls in turn, in one run; float32. A quantized "
        "allreduce counts the float32 elements, not the bytes sent. With several rounds: the median over them, "
        "in brackets the quartiles.",
        "",
        f"The goal of exact calls is {EXACT_SHARE} of the better of gloo and the line, which is "
        f"{LINES['1gbit']:.4f} GB/s at 1 Gbit/s; that of quantized ones is "
        + ", ".join(f"{times} times gloo at {nbytes >> 20} MiB" for nbytes, times in QUANTIZED_TIMES.items())
        + ". *Reached* counts the rounds in which ours reached it.",
    ]
    for record in records:
        label = record["arguments"]["label"]
        lines += ["", f"## {label}", "", "```"]
        lines += [line.removeprefix("# ") for line in header_lines(record)[1:4]]
        rows = []
        table = cells(record)
        timed = [name for name in NAMES if any(name in found for found in table.values())]
        for (operation, nbytes), found in table.items():
            gloo = found.get("gloo")
            ratios = [ours / theirs for ours, theirs in zip(found["ours"], gloo or (), strict=False)]
            figures = (spread(found.get(name), "{:.4f}") for name in timed)
            rows.append(
                [operation, nbytes, *figures, spread(ratios, "{:.2f}"), reached(operation, nbytes, label, found)]
            )
        titles = ["operation", "bytes", *(NAMES[name] for name in timed), "ours / gloo", "reached"]
        lines += ["```", "", *markdown_table(titles, rows, "l" + "r" * (len(titles) - 1))]
    return "\n".join(lines) + "\n"


def spread(figures: Sequence[float] | None, form: str) -> str:
    """The median, and of several figures the quartiles.

    >>> spread([1.0, 2.0, 3.0], "{:.1f}"), spread([1.0], "{:.1f}"), spread(None, "{:.1f}")
    ('2.0 (1.5-2.5)', '1.0', '-')
    """
    if not figures:
        return "-"
    found = Spread.of(np.array(figures))
    quartiles = f" ({form.format(found.q1)}-{form.format(found.q3)})" if len(figures) > 1 else ""
    return form.format(found.median) + quartiles


def reached(operation: str, nbytes: int, label: str, found: dict[str, list[float]]) -> str:
    """In how many rounds ours reached its goal; a dash where there is none."""
    rounds = list(zip(found["ours"], found.get("gloo", ()), strict=False))
    goals = [goal(operation, nbytes, label, gloo) for _, gloo in rounds]
    if not goals or None in goals:
        return "-"
    count = sum(ours >= least for (ours, _), least in zip(rounds, goals, strict=True) if least is not None)
    return f"{count} of {len(rounds)}"


def cells(record: Record) -> dict[tuple[str, int], dict[str, list[float]]]:
    """By operation and size: the bus bandwidths of ours and of each of the others, by round.

    Raises:
        ValueError: A result was wrong.
    """
    table: dict[tuple[str, int], dict[str, list[float]]] = {}
    for operation, nbytes, name, busbw_gbs, right in rows_of(record):
        if not right:
            raise ValueError(f"{operation} of {nbytes} bytes: the result of {name} is wrong")
        table.setdefault((operation, nbytes), {}).setdefault(name, []).append(busbw_gbs)
    return table


Row = tuple[str, int, str, float, bool]
"""Operation, bytes, implementation, bus bandwidth, and whether the results were right."""


def rows_of(record: Record) -> Iterator[Row]:
    """The rows of a record of benchmarks.collectives, in the order of rounds."""
    for result in record["results"]:
        form = next(iter(result["forms"].values()))
        for name, side in {"ours": form, **form["beside"]}.items():
            right = side["error"] <= 0.02 if "error" in side else side["wrong"] == 0
            yield result["operation"], result["size_bytes"], name, side["busbw_gbs"], right


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
                    (nbytes, float(np.median(found[name])))
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
