"""A table and a figure of a record of trials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..bench.report import machine_of, markdown_table, or_dash
from ..bench.table import Column, Table, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE = Table(
    (
        Column("kind", width=20),
        Column("trials", width=7),
        Column("as it must", width=10),
        Column("failed", width=7),
        Column("missed", width=7),
        Column("left over", width=9),
        Column("median", "(ms)", 8, "recovery"),
        Column("q1", "(ms)", 8, "recovery"),
        Column("q3", "(ms)", 8, "recovery"),
        Column("max", "(ms)", 8, "recovery"),
    )
)

Rows = Sequence[dict[str, Any]]


def times_of(rows: Rows) -> np.ndarray:
    """The times of all trials that have one, in milliseconds: how long until it went on, or ended."""
    times = [row.get("recovery_s") or row.get("ended_s") for row in rows]
    return np.array([time * 1e3 for time in times if time is not None])


def groups(rows: Rows) -> dict[str, list[dict[str, Any]]]:
    """The trials by what was done to them and what must come."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["group"], []).append(row)
    return found


def cells(group: str, rows: Rows) -> list[str]:
    """A row of the table."""
    times = times_of([row for row in rows if row["outcome"] in ("went on", "ended")])
    count = {name: sum(row["outcome"] == name for row in rows) for name in ("failed", "missed")}
    spread = [number(np.percentile(times, q)) if times.size else "-" for q in (50, 25, 75, 100)]
    well = len(rows) - sum(count.values())
    left = sum(bool(row["left"]) for row in rows)
    return [group, *map(str, (len(rows), well, count["failed"], count["missed"], left)), *spread]


def lines(rows: Rows) -> list[str]:
    """The table, and every failure."""
    said = [*TABLE.header(), *(TABLE.row(cells(group, its)) for group, its in groups(rows).items())]
    for row in rows:
        if row["outcome"] == "failed" or row["left"]:
            what = [*row["problems"], *(f"left {thing}" for thing in row["left"])]
            said.append(f"# {row['name']} ({row['algorithm']}): {'; '.join(what)[:600]}")
    return said


def markdown(record: dict[str, Any], figure: str | None = None) -> str:
    """The report."""
    rows = record["trials"]
    text = ["# Ranks that die", "", f"* Machine: {machine_of(record)}.", f"* Seed: {record['seed']}."]
    if figure is not None:
        text += ["", f"![Recovery times]({figure})"]
    titles = [column.title for column in TABLE.columns[:6]]
    titles += [f"{column.title} {column.unit}" for column in TABLE.columns[6:]]
    table = [cells(group, its) for group, its in groups(rows).items()]
    text += ["", *markdown_table(titles, table, "l" + "r" * (len(titles) - 1))]
    by_algorithm: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_algorithm.setdefault(row["algorithm"], []).append(row)
    table = [
        [
            f"`{algorithm}`",
            str(len(its)),
            str(sum(row["outcome"] == "failed" for row in its)),
            or_dash(float(np.median(times)) if (times := times_of(its)).size else None, "{:.0f}"),
        ]
        for algorithm, its in by_algorithm.items()
    ]
    text += ["", *markdown_table(["algorithm", "trials", "failed", "median (ms)"], table, "lrrr")]
    text += ["", *(f"* {commit_line(row)}." for row in record.get("commits", ()))]
    return "\n".join(text).rstrip() + "\n"


def commit_line(row: dict[str, Any]) -> str:
    """The cost of commits, in one line."""
    ms = row["ms"]
    return (
        f"commit of {row['bytes'] / 1e6:.0f} MB on {row['where']}, {row['ranks']} ranks: {ms['median']:.1f} ms "
        f"({ms['q1']:.1f} to {ms['q3']:.1f}), {row['of_a_step']:.1%} of a step"
    )


def draw(rows: Rows) -> Figure:
    """The recovery times of all trials, by group, on a logarithmic axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    shown = {group: times for group, its in groups(rows).items() if (times := times_of(its)).size}
    for place, times in enumerate(shown.values()):
        ordered = np.sort(times)
        jitter = np.linspace(-0.3, 0.3, ordered.size) if ordered.size > 1 else np.zeros(1)
        axes.plot(ordered, place + jitter, ".", alpha=0.6)
        axes.plot([np.median(ordered)] * 2, [place - 0.4, place + 0.4], color="black")
    axes.set_yticks(range(len(shown)), list(shown))
    axes.set_xscale("log")
    axes.set_xlabel("from the blow to the first step of all ranks, or to the end (ms); the bar is the median")
    return figure
