r"""The simulator against all measured steps, and its steps on 8 to 4,096 ranks.

    python -m benchmarks.training.simulator results/scaling-*.json results/training-*.json results/ddp-*.json \\
        --out results/simulator

reads JSON files of benchmarks.training and benchmarks.training.scaling, and writes
simulator.json, simulator.md and simulator.png. Calibration sees the rows `exact` and `bytegrad` of `scaling` on 2
and 4 ranks, which show the share of the line rate that is reached, and those of vgg16 on 4 ranks at 0.5, 1 and 10
Gbit/s, which show the work. The constant `WHOLE` of the simulator was fitted by hand to the rows
`low-precision-ring` of `scaling` on 2 and 4 ranks. All other rows are predicted, those on 8 ranks among them.
Rows of another file that repeat one of those configurations are shown, but not counted.

Files are read in the order of their names. Where a file does not say how long computation alone takes, it is that
of the same model in the first other file that says so. Of the rounds of `scaling` the fastest counts: other work
on the machine only makes them longer.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from bagua_comm.commands.advise import read_rates
from bagua_comm.launch.cli import CommandError
from bagua_comm.planning.costmodel import predict
from bagua_comm.planning.simulator import replay, simulate
from bagua_comm.planning.simulator.replay import WHOLE

from ..bench import RESULTS
from ..bench.arguments import add_out_argument
from ..bench.record import write_json
from ..bench.report import markdown_table, read_records, write_report
from .at_scale import draw_scale, simulate_scale
from .calibration import Measurement, calibrate
from .costmodel import ALONE, Point, Row, compare, network_of, points_of, summarize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGET = 0.15
"""The largest relative error of a prediction that is good enough, and the share of rows that should have it."""
SHARE = 0.9

Record = dict[str, Any]


def read_points(paths: Sequence[Path]) -> list[tuple[str, Point]]:
    """The measured rows of all files, in the order of their names, each with the name of its file.

    Raises:
        ValueError: No file says how long computation takes.
    """
    paths = sorted(paths, key=lambda path: path.stem)
    records = read_records(paths)
    alone = [{**r, "results": [row for row in r["results"] if row["algorithm"] == ALONE]} for r in records]
    found = []
    for path, record in zip(paths, records, strict=True):
        sleeps = record["benchmark"] == "scaling"
        others = [] if sleeps else alone
        points = points_of([*others, record], math.inf if sleeps else None)
        if sleeps:  # nothing but the machine differs between rounds
            points = [point._replace(measurement=_fastest(point)) for point in points]
        found += [(path.stem, point) for point in points]
    return found


def _fastest(point: Point) -> Measurement:
    return point.measurement._replace(step_s=min(point.row["seconds"]))


def is_seen(name: str, point: Point) -> bool:
    """Whether calibration sees a row; see the docstring of this module."""
    row = point.row
    if row["algorithm"] not in ("exact", "bytegrad", "ddp") or row["ranks_per_host"] != 1:
        return False
    if name.startswith("scaling"):
        return row["hosts"] in (2, 4)
    return name in ("ddp-vgg16-500", "ddp-vgg16-1000", "ddp-vgg16-10000")


def has_fitted_whole(name: str, point: Point) -> bool:
    """Whether the constant `WHOLE` of the simulator was fitted to a row."""
    row = point.row
    return (name, row["algorithm"]) in {(f"scaling-100-{n}x1", "low-precision-ring") for n in (2, 4)}


def _mark_repeats(rows: Sequence[Row]) -> None:
    """Mark the rows of other files that repeat a configuration which was fitted to."""
    names = ("model", "batch", "hosts", "ranks_per_host", "rate_mbit", "algorithm")
    seen = {tuple(row[name] for name in names) for row in rows if row["calibrated"]}
    for row in rows:
        row["repeats"] = not row["calibrated"] and tuple(row[name] for name in names) in seen


def _of_communication(row: Row) -> float:
    """The relative error of the part of a step that is not computation."""
    predicted, measured = (row[name] - row["alone_s"] for name in ("predicted_s", "measured_s"))
    return float(predicted / measured - 1)


# Report ----------------------------------------------------------------------------------------------------


def summary_of(rows: Sequence[Row]) -> Record:
    """How good the predictions of rows are that calibration has not seen, and how good they should be."""
    found = summarize([row for row in rows if not row.get("repeats")], TARGET)
    return {**found, "target": TARGET, "share": found["within"] / found["predicted"] if found["predicted"] else 0}


def markdown(record: Record, picture: str | None) -> str:
    """The report, with the name of its figure if there is one."""
    summary, rates = record["summary"], record["rates"]
    names = {
        "Steps": "steps",
        "Of these, steps on 8 ranks": "eight_ranks",
        "The part of these steps that is communication": "communication",
        f"Steps without the constant WHOLE = {WHOLE}": "without_whole",
    }
    lines = [
        "# Simulated and measured steps",
        "",
        "* Rows that calibration saw, on 2 and 4 ranks, are marked with a star, and those of other files that "
        "repeat their configurations with a plus. Neither are counted.",
        *(
            f"* {what}: {each['within']} of {each['predicted']} are predicted within {TARGET:.0%} "
            f"({each['share']:.0%}; the aim is {SHARE:.0%}); the median error is {each['median']:.0%}, "
            f"the largest {each['worst']:.0%}."
            for what, each in ((what, summary[name]) for what, name in names.items())
            if each["predicted"]
        ),
        f"* Rates: {rates['direct']:.2f} of the line rate with many peers, {rates['ring']:.2f} on a ring, "
        f"{rates['network_s_per_byte'] * 1e9:.2f} ns of work for a byte.",
        "* The cost model's error is beside that of the simulator, by the same rates.",
    ]
    if picture is not None:
        lines += ["", f"![Simulated against measured, and at scale]({picture})"]
    cells = [
        [
            row["file"],
            row["model"],
            f"{row['hosts']} x {row['ranks_per_host']}, {network_of(row)}",
            row["algorithm"],
            *(f"{row[name]:.3f}" for name in ("alone_s", "measured_s", "predicted_s")),
            f"{row['error']:+.0%}",
            f"{row['costmodel_error']:+.0%}",
            "*" * row["calibrated"] + "+" * row["repeats"],
        ]
        for row in record["results"]
    ]
    titles = [
        "record",
        "model",
        "network",
        "algorithm",
        "alone (s)",
        "measured (s)",
        "simulated (s)",
        "error",
        "cost model's",
        "seen",
    ]
    return "\n".join([*lines, "", *markdown_table(titles, cells, "llllrrrrrl")]) + "\n"


def draw(record: Record) -> Figure:
    """Draw simulated against measured steps, and steps at scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    axes, *scales = figure.subplots(1, 1 + len(record["at_scale"]))
    rows = record["results"]
    times = [row[name] for row in rows for name in ("measured_s", "predicted_s")]
    ends = np.array([min(times) / 1.3, max(times) * 1.3])
    axes.fill_between(ends, ends * (1 - TARGET), ends * (1 + TARGET), color="0.92")
    for ranks in sorted({row["hosts"] * row["ranks_per_host"] for row in rows}):
        mine = [row for row in rows if row["hosts"] * row["ranks_per_host"] == ranks]
        places = [[row[name] for row in mine] for name in ("measured_s", "predicted_s")]
        axes.plot(*places, ".", alpha=0.7, label=f"{ranks} ranks")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set_xlabel("measured step (s)")
    axes.set_ylabel("simulated step (s)")
    axes.legend(frameon=False, fontsize=8)
    for scale, each in zip(scales, record["at_scale"], strict=True):
        draw_scale(scale, each)
    return figure


