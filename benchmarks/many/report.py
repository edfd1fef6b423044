"""What a job of many ranks has cost, in a row, a line and a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..bench.report import machine_of, markdown_table, or_dash


def start_of(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """When the last rank had imported this library, and was connected, in seconds after the start of the job."""
    return {name: round(max(rank[name] for rank in ranks), 2) for name in (ranks[0] if ranks else ())}


def summary(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The measurements of all ranks in a few numbers; a call takes as long as on the slowest rank."""

    def over_ranks(name: str) -> list[float]:
        return [rank[name] for rank in measured]

    def milliseconds(name: str) -> dict[str, float]:
        longest = np.array(over_ranks(name)).max(axis=0) * 1e3  # of (ranks, calls)
        return {"median": round(float(np.median(longest)), 2), "max": round(float(longest.max()), 2)}

    return {
        "constructed_s": round(max(over_ranks("constructed_s")), 2),
        "step_ms": milliseconds("step_s"),
        "call_ms": milliseconds("call_s"),
        "mib": {"median": round(float(np.median(over_ranks("mib"))), 1), "max": round(max(over_ranks("mib")), 1)},
        "threads": max(over_ranks("threads")),
        "descriptors": max(over_ranks("descriptors")),
        "loss": [round(each, 4) for each in measured[0]["loss"]],
    }


def lines(record: dict[str, Any]) -> list[str]:
    """The job in a few lines."""
    start = record["start"]
    said = [f"{record['ranks']} ranks: {', '.join(f'{name} {value}' for name, value in start.items())}"]
    for row in record["results"]:
        times = f"a step {row['step_ms']['median']:.1f} ms, a call {row['call_ms']['median']:.1f} ms"
        rest = f"{row['mib']['median']:.1f} MiB a rank, loss {row['loss'][0]:.3f} to {row['loss'][1]:.3f}"
        said.append(f"{row['name']:>14}: {times}, {rest}; {'; '.join(row['problems']) or 'no failure'}")
    return [*said, *record["problems"]]


TITLES = (
    "algorithm",
    "engine made (s)",
    "step (ms)",
    "allreduce of 4 KiB (ms)",
    "MiB of a rank",
    "threads",
    "descriptors",
    "loss",
    "failures",
)


def markdown(record: dict[str, Any]) -> str:
    """The report."""
    start = record["start"]
    text = ["# Many ranks on one machine", "", f"* Machine: {machine_of(record)}."]
    if start:
        text.append(
            f"* Start: the last rank had imported the library after {start['imported_s']:.1f} s, and was "
            f"connected after {start['connected_s']:.1f} s."
        )
    text += [
        "* A step and a call take as long as on the slowest rank; the table has medians. Ranks share few cores.",
        "* Memory is that of a process alone, without what it shares with others.",
        f"* Failures of the job: {'; '.join(record['problems']) or 'none'}.",
        "",
    ]
    rows = [
        [
            row["name"],
            row["constructed_s"],
            *(row[name]["median"] for name in ("step_ms", "call_ms", "mib")),
            row["threads"],
            row["descriptors"],
            "{:.3f} to {:.3f}".format(*row["loss"]),
            "; ".join(row["problems"]) or "none",
        ]
        for row in record["results"]
    ]
    text += markdown_table(TITLES, rows, "lrrrrrrll")
    if "elastic" in record:
        row = record["elastic"]
        recovery = or_dash(row["recovery_s"], "{:.2f} s from the second death to a step of all others")
        text += ["", f"* {row['name']}, two ranks killed: {row['outcome']}, {recovery}."]
        text += [f"* {problem}." for problem in [*row["problems"], *row["left"]]]
    return "\n".join(text) + "\n"
