"""The verdict on a soak, its record, and that as text."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ..bench.report import machine_of, markdown_table, or_dash
from .job import STALL_S, Soak
from .resources import Limit

WINDOWS = 12
"""Into how many equal times the table divides a run."""

ROLES = ("rank", "run", "mpirun", "daemon")


def problems(seen: Soak, expected: Sequence[str], grown: Sequence[dict[str, Any]], limit: Limit) -> Iterator[str]:
    """Everything that is wrong with a run."""
    last = seen.last_step()
    if seen.exit_code is None:
        yield f"it stalled at step {last}"
    elif seen.exit_code:
        yield f"exit code {seen.exit_code} at step {last}"
    if (pause_s := seen.longest_pause_s()) > STALL_S:
        yield f"{pause_s:.0f} s passed without a step"
    known = {step: {expected[step]} for step in seen.digests if step <= last}  # later ones were not committed
    wrong = [step for step, found in seen.digests.items() if found != known.get(step, found) or len(found) > 1]
    if wrong:
        yield f"{len(wrong)} commits have other bytes than undisturbed, the first at step {min(wrong)}"
    if set(seen.final) != {(last, expected[last])}:
        yield f"ranks ended with the bytes {sorted(set(seen.final))}, expected {expected[last]} of step {last}"
    for row in grown:
        for name in ("mib", "threads", "descriptors"):
            if row[name] > getattr(limit, name):
                yield f"{row['role']} {row['pid']} has {row[name]:g} {name} more after {row['lived_s']} s"
    if seen.files:
        mib, files = files_growth(seen)
        if mib > limit.shm_mib or files > limit.shm_files:
            yield f"/dev/shm has {mib:.1f} MiB and {files:.0f} files more"
    yield from (f"left {thing}" for thing in seen.left)


def files_growth(seen: Soak) -> tuple[float, float]:
    """By how much files in memory have grown from the first third to the last, in MiB and in number."""
    third = max(1, len(seen.files) // 3)
    first, last = (zip(*part, strict=True) for part in (seen.files[:third], seen.files[-third:]))
    (_, *before), (_, *after) = ([statistics.median(values) for values in part] for part in (first, last))
    return after[0] - before[0], after[1] - before[1]


def windows(seen: Soak) -> list[dict[str, Any]]:
    """Medians of what the job used, in equal times."""
    length = seen.seconds / WINDOWS
    rows = []
    for number in range(WINDOWS):
        begin, end = number * length, (number + 1) * length
        row: dict[str, Any] = {"until_s": round(end)}
        row["step"] = max((step for t, step in seen.committed if t < end), default=0)
        row["disturbances"] = sum(begin <= each["t"] < end for each in seen.disturbed)
        loads = [load for t, load in seen.loads if begin <= t < end]
        row["load"] = round(statistics.median(loads), 1) if loads else None
        for role in ROLES:
            uses = [asdict(use) for use in seen.history.between(role, begin, end)]
            for name in ("mib", "threads", "descriptors"):
                values = [use[name] for use in uses]
                row[f"{role} {name}"] = round(statistics.median(values), 1) if values else None
        files = [(mib, count) for t, mib, count in seen.files if begin <= t < end]
        row["shm mib"] = round(statistics.median(mib for mib, _ in files), 2) if files else None
        row["shm files"] = statistics.median(count for _, count in files) if files else None
        rows.append(row)
    return rows


def results(seen: Soak, expected: Sequence[str], limit: Limit) -> dict[str, Any]:
    """All that a record keeps of a run."""
    grown = sorted(seen.history.grown(), key=lambda row: -row["lived_s"])
    mib, files = files_growth(seen) if seen.files else (0.0, 0.0)
    return {
        "problems": list(problems(seen, expected, grown, limit)),
        "seconds": round(seen.seconds, 1),
        "steps": seen.last_step(),
        "exit_code": seen.exit_code,
        "longest_pause_s": round(seen.longest_pause_s(), 2),
        "final": {"expected": expected[-1], "found": seen.final},
        "commits_compared": len(seen.digests),
        "events": dict(seen.counts),
        "disturbances": dict(Counter(each["kind"] for each in seen.disturbed)),
        "limit": asdict(limit),
        "shm_growth": {"mib": round(mib, 2), "files": files},
        "windows": windows(seen),
        "grown": grown,
        "disturbed": seen.disturbed,
        "left": seen.left,
        "said": [line for line in seen.output.splitlines() if " run: " in line],
    }


def markdown(record: dict[str, Any]) -> str:
    """The report."""
    found = record["results"]
    job = found["job"]
    disturbed = ", ".join(f"{count} x {kind}" for kind, count in sorted(found["disturbances"].items()))
    text = [
        "# A long training that is disturbed all the time",
        "",
        f"* Machine: {machine_of(record)}.",
        f"* {found['seconds'] / 60:.1f} minutes, {found['steps']} steps, seed {record['arguments']['seed']}.",
        f"* Disturbances: {disturbed}.",
        f"* The job: {job['attempts']} starts of mpirun, {job['deaths']} deaths, {job['joined']} processes that "
        f"joined, {job['recoveries']} recoveries.",
        f"* Longest time without a new step: {found['longest_pause_s']:.1f} s; the limit is {STALL_S:.0f} s.",
        f"* Weights of {found['commits_compared']} commits and of {len(found['final']['found'])} ranks at the "
        "end compared with an undisturbed training, byte for byte.",
        f"* Problems: {'; '.join(found['problems']) or 'none'}.",
        "",
        "Medians of each part of the run. Memory is that of a process alone, in MiB.",
        "",
    ]
    titles = ["until (min)", "step", "disturbed", "load of the machine"]
    titles += [f"{role}: MiB, threads, descriptors" for role in ROLES]
    titles += ["/dev/shm: MiB, files"]
    rows = [
        [
            f"{row['until_s'] / 60:.1f}",
            row["step"],
            row["disturbances"],
            or_dash(row.get("load"), "{:.0f}"),
            *(
                ", ".join(or_dash(row[f"{role} {name}"], "{:g}") for name in ("mib", "threads", "descriptors"))
                for role in ROLES
            ),
            f"{or_dash(row['shm mib'], '{:g}')}, {or_dash(row['shm files'], '{:g}')}",
        ]
        for row in found["windows"]
    ]
    text += markdown_table(titles, rows, "r" * len(titles))
    text += [
        "",
        "What the processes that lived longest have grown by, from the first third of their life to the last.",
        "",
    ]
    titles = ["process", "lived (s)", "MiB", "threads", "descriptors"]
    text += markdown_table(
        titles,
        [[r["role"], r["lived_s"], r["mib"], r["threads"], r["descriptors"]] for r in found["grown"][:12]],
        "lrrrr",
    )
    return "\n".join(text) + "\n"