# The command line ------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate, compare, simulate at scale, and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="of benchmarks.training, and its `scaling`")
    parser.add_argument("--rates", type=Path, help="a record of this program: its rates, in place of calibration")
    add_out_argument(parser, RESULTS / "simulator", "json", "md", "png")
    options = parser.parse_args(argv)
    try:
        given = read_rates(options.rates) if options.rates else None
        named = read_points(options.files)
    except CommandError as exc:
        print(f"simulator: {exc}", file=sys.stderr)
        return 2
    except (OSError, ValueError, KeyError) as exc:
        print(f"simulator: expected JSON files of benchmarks.training: {exc!r}", file=sys.stderr)
        return 2
    chosen = [point for name, point in named if is_seen(name, point)]
    if given is not None:
        rates = given
    elif chosen:
        rates = calibrate((point.measurement for point in chosen), predict=simulate)
    else:
        print("simulator: the files have no row to calibrate on, of 2 or 4 ranks", file=sys.stderr)
        return 2
    points = [point for _, point in named]
    seen = [*chosen, *(point for name, point in named if has_fitted_whole(name, point))]
    rows = compare(points, seen, rates, simulate)
    formulas = compare(points, seen, rates, predict)
    with mock.patch.object(replay, "WHOLE", 1.0):
        without_whole = compare(points, seen, rates, simulate)
    for (name, _), row, other, without in zip(named, rows, formulas, without_whole, strict=True):
        row.update(file=name, costmodel_s=other["predicted_s"], costmodel_error=other["error"])
        row["without_whole_error"] = without["error"]
    _mark_repeats(rows)
    record = {
        "benchmark": "simulator",
        "rates": dataclasses.asdict(rates),
        "summary": {
            "steps": summary_of(rows),
            "eight_ranks": summary_of(_of_ranks(rows, 8)),
            "communication": summary_of([{**row, "error": _of_communication(row)} for row in rows]),
            "without_whole": summary_of([{**row, "error": row["without_whole_error"]} for row in rows]),
            "costmodel": summary_of([{**row, "error": row["costmodel_error"]} for row in rows]),
        },
        "results": rows,
        "at_scale": simulate_scale(rates),
    }
    write_json(options.out.with_name(f"{options.out.name}.json"), record)
    print(write_report(options.out, lambda picture: markdown(record, picture), lambda: draw(record)))
    return 0


def _of_ranks(rows: Iterable[Row], ranks: int) -> list[Row]:
    return [row for row in rows if row["hosts"] * row["ranks_per_host"] == ranks]


if __name__ == "__main__":
    sys.exit(main())
