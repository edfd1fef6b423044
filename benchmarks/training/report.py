"""Tables and a figure of training speed, from several JSON files of benchmarks.training together.

    python -m benchmarks.training.report vgg16.json bert.json --out results/training

The last of the rows for the same model, network and algorithm counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench import RESULTS
from ..bench.arguments import add_out_argument
from ..bench.report import machine_of, markdown_table, or_dash, read_records, write_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINES, ALONE = ("ddp", "ddp-view"), "alone"
"""PyTorch's own wrapper, with and without `gradient_as_bucket_view`; and no communication."""


def merge(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of all records, each with two further numbers, of what is in the same record; None without it.

    `speedup` is over PyTorch's own, the faster of `BASELINES`; `of_limit` is the time that a step takes at least
    (`limit_s`), by its time.
    Of rows for the same model, network and algorithm the last is kept.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in records:
        baselines: dict[tuple[Any, ...], float] = {}
        for row in record["results"]:
            if row["algorithm"] in BASELINES:
                baselines[group_of(row)] = max(row["samples_per_s"], baselines.get(group_of(row), 0.0))
        alone_s = {group_of(row): row["median_s"] for row in record["results"] if row["algorithm"] == ALONE}
        for row in record["results"]:
            baseline = baselines.get(group_of(row))
            speedup = row["samples_per_s"] / baseline if baseline else None
            least_s = limit_s(row, alone_s.get(group_of(row)))
            of_limit = least_s / row["median_s"] if least_s is not None else None
            rows[(*group_of(row), row["algorithm"])] = {**row, "speedup": speedup, "of_limit": of_limit}
    return list(rows.values())


def limit_s(row: dict[str, Any], alone_s: float | None) -> float | None:
    """A lower bound of the step: its computation, or its bytes at the rate of the line if that takes longer.

    The bytes are those that the rank sent. PyTorch's own does not count them: an allreduce of the gradients sends
    at least 2 (p - 1) / p of them, or half as much in float16. None for hosts of several ranks, where not all
    bytes that a rank sends cross the line, and where a time or a rate is missing.

    >>> row = {"algorithm": "ddp", "hosts": 4, "ranks_per_host": 1, "rate_mbit": 8, "model_bytes": 1_000_000,
    ...        "wire_bytes": None}
    >>> limit_s(row, 1.0), limit_s(row, 2.0)
    (1.5, 2.0)
    """
    if alone_s is None or row["rate_mbit"] is None or row["ranks_per_host"] != 1:
        return None
    sent = row["wire_bytes"] or 0.0
    if row["algorithm"].startswith(BASELINES):
        sent = 2 * (row["hosts"] - 1) / row["hosts"] * row["model_bytes"]
        sent /= 2 if row["algorithm"] == "ddp-fp16" else 1
    return float(max(alone_s, sent * 8 / (row["rate_mbit"] * 1e6)))


def group_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Settings that the rows of one table have in common."""
    return tuple(row[key] for key in ("model", "hosts", "ranks_per_host", "rate_mbit", "batch"))


def grouped(rows: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """The rows of each table, in the order in which they came."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(group_of(row), []).append(row)
    return groups


def network_of(row: dict[str, Any]) -> str:
    """The hosts, and the rate between them.

    >>> network_of({"hosts": 4, "ranks_per_host": 1, "rate_mbit": 1000})
    '4 hosts at 1000 Mbit/s'
    >>> network_of({"hosts": 1, "ranks_per_host": 2, "rate_mbit": None})
    '1 host of 2 ranks'
    """
    text = f"{row['hosts']} host{'s' if row['hosts'] != 1 else ''}"
    if row["ranks_per_host"] != 1:
        text += f" of {row['ranks_per_host']} ranks"
    return text if row["rate_mbit"] is None else f"{text} at {row['rate_mbit']} Mbit/s"


# ---------------------------------------------------------------------------------------------------
# Markdown
# ---------------------------------------------------------------------------------------------------


def markdown(records: Sequence[dict[str, Any]], figure: str | None = None, title: str = "Training speed") -> str:
    """The report; `figure` is the name of a picture to show in it."""
    lines = [f"# {title}", ""]
    lines += dict.fromkeys(f"* Machine: {machine_of(record)}." for record in records)
    lines += [
        "* All algorithms of a table trained in turn, in the same processes, for several rounds.",
        "* Samples a second are of all ranks together: mean and standard deviation over the rounds. Steps are",
        "  the slowest rank's: median and quartiles. The speed-up is over PyTorch's own wrapper on gloo, the",
        "  faster of `ddp` and `ddp-view`.",
        "* A step takes at least as long as the computation alone, and as its bytes at the rate of the line. The",
        "  longer of the two, by what the step took, is its share of the limit.",
        "* Bytes sent are those of one rank. Overlap is the time of exchanges within the backward pass, by the",
        "  shorter of the two: 100 % is all that can be hidden.",
        "* Processors of the machine, with all that it emulates, are busy for a share of the time of the steps.",
    ]
    if figure is not None:
        lines += ["", f"![Speed-up over PyTorch's DistributedDataParallel]({figure})"]
    for rows in grouped(merge(records)).values():
        lines += ["", *_section(rows)]
    return "\n".join(lines) + "\n"


def _section(rows: Sequence[dict[str, Any]]) -> list[str]:
    first = rows[0]
    lines = [
        f"## {first['model']}, {network_of(first)}",
        "",
        f"{first['parameters']:,} parameters, {first['model_bytes'] / 1e6:,.1f} MB; "
        f"{first['batch']} {first['samples']} a rank and step.",
    ]
    for row in rows:
        if row["compute"] is not None:
            parts = (f"{name.removesuffix('_s')} {value:.3g} s" for name, value in row["compute"].items())
            lines.append(f"Compute alone: {', '.join(parts)}.")
    titles = [
        "algorithm",
        f"{first['samples']}/s",
        "step (s)",
        "quartiles (s)",
        "speed-up",
        "of the limit",
        "MB sent a step",
        "overlap",
        "processors busy",
        "settings",
    ]
    cells = [
        [
            row["algorithm"],
            f"{row['samples_per_s']:.3g} ± {row['samples_per_s_std']:.2g}",
            f"{row['median_s']:.3g}",
            f"{row['q1_s']:.3g} to {row['q3_s']:.3g}",
            or_dash(row["speedup"], "{:.2f}"),
            or_dash(row["of_limit"], "{:.0%}"),
            or_dash(row["wire_bytes"] and row["wire_bytes"] / 1e6, "{:,.1f}"),
            or_dash(row["overlap"], "{:.0%}"),
            or_dash(row.get("busy"), "{:.0%}"),
            f"`{row['settings']}`",
        ]
        for row in rows
    ]
    return [*lines, "", *markdown_table(titles, cells, "lrrrrrrrrl")]


# ---------------------------------------------------------------------------------------------------
# The figure
# ---------------------------------------------------------------------------------------------------


WIDTH_IN, DPI = 5.0, 200
"""The size of the figure; a phone shows it 390 pixels wide, and letters of 10 points 11 pixels high."""


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw the speed-ups: a panel for each model, below each other; a bar for each algorithm and network."""
    from matplotlib.figure import Figure

    compared = sorted(filter(is_compared, rows), key=_by_network)
    models = list(dict.fromkeys(row["model"] for row in compared))
    label_of = _labels(compared)
    labels = list(dict.fromkeys(label_of.values()))
    panels = [[row for row in compared if row["model"] == model] for model in models]
    heights = [0.17 * (len(panel) + len({row["algorithm"] for row in panel})) + 0.5 for panel in panels]
    size = (WIDTH_IN, sum(heights) + 0.19 * len(labels) + 0.5)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    all_axes = figure.subplots(len(models), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, model, panel in zip(all_axes, models, panels, strict=True):
        _draw(axes, model, panel, labels, label_of)
    all_axes[-1].set_xlabel("speed-up over PyTorch's DDP on gloo", fontsize=10)
    bars: dict[str, Any] = {}
    for axes in figure.axes:
        bars |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    in_order = [bars[label] for label in labels]
    figure.legend(in_order, labels, loc="outside lower center", ncols=1, fontsize=10, frameon=False)
    return figure


def is_compared(row: dict[str, Any]) -> bool:
    """Whether a row has a bar in the figure: it is another algorithm than PyTorch's, and communicates."""
    return row["speedup"] is not None and row["algorithm"] not in (*BASELINES, ALONE)


def _by_network(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["ranks_per_host"], row["hosts"], row["rate_mbit"] or 0, row["batch"]


def _labels(rows: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], str]:
    """The label of each network and batch; with the batch only where it differs between rows."""
    differ = len({row["batch"] for row in rows}) > 1
    return {_by_network(r): network_of(r) + (f", batch {r['batch']}" if differ else "") for r in rows}


def _draw(
    axes: Any,
    model: str,
    rows: Sequence[dict[str, Any]],
    labels: Sequence[str],
    label_of: Mapping[tuple[Any, ...], str],
) -> None:
    """Draw one panel: the bars of an algorithm one below the other, and a space before the next."""
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    rows = sorted(rows, key=lambda row: names.index(row["algorithm"]))
    places = {id(row): at + names.index(row["algorithm"]) for at, row in enumerate(rows)}
    for number, label in enumerate(labels):
        mine = [row for row in rows if label_of[_by_network(row)] == label]
        if mine:
            speedups = [row["speedup"] for row in mine]
            bars = axes.barh([places[id(row)] for row in mine], speedups, 1, color=f"C{number}", label=label)
            axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=9)
    axes.axvline(1, color="0.3", linewidth=0.8)
    axes.margins(x=0.12)
    of_name = [[places[id(row)] for row in rows if row["algorithm"] == name] for name in names]
    has_room = len(rows) > len(names)  # for two lines
    texts = [name.replace("-", "-\n", 1) if has_room and len(name) > 12 else name for name in names]
    axes.set_yticks([sum(found) / len(found) for found in of_name], texts, fontsize=10)
    axes.tick_params(axis="x", labelsize=10)
    axes.invert_yaxis()
    axes.set_title(model, loc="left", fontweight="bold")
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)


# ---------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="JSON files of benchmarks.training")
    parser.add_argument("--title", default="Training speed")
    add_out_argument(parser, RESULTS / "training", "md", "png")
    options = parser.parse_args(argv)
    records = read_records(options.files)
    rows = merge(records)
    figure = partial(draw, rows) if any(map(is_compared, rows)) else None
    write_report(options.out, partial(markdown, records, title=options.title), figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
