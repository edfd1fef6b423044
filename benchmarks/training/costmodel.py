"""The cost model against measurements: calibrated on a few measured steps, it predicts the others.

    python -m benchmarks.training.costmodel vgg16-*.json bert-*.json --rates 1000,10000 --out results/costmodel

reads JSON files of benchmarks.training and writes costmodel.json, costmodel.md and costmodel.png. Calibration
(`calibration.calibrate`) sees the rows of `--algorithms` for `--model` at the network rates `--rates`: a slow
network shows which share of its rate is reached, and a fast one the work. The other rows are predicted from the
rates that come out and from the times of computation alone, those of the `alone` row of the same model and
network. The JSON file has the calibrated rates as `python -m bagua_comm advise --rates` reads them.

Hosts are taken to be emulated on one machine, whose cores all ranks share; `--cores-per-rank` says otherwise.
Steps that are all alike are measured by their median. Where only some steps communicate, it is the mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import bagua_comm
from bagua_comm import AsyncModelAverage, DiLoCo, StreamingDiLoCo
from bagua_comm.algorithms.combinators import Every
from bagua_comm.planning.costmodel import Cluster, Job, Method, Rates, TorchDDP, predict
from bagua_comm.planning.models import MODELS

from ..bench import RESULTS
from ..bench.arguments import add_out_argument, comma_list
from ..bench.record import write_json
from ..bench.report import markdown_table, read_records, write_report
from .calibration import Measurement, Predictor, calibrate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALONE = "alone"
TORCH = {"ddp": TorchDDP(), "ddp-view": TorchDDP(), "ddp-fp16": TorchDDP(dtype="float16")}
TARGET = 0.2
"""The largest relative error of a prediction that is good enough."""

LATENCY_S = 100e-6
"""Seconds that a message takes between emulated hosts, whatever its size."""

Row = dict[str, Any]


class Point(NamedTuple):
    """A measured row, and the inputs of the cost model for it."""

    row: Row
    measurement: Measurement


# ---------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------


def points_of(records: Iterable[dict[str, Any]], cores_per_rank: float | None = None) -> list[Point]:
    """All measured rows except those that communicate nothing. Of rows that are alike the last is kept.

    Raises:
        ValueError: No row says how long computation takes, or which algorithm was measured.
    """
    rows = [(row, record) for record in records for row in record["results"]]
    computing = {group_of(row): row["compute"] for row, _ in rows if row["algorithm"] == ALONE and row["compute"]}
    points = {}
    for row, record in rows:
        if row["algorithm"] == ALONE:
            continue
        points[(*group_of(row), row["algorithm"])] = Point(
            row, _measurement(row, record, computing, cores_per_rank)
        )
    return list(points.values())


def group_of(row: Row) -> tuple[Any, ...]:
    """Settings that rows of one measurement have in common; the rate comes last."""
    return tuple(row[name] for name in ("model", "batch", "hosts", "ranks_per_host", "rate_mbit"))


def _measurement(
    row: Row, record: dict[str, Any], computing: dict[tuple[Any, ...], Row], cores_per_rank: float | None
) -> Measurement:
    # Computation does not depend on the rate: where it was not measured at this one, another will do.
    compute = computing.get(group_of(row)) or next(
        (c for g, c in computing.items() if g[:-1] == group_of(row)[:-1]), None
    )
    if compute is None:
        raise ValueError(f"there is no row {ALONE!r} for {row['model']} with batches of {row['batch']}")
    ranks = row["hosts"] * row["ranks_per_host"]
    layers = MODELS.get(row["model"], ())
    known = sum(layer.nbytes for layer in layers) == row["model_bytes"]
    arguments = record.get("arguments", {})
    job = Job(
        row["model_bytes"],
        **compute,
        layers=layers if known else (),
        **{name: arguments[name] for name in ("bucket_bytes",) if name in arguments},
    )
    cluster = Cluster(
        row["hosts"],
        row["ranks_per_host"],
        bandwidth_gbit=row["rate_mbit"] / 1e3 if row["rate_mbit"] else float("inf"),
        latency_s=LATENCY_S,
        cores_per_rank=cores_per_rank or record["machine"]["cores"] / ranks,
    )
    method = method_of(row)
    return Measurement(method, job, cluster, measured_s(row, method))


def method_of(row: Row) -> Method:
    """The algorithm of a row.

    >>> method_of({"algorithm": "exact", "settings": "GradientAllReduce(average=Exact())"})
    GradientAllReduce(average=Exact())
    """
    if row["algorithm"] in TORCH:
        return TORCH[row["algorithm"]]
    try:
        method: Method = eval(row["settings"], {"__builtins__": {}}, vars(bagua_comm))
    except Exception as exc:
        raise ValueError(f"{row['algorithm']}: {row['settings']!r} is not an algorithm: {exc}") from exc
    return method


def measured_s(row: Row, method: Method) -> float:
    """Seconds of a step: the median, or the mean where only some steps communicate."""
    if isinstance(method, (Every, DiLoCo, StreamingDiLoCo, AsyncModelAverage)):
        return float(np.mean(row["seconds"]))
    return float(row["median_s"])


# ---------------------------------------------------------------------------------------------------
# Comparison
# ---------------------------------------------------------------------------------------------------


def compare(
    points: Sequence[Point], chosen: Sequence[Point], rates: Rates, predict: Predictor = predict
) -> list[Row]:
    """Predicted beside measured; the rows that rates were calibrated on are marked."""
    seen = {id(point.row) for point in chosen}
    rows = []
    for row, (method, job, cluster, step_s) in points:
        prediction = predict(method, job, cluster, rates)
        names = ("model", "batch", "hosts", "ranks_per_host", "rate_mbit", "algorithm")
        rows.append(
            {
                **{name: row[name] for name in names},
                "alone_s": job.compute_s,
                "measured_s": step_s,
                "predicted_s": prediction.step_s,
                "error": prediction.step_s / step_s - 1,
                "calibrated": id(row) in seen,
                "wire_bytes": row["wire_bytes"],
                "predicted_wire_bytes": prediction.wire_bytes,
            }
        )
    return rows


def summarize(rows: Sequence[Row], target: float = TARGET) -> dict[str, Any]:
    """How good the predictions are for the rows that were not calibrated on."""
    errors = np.abs([row["error"] for row in rows if not row["calibrated"]])
    if not len(errors):
        return {"predicted": 0, "within": 0, "median": None, "worst": None}
    return {
        "predicted": len(errors),
        "within": int((errors <= target).sum()),
        "median": float(np.median(errors)),
        "worst": float(errors.max()),
    }


def choose(points: Sequence[Point], model: str, rate: int | None, algorithms: Sequence[str]) -> list[Point]:
    """The rows to calibrate on.

    Raises:
        ValueError: One is missing.
    """
    here = [p for p in points if p.row["model"] == model and p.row["rate_mbit"] == rate]
    chosen = [point for point in here if point.row["algorithm"] in algorithms]
    missing = set(algorithms) - {point.row["algorithm"] for point in chosen}
    if missing:
        found = ", ".join(sorted({f"{p.row['model']} at {p.row['rate_mbit']}" for p in points}))
        raise ValueError(f"{model} at {rate} Mbit/s has no row {', '.join(sorted(missing))}; there is {found}")
    return chosen


# ---------------------------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------------------------


def markdown(record: dict[str, Any], picture: str | None) -> str:
    """The report, with the name of its figure if there is one."""
    rows, summary, rates = record["results"], record["summary"], record["rates"]
    seen = record["calibrated_on"]
    trained = ", ".join(f"`{name}`" for name in seen["algorithms"])
    network = " and ".join(map(str, seen["rates_mbit"]))
    lines = [
        "# Predicted and measured steps",
        "",
        f"* Calibrated on {trained} of {seen['model']} at {network} Mbit/s; these rows are marked with a star.",
    ]
    if summary["predicted"]:
        lines.append(
            f"* {summary['within']} of the {summary['predicted']} others are predicted within {TARGET:.0%}; "
            f"the median error is {summary['median']:.0%}, the largest {summary['worst']:.0%}."
        )
    lines += [
        f"* Rates: {rates['network_s_per_byte'] * 1e9:.2f} ns of work for a byte sent or received; "
        f"{rates['direct']:.2f} of the line rate with many peers, {rates['ring']:.2f} on a ring; eight-bit codec "
        f"{rates['minmax']['encode'] / 1e9:.1f} GB/s to encode, {rates['minmax']['decode'] / 1e9:.1f} to decode.",
        "* Seconds are of a step; *alone* is without communication, and with SGD, also where QAdam follows.",
    ]
    if picture is not None:
        lines += ["", f"![Predicted against measured]({picture})"]
    cells = [
        [
            row["model"],
            f"{row['hosts']} x {row['ranks_per_host']}, {network_of(row)}",
            row["algorithm"],
            *(f"{row[name]:.3f}" for name in ("alone_s", "measured_s", "predicted_s")),
            f"{row['error']:+.0%}",
            "*" * row["calibrated"],
        ]
        for row in rows
    ]
    titles = ["model", "network", "algorithm", "alone", "measured", "predicted", "error", "calibrated on"]
    return "\n".join([*lines, "", *markdown_table(titles, cells, "lllrrrrl")]) + "\n"


def network_of(row: Row) -> str:
    """The rate of the network."""
    return f"{row['rate_mbit']} Mbit/s" if row["rate_mbit"] else "no limit"


def draw(record: dict[str, Any]) -> Figure:
    """Draw predicted against measured steps; the grey band is the target."""
    from matplotlib.figure import Figure

    rows = record["results"]
    times = [row[name] for row in rows for name in ("measured_s", "predicted_s")]
    ends = np.array([min(times) / 1.3, max(times) * 1.3])
    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(ends, ends * (1 - TARGET), ends * (1 + TARGET), color="0.92")
    axes.plot(ends, ends, color="0.6", linewidth=0.8)
    for number, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
        for calibrated, marker in ((False, "o"), (True, "*")):
            mine = [row for row in rows if row["model"] == model and row["calibrated"] is calibrated]
            axes.plot(
                [row["measured_s"] for row in mine],
                [row["predicted_s"] for row in mine],
                marker,
                color=f"C{number}",
                markersize=14 if calibrated else 6,
                alpha=0.8,
                label=f"{model}, calibrated on" if calibrated else model,
            )
    for row in rows:
        if abs(row["error"]) > TARGET:
            axes.annotate(
                f" {row['algorithm']}, {row['rate_mbit']}", (row["measured_s"], row["predicted_s"]), fontsize=7
            )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set_xlabel("measured step (s)")
    axes.set_ylabel("predicted step (s)")
    axes.grid(color="0.95", which="both")
    axes.legend(frameon=False)
    return figure


# ---------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------


def parse_rate(text: str) -> int | None:
    """The rate of a network in Mbit/s; "none" is one without limit.

    >>> parse_rate("1000"), parse_rate("none")
    (1000, None)
    """
    return None if text == "none" else int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate, compare, and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="JSON files of benchmarks.training")
    parser.add_argument("--model", default="vgg16", help="the model to calibrate on")
    parser.add_argument(
        "--rates",
        type=comma_list(parse_rate),
        default=[1000, 10000],
        metavar="MBIT,...",
        help="the network rates to calibrate on, in Mbit/s",
    )
    parser.add_argument(
        "--algorithms",
        type=comma_list(str),
        default=["exact", "bytegrad"],
        metavar="A,B",
        help="the algorithms to calibrate on",
    )
    parser.add_argument("--cores-per-rank", type=float, metavar="C", help="unless all ranks share one machine")
    add_out_argument(parser, RESULTS / "costmodel", "json", "md", "png")
    options = parser.parse_args(argv)
    names = options.algorithms
    try:
        points = points_of(read_records(options.files), options.cores_per_rank)
        chosen = [point for rate in options.rates for point in choose(points, options.model, rate, names)]
    except (OSError, ValueError) as exc:
        print(f"costmodel: {exc}", file=sys.stderr)
        return 2
    except KeyError as exc:
        print(
            f"costmodel: expected JSON files of benchmarks.training, but one has no {exc}; "
            "measure with --json, and give those files",
            file=sys.stderr,
        )
        return 2
    rates = calibrate(point.measurement for point in chosen)
    rows = compare(points, chosen, rates)
    record = {
        "benchmark": "costmodel",
        "calibrated_on": {"model": options.model, "rates_mbit": options.rates, "algorithms": names},
        "rates": dataclasses.asdict(rates),
        "summary": summarize(rows),
        "results": rows,
    }
    write_json(options.out.with_name(f"{options.out.name}.json"), record)
    print(write_report(options.out, lambda picture: markdown(record, picture), lambda: draw(record)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
