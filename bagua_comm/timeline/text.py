"""A summary as text, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from ..logs import megabytes
from .summary import Summary

COLUMNS = {
    "step_s": "step",
    "forward_s": "forward",
    "backward_s": "backward",
    "compute_s": "forward and backward",
    "optimizer_s": "optimizer",
    "waiting_s": "waiting",
    "marked_s": "your spans",
    "other_s": "other",
    "exchange_s": "exchange",
    "hidden": "hidden",
    "wire_bytes": "sent",
}
"""The fields of `RankSummary` that are shown, and the heads of their columns."""


MOST_NAMES = 20
"""Names of spans in a table."""


def shown_columns(summary: Summary) -> dict[str, str]:
    """The columns with a value; the stages that a program does not report are left out, and so are exchanges."""
    always = ["step_s", "waiting_s", "wire_bytes"]
    if summary.mean.get("exchange_s"):
        always.append("hidden")
    return {name: head for name, head in COLUMNS.items() if name in always or summary.mean.get(name)}


def cell(name: str, value: float) -> str:
    """The text of a number.

    >>> cell("step_s", 0.0381), cell("hidden", 0.614), cell("wire_bytes", 35_800_000)
    ('38.1 ms', '61 %', '35.8 MB')
    """
    if name == "hidden":
        return f"{100 * value:.0f} %"
    if name.endswith("bytes"):
        return megabytes(value)
    return f"{1e3 * value:.2f} ms" if value < 9.995e-3 else f"{1e3 * value:.1f} ms"


def rank_table(summary: Summary) -> list[list[str]]:
    """A row for each rank, and one for their mean, below the heads."""
    columns = shown_columns(summary)
    rows = [["", *columns.values()]]
    rows += [
        [f"rank {each.rank}", *(cell(name, getattr(each, name)) for name in columns)] for each in summary.ranks
    ]
    if len(summary.ranks) > 1:
        rows.append(["mean", *(cell(name, summary.mean[name]) for name in columns)])
    return rows


def bucket_table(summary: Summary) -> list[list[str]]:
    """A row for each bucket of the first rank, below the heads; empty without exchanges."""
    rows = [
        [
            f"bucket {each.index}",
            megabytes(each.bytes),
            cell("exchange_s", each.exchange_s),
            cell("hidden", each.hidden),
        ]
        for each in (summary.ranks[0].buckets if summary.ranks else ())
    ]
    return [["", "size", "exchange", "hidden"], *rows] if rows else []


def marked_table(summary: Summary) -> list[list[str]]:
    """A row for each name of a span that the program marks, on the first rank, below the heads; else empty."""
    rows = [
        [each.name, f"{each.times:.3g}", cell("marked_s", each.seconds)]
        for each in (summary.ranks[0].marked[:MOST_NAMES] if summary.ranks else ())
    ]
    return [["", "in a step", "time in a step"], *rows] if rows else []


def call_table(summary: Summary) -> list[list[str]]:
    """A row for each name of a call, below the heads; empty with exchanges, and without calls."""
    rows = [
        [
            each.name,
            str(each.calls),
            cell("call_s", each.seconds / each.calls),
            megabytes(each.payload_bytes / each.calls),
            megabytes(each.wire_bytes / each.calls),
        ]
        for each in summary.calls
    ]
    return [["", "calls", "time of one", "size", "sent"], *rows] if rows else []


def describe(summary: Summary, notes: Sequence[str], advice: Sequence[str]) -> str:
    """The tables, what is wrong with the file, and the advice, as lines."""
    parts = []
    if notes:
        parts.append("\n".join(f"! {note}" for note in notes))
    if summary.without_steps and summary.ranks:
        names = ", ".join(map(str, summary.without_steps))
        parts.append(f"! No step ends in the timeline of ranks {names}.")
    if summary.ranks:
        steps = sorted({each.steps for each in summary.ranks})
        counts = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        noun = "step" if steps == [1] else "steps"
        parts.append(f"Mean of {counts} {noun}:\n\n{_aligned(rank_table(summary))}")
    if summary.slowest is not None:
        own_s = {each.rank: each.own_s for each in summary.ranks}
        least, most = (cell("step_s", value) for value in (min(own_s.values()), max(own_s.values())))
        which = f"Rank {summary.slowest} is slow" if summary.slow else "No rank is slow"
        parts.append(f"{which}: without waits, the median step takes {least} to {most} on the ranks.")
    if buckets := bucket_table(summary):
        parts.append(f"Buckets, on rank {summary.ranks[0].rank}:\n\n{_aligned(buckets)}")
    if marked := marked_table(summary):
        parts.append(f"Your spans, on rank {summary.ranks[0].rank}:\n\n{_aligned(marked)}")
    if calls := call_table(summary):
        parts.append(f"Calls, on the first rank:\n\n{_aligned(calls)}")
    if advice:
        parts.append("\n".join(f"* {text}" for text in advice))
    return "\n\n".join(parts)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table with columns as wide as their longest cells."""
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for head, *texts in rows:
        cells = [text.rjust(width) for text, width in zip(texts, others, strict=True)]
        lines.append("  ".join([head.ljust(first), *cells]))
    return "\n".join(lines)
