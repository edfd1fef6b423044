"""The figures of `bagua advise --plot`, by matplotlib, which is optional."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..launch.cli import CommandError
from ..planning.costmodel import METHODS, Cluster, Job, Rates, advise, predict
from .advise_simulated import Simulated
from .quantities import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@contextmanager
def figure_in(path: Path) -> Iterator[Figure]:
    """Write the figure that is drawn in the body of `with`, in the format that the end of the path says.

    Raises:
        CommandError: matplotlib is missing, there is no such format, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise CommandError("--plot needs matplotlib: pip install matplotlib") from exc
    figure = Figure(figsize=(12, 5), layout="constrained")
    yield figure
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as exc:
        raise CommandError(f"--plot {path}: {exc}") from exc


BANDWIDTHS_GBIT = tuple(10 ** (exponent / 8) for exponent in range(-8, 25))
"""The bandwidths of the figure: from 100 Mbit/s to 1 Tbit/s."""

GRADIENTS = {
    "ddp": ("0.5", ":"),
    "float16": ("#7b4fa3", "--"),
    "bytegrad": ("#1f77b4", "-"),
    "error-feedback": ("#17a2b8", "--"),
    "int4": ("#0b3d91", "-."),
    "qadam": ("#e0a100", ":"),
    "hierarchical": ("#2a9d5c", "--"),
    "hierarchical-bytes": ("#d1341f", "-"),
}
WEIGHTS = {
    "decentralized": ("0.5", ":"),
    "one-peer": ("#d95f02", "--"),
    "low-precision-ring": ("#1f77b4", "--"),
    "low-precision-one-peer": ("#1f77b4", "-"),
    "low-precision-by-node": ("#17a2b8", "-."),
    "async": ("#2a9d5c", "--"),
    "diloco-100-bytes": ("#2a9d5c", "-"),
    "sparseloco": ("#d1341f", "-"),
}
"""The algorithms of the two panels of the figure, with colour and line."""


def _dress(axes: Axes, title: str, unit: str, base: int = 10) -> None:
    """Give a panel its title, its grid, and a logarithmic axis in this unit."""
    axes.set_xscale("log", base=base)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(unit)
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(color="0.92")


def plot_bandwidths(figure: Figure, job: Job, cluster: Cluster, rates: Rates) -> None:
    """Draw speed-ups over exact averaging against the bandwidth, as in Bagua's figure of the trade-off.

    Averages of gradients and of weights have a panel each: relaxed algorithms can be hundreds of times as fast on
    a slow network, and on the same scale a factor of two would not be visible.
    """
    clusters = [dataclasses.replace(cluster, bandwidth_gbit=gbit) for gbit in BANDWIDTHS_GBIT]
    names = {advice.name for advice in advise(job, cluster, rates)}

    def steps(name: str) -> list[float]:
        return [predict(METHODS[name], job, at, rates).step_s for at in clusters]

    exact = steps("exact")
    panels = {
        "gradients, in every step": (GRADIENTS, figure.add_subplot(1, 2, 1)),
        "weights: may need more steps": (WEIGHTS, figure.add_subplot(1, 2, 2)),
    }
    for title, (drawn, axes) in panels.items():
        axes.axhline(1, color="0.2", linewidth=1, label="exact")
        axes.axvline(cluster.bandwidth_gbit, color="0.85", zorder=0)
        for name, (colour, line) in drawn.items():
            if name in names:
                ups = [one / other for one, other in zip(exact, steps(name), strict=True)]
                axes.plot(BANDWIDTHS_GBIT, ups, line, color=colour, label=name)
        _dress(axes, title, "bandwidth of a node (Gbit/s)")
        axes.legend(frameon=False, fontsize=8)
        axes.yaxis.set_major_formatter("{x:g}x")
    gradients, weights = (axes for _, axes in panels.values())
    gradients.set_ylim(bottom=0)
    gradients.set_ylabel("speed-up of a step over exact averaging")
    weights.set_yscale("log")
    weights.yaxis.set_major_formatter("{x:g}x")
    figure.suptitle(
        f"{job.model_bytes / 1e6:,.0f} MB, {duration(job.compute_s)} a step alone, "
        f"{cluster.nodes} nodes of {cluster.ranks_per_node}"
    )


def plot_ranks(figure: Figure, job: Job, rows: Sequence[Simulated]) -> None:
    """Draw step times, and steps that count, against the number of ranks."""
    times, scaled = figure.subplots(1, 2)
    names = list(dict.fromkeys(row.name for row in rows))
    for number, name in enumerate(names):
        mine = [row for row in rows if row.name == name]
        sizes = [row.cluster.size for row in mine]
        style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3], "marker": "."}
        times.plot(sizes, [row.simulation.step_s for row in mine], label=name, **style)
        ideal = [row.samples_per_s * job.compute_s / row.cluster.size for row in mine]
        scaled.plot(sizes, ideal, label=name, **style)
    _dress(times, "time of a step, simulated", "ranks", base=2)
    times.set_yscale("log")
    times.set_ylabel("step (s)")
    counts = any(row.goodput for row in rows)
    _dress(scaled, "with deaths" if counts else "without deaths", "ranks", base=2)
    scaled.set_ylim(bottom=0)
    scaled.set_ylabel("speed of a rank, as a share of training alone")
    scaled.legend(frameon=False, fontsize=7, ncols=2)
