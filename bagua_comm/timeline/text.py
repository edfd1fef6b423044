"""A summary as text, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..logs import megabytes
from .summary import Summary

RANK_COLUMNS = {
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

BUCKET_COLUMNS = {"bytes": "size", "exchange_s": "exchange", "hidden": "hidden"}

SPAN_COLUMNS = {"times": "in a step", "seconds": "time in a step"}

CALL_COLUMNS = {"calls": "calls", "seconds": "time of one", "payload_bytes": "size", "wire_bytes": "sent"}

MOST_NAMES = 20
"""Names of spans in a table."""


def cell(name: str, value: float) -> str:
    """The text of a number.

    >>> cell("step_s", 0.0381), cell("hidden", 0.614), cell("wire_bytes", 35_800_000), cell("calls", 3)
    ('38.1 ms', '61 %', '35.8 MB', '3')
    """
    if name == "hidden":
        return f"{100 * value:.0f} %"
    if name.endswith("bytes"):
        return megabytes(value)
    if name in ("calls", "times"):
        return str(value) if isinstance(value, int) else f"{value:.3g}"
    return f"{1e3 * value:.2f} ms" if value < 9.995e-3 else f"{1e3 * value:.1f} ms"


def tables(summary: Summary) -> dict[str, list[list[str]]]:
    """The tables with rows, by their titles; the heads of their columns come first."""
    found = {}
    if summary.ranks:
        first = summary.ranks[0]
        ranks = [(f"rank {each.rank}", vars(each)) for each in summary.ranks]
        mean = [("mean", summary.mean)] if len(ranks) > 1 else []
        buckets = [(f"bucket {each.index}", vars(each)) for each in first.buckets]
        spans = [(each.name, vars(each)) for each in first.marked[:MOST_NAMES]]
        found[f"Mean of {_counted_steps(summary)}"] = _table(_rank_columns(summary), ranks + mean)
        found[f"Buckets, on rank {first.rank}"] = _table(BUCKET_COLUMNS, buckets)
        found[f"Your spans, on rank {first.rank}"] = _table(SPAN_COLUMNS, spans)
    found["Calls, on the first rank"] = _table(CALL_COLUMNS, [(each.name, each.of_one) for each in summary.calls])
    return {title: rows for title, rows in found.items() if len(rows) > 1}


def _table(columns: Mapping[str, str], rows: Sequence[tuple[str, Mapping[str, float]]]) -> list[list[str]]:
    """The heads, and below them a row for each name."""
    cells = [[name, *(cell(column, values[column]) for column in columns)] for name, values in rows]
    return [["", *columns.values()], *cells]


def _rank_columns(summary: Summary) -> dict[str, str]:
    """The columns with a value; the stages that a program does not report are left out, and so are exchanges."""
    always = ["step_s", "waiting_s", "wire_bytes", *(["hidden"] if summary.mean["exchange_s"] else [])]
    return {name: head for name, head in RANK_COLUMNS.items() if name in always or summary.mean[name]}


def _counted_steps(summary: Summary) -> str:
    steps = sorted({each.steps for each in summary.ranks})
    if len(steps) > 1:
        return f"{steps[0]} to {steps[-1]} steps"
    return f"{steps[0]} {'step' if steps == [1] else 'steps'}"


def describe(summary: Summary, notes: Sequence[str], advice: Sequence[str]) -> str:
    """The tables, what is wrong with the file, and the advice, as lines."""
    parts = []
    if notes:
        parts.append("\n".join(f"! {note}" for note in notes))
    if summary.without_steps and summary.ranks:
        names = ", ".join(map(str, summary.without_steps))
        parts.append(f"! No step ends in the timeline of ranks {names}.")
    parts += [f"{title}:\n\n{_aligned(rows)}" for title, rows in tables(summary).items()]
    if summary.slowest is not None:
        own_s = {each.rank: each.own_s for each in summary.ranks}
        least, most = (cell("step_s", value) for value in (min(own_s.values()), max(own_s.values())))
        which = f"Rank {summary.slowest} is slow" if summary.slow else "No rank is slow"
        parts.append(f"{which}: without waits, the median step takes {least} to {most} on the ranks.")
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
