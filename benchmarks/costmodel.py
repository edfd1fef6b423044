"""Whether the cost model predicts what was measured: calibrated on a few rows of training.py, it meets the rest.

    python benchmarks/costmodel.py vgg16-*.json bert-*.json --model vgg16 --rates 1000,10000 --out results

writes costmodel.json, costmodel.md and costmodel.png to the folder. The rows of `--algorithms` for that model at
those network rates are what `calibration.calibrate` sees: a slow network shows which share of its rate
is reached, and a fast one the work. The others are predicted from what comes out and the times of computation
alone, those of the `alone` row of the same model and network. The JSON file has the calibrated rates as
`python -m bagua_comm advise --rates` reads them.

Hosts are taken to be emulated on one machine, whose cores all ranks share; `--cores-per-rank` says otherwise.
Steps that are all alike are measured by their median, others (of algorithms that communicate now and then) by
their mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from calibration import Measurement, calibrate

import bagua_comm
from bagua_comm import AsyncModelAverage, DiLoCo
from bagua_comm.algorithms.combinators import Every
from bagua_comm.planning.costmodel import (
    Cluster,
    Job,
    Method,
    Rates,
    TorchDDP,
    predict,
)
from bagua_comm.planning.models import MODELS

ALONE = "alone"
TORCH = {"ddp": TorchDDP(), "ddp-view": TorchDDP(), "ddp-fp16": TorchDDP(dtype="float16")}
TARGET = 0.2
"""How far from what was measured a prediction may be."""

LATENCY_S = 100e-6
"""Of a message between emulated hosts."""

Row = dict[str, Any]


class Point(NamedTuple):
    """A row of training.py, as the model sees it."""

    row: Row
    measurement: Measurement


# ---------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------


def points_of(records: Iterable[dict[str, Any]], cores_per_rank: float | None = None) -> list[Point]:
    """What was measured, but for what communicates nothing. Of rows that are alike the last is kept.

    Raises:
        ValueError: Nothing says how long computation takes, or which algorithm was measured.
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
    """What rows that were measured together have in common; the rate comes last."""
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

    >>> method_of({"algorithm": "bytegrad", "settings": "GradientAllReduce(average=Quantized())"})
    GradientAllReduce(average=Quantized(codec=MinMaxUInt8(block=512, eps=0.0)))
    """
    if row["algorithm"] in TORCH:
        return TORCH[row["algorithm"]]
    try:
        method: Method = eval(row["settings"], {"__builtins__": {}}, vars(bagua_comm))
    except Exception as exc:
        raise ValueError(f"{row['algorithm']}: {row['settings']!r} is no algorithm: {exc}") from exc
    return method


def measured_s(row: Row, method: Method) -> float:
    """Seconds of a step: the median, or the mean where only some steps communicate."""
    if isinstance(method, (Every, DiLoCo, AsyncModelAverage)):
        return float(np.mean(row["seconds"]))
    return float(row["median_s"])


# ---------------------------------------------------------------------------------------------------
# Comparison
# ---------------------------------------------------------------------------------------------------


def compare(points: Sequence[Point], chosen: Sequence[Point], rates: Rates) -> list[Row]:
    """Predicted beside measured; those that rates were calibrated on are marked."""
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


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """How good the predictions are of what was not calibrated on."""
    errors = np.abs([row["error"] for row in rows if not row["calibrated"]])
    if not len(errors):
        return {"predicted": 0, "within": 0, "median": None, "worst": None}
    return {
        "predicted": len(errors),
        "within": int((errors <= TARGET).sum()),
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


def markdown(record: dict[str, Any]) -> str:
    """The report, but for the figure."""
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
        "",
        "![Predicted against measured](costmodel.png)",
        "",
        "| model | network | algorithm | alone | measured | predicted | error | |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        rate = f"{row['rate_mbit']} Mbit/s" if row["rate_mbit"] else "no limit"
        lines.append(
            f"| {row['model']} | {row['hosts']} x {row['ranks_per_host']}, {rate} | {row['algorithm']} | "
            f"{row['alone_s']:.3f} | {row['measured_s']:.3f} | {row['predicted_s']:.3f} | {row['error']:+.0%} | "
            f"{'*' * row['calibrated']} |"
        )
    return "\n".join(lines) + "\n"


def plot(record: dict[str, Any], path: Path) -> None:
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
    figure.savefig(path, dpi=110)


# ---------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------


def parse_rates(text: str) -> list[int | None]:
    """Rates of networks in Mbit/s, of which "none" is one without limit.

    >>> parse_rates("1000,none")
    [1000, None]
    """
    return [None if part == "none" else int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate, compare, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="JSON files of benchmarks/training.py")
    parser.add_argument("--model", default="vgg16", help="to calibrate on")
    parser.add_argument("--rates", type=parse_rates, default=[1000, 10000], metavar="MBIT,...", help="the same")
    parser.add_argument("--algorithms", default="exact,bytegrad", metavar="NAMES", help="the same")
    parser.add_argument("--cores-per-rank", type=float, metavar="C", help="unless all ranks share one machine")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    names = options.algorithms.split(",")
    try:
        points = points_of((json.loads(path.read_text()) for path in options.files), options.cores_per_rank)
        chosen = [point for rate in options.rates for point in choose(points, options.model, rate, names)]
    except (OSError, ValueError) as exc:
        print(f"costmodel: {exc}", file=sys.stderr)
        return 2
    except KeyError as exc:
        print(f"costmodel: a file is none of training.py: it has no {exc}", file=sys.stderr)
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
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "costmodel.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.out / "costmodel.md").write_text(markdown(record))
    plot(record, options.out / "costmodel.png")
    print(markdown(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
