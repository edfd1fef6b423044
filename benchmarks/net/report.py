"""The table and the figure of a record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..bench.record import Record
from ..bench.report import machine_of, markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def rates(result: Record) -> dict[str, dict[int, float]]:
    """MB/s by scheme and size."""
    found: dict[str, dict[int, float]] = {}
    for one in result["results"]:
        found.setdefault(one["scheme"], {})[one["bytes"]] = one["bytes"] / one["median_s"] / 1e6
    return found


def is_stock(scheme: str) -> bool:
    return scheme not in ("plugin", "one flow")


def table(result: Record) -> list[str]:
    """Ours, one flow, NCCL's default, and the best of its grid, at each size.

    Where the link holds the flows, nothing is compared with more than it carries: that is a burst.
    """
    by = rates(result)
    line = result["line_mb_s"] or float("inf")
    rows = []
    for size, ours in by["plugin"].items():
        stock = {name: its[size] for name, its in by.items() if is_stock(name)}
        best = max(stock, key=lambda name: stock[name])
        default = stock.get("default")
        one = by.get("one flow", {}).get(size)
        rows.append(
            [
                size,
                f"{ours:.3g}",
                f"{one:.3g}" if one else "-",
                f"{default:.3g}" if default else "-",
                f"{stock[best]:.3g} ({best})",
                f"{ours / default:.2f}" if default else "-",
                f"{ours / min(line, stock[best]):.2f}",
            ]
        )
    titles = ["bytes", "plugin", "one flow", "default", "best of the grid", "to default", "to the best"]
    return markdown_table(titles, rows, "r" * len(titles))


def report(record: Record, picture: str | None) -> str:
    """The tables as Markdown."""
    lines = [
        "# The network plugin and NCCL's own scheme",
        "",
        machine_of(record),
        "",
        "MB/s (10**6 bytes a second) of a round: so many bytes one way, in messages of at most 1 MiB, four on",
        "their way, then 8 bytes back. *Default*: NCCL's scheme with one socket. *Grid*: with T threads and S",
        "sockets each, the best at each size. NCCL's scheme is `benchmarks/stock_net.c`, after its published",
        "behaviour. A flow that has rested sends 16 KiB at once, faster than its cap, so a scheme that spreads",
        "small rounds over its flows beats the cap. An idle link lets 64 KiB pass at once; where it is the link",
        "that holds the flows, a best rate above what it carries counts as what it carries. Both hosts are on",
        "the same cores.",
        "",
    ]
    for result in record["results"]:
        others = [name for name in rates(result) if is_stock(name) and name != "default"]
        lines += [f"## {result['text'][0].upper()}{result['text'][1:]}", "", *table(result), ""]
        lines += [f"Grid: {', '.join(others)}. Wrong bytes: {result['wrong']}.", ""]
    if picture:
        lines += [f"![rates]({picture})", ""]
    return "\n".join(lines)


def draw(record: Record) -> Figure:
    """A plot for each link."""
    from matplotlib.figure import Figure

    results = record["results"]
    figure = Figure(figsize=(11, 3.8 * ((len(results) + 1) // 2)), layout="constrained")
    for number, result in enumerate(results, 1):
        axes = figure.add_subplot((len(results) + 1) // 2, 2, number)
        by = rates(result)
        sizes = [*by["plugin"]]
        stock = {name: its for name, its in by.items() if is_stock(name)}
        best = [max(its[size] for its in stock.values()) for size in sizes]
        axes.loglog(sizes, by["plugin"].values(), "o-", label="plugin")
        axes.loglog(sizes, best, "s--", label="best of NCCL's grid")
        for name in ("default", "one flow"):
            if name in by:
                axes.loglog(sizes, by[name].values(), ":", label=name)
        axes.set(title=result["text"], xlabel="bytes", ylabel="MB/s")
        axes.title.set_fontsize(9)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    return figure
