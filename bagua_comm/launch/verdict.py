"""The outcome of an attempt to run a supervised job, from its record and mpirun's exit code.

mpirun's exit code alone is not enough: where ranks may die, it is 0 or 137 for the same outcome, and 0 also when
a host has died. An attempt

    succeeded     if ranks recorded that they trained to the end, and finished the program; or, for a program
                  without `elastic.run`, if mpirun returned 0 and every rank that connected finished, and, where a
                  host did not answer afterwards, if the record shows that all ranks have connected
    failed        if a rank ended with an uncaught exception of its own, or with an exit code of its own, since a
                  restart would fail again; or if it died after training, but before the end of the program, when
                  commits are gone. It is not restarted
    was lost      otherwise: ranks were killed by signals or ended because of others, mpirun was killed, or hosts
                  are gone. It is restarted
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from ..bootstrap.job import Event

MOST_SIGNALS = 64
"""The highest number of a signal; the exit code of a shell, and of mpirun, is 128 more."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of an attempt, its exit code, and the reason."""

    outcome: Literal["succeeded", "failed", "lost", "stopped"]
    code: int
    why: str

    @property
    def succeeded(self) -> bool:
        """Whether the job has succeeded."""
        return self.outcome == "succeeded"


def judge(entries: Sequence[Event], code: int, *, gone: Sequence[str] = ()) -> Verdict:
    """Return the verdict on an attempt.

    Args:
        entries: The entries of this attempt in the record.
        code: mpirun's exit code; below 0 if a signal has ended mpirun.
        gone: The hosts of the attempt that do not answer.

    >>> judge([], 0).outcome, judge([], 3).outcome, judge([], 137).outcome
    ('succeeded', 'failed', 'lost')
    """
    errors = [entry for entry in entries if entry["kind"] == "error"]
    own = [entry for entry in errors if not entry.get("due_to_others")]
    trained = {_process(entry) for entry in entries if entry["kind"] == "trained"}
    missing, before = unfinished(entries), _deaths_before_connect(entries)
    if own:
        return Verdict("failed", code if 0 < code < 128 else 1, _describe(own[0]))
    is_lost = errors or missing or gone or before
    if 1 < code < 128 or (code == 1 and not is_lost):
        return Verdict("failed", code, f"the program ended with exit code {code}")
    if trained:
        missing = [entry for entry in missing if _process(entry) in trained]
        if not missing:
            return Verdict("succeeded", 0, "all ranks that trained have finished")
        return Verdict("failed", code or 1, f"{_names(missing)} died after training, so no commit is left")
    if gone and not (code == 0 and _have_all_connected(entries) and not missing):
        why = f"{_listed('host', gone)} stopped answering"
    elif errors:
        why = _describe(errors[0])
    elif missing:
        why = f"{_names(missing)} did not finish"
    elif before:
        why = before
    elif code < 0:
        why = f"{_name(-code)} ended mpirun"
    elif 128 < code <= 128 + MOST_SIGNALS:
        why = f"{_name(code - 128)} ended a rank"
    elif code:
        return Verdict("failed", code, f"mpirun ended with exit code {code}")
    else:
        return Verdict("succeeded", 0, "the program has finished")
    return Verdict("lost", 128 - code if code < 0 else code or 1, why)


def unfinished(entries: Sequence[Event]) -> list[Event]:
    """Return the start entries of ranks without an end entry: they were killed, perhaps by mpirun."""
    ended = {_process(entry) for entry in entries if entry["kind"] in ("exit", "error")}
    return [entry for entry in entries if entry["kind"] == "start" and _process(entry) not in ended]


def _have_all_connected(entries: Sequence[Event]) -> bool:
    """Whether the record has all ranks that MPI started; those of a host that does not answer are missing."""
    starts = {_process(entry): entry.get("size", 0) for entry in entries if entry["kind"] == "start"}
    return bool(starts) and len(starts) >= max(starts.values())


def _deaths_before_connect(entries: Sequence[Event]) -> str:
    """The ranks that ended before MPI started on any; empty if it started."""
    if any(entry["kind"] == "start" for entry in entries):
        return ""
    texts = {f"rank {number} on {host} ended without calling connect" for _, number, host, _ in deaths(entries)}
    return ", ".join(sorted(texts))


def deaths(entries: Sequence[Event]) -> set[tuple[object, ...]]:
    """Return the processes whose death was recorded, each once."""
    return {
        (entry.get("attempt"), *(entry["dead"].get(name) for name in ("number", "host", "pid")))
        for entry in entries
        if entry["kind"] == "death" and isinstance(entry.get("dead"), dict)
    }


def time_lost_s(entries: Sequence[Event]) -> float:
    """Return the time without training: recoveries, and from the end of an attempt to the start of the next."""
    recoveries = {
        (entry.get("attempt"), entry.get("meeting")): float(entry.get("seconds", 0.0))
        for entry in entries
        if entry["kind"] == "recovery"
    }
    ends = {entry["attempt"]: float(entry["time"]) for entry in entries if entry["kind"] == "end"}
    # The first rank that has started begins an attempt.
    starts = {each["attempt"]: float(each["time"]) for each in reversed(entries) if each["kind"] == "start"}
    between: list[float] = [time - ends[attempt - 1] for attempt, time in starts.items() if attempt - 1 in ends]
    return sum(recoveries.values()) + sum(max(0.0, each) for each in between)


def _process(entry: Event) -> tuple[object, ...]:
    return tuple(map(entry.get, ("attempt", "host", "namespace", "pid")))


def _describe(entry: Event) -> str:
    return f"rank {entry.get('rank')} ended with {entry.get('error')}: {entry.get('text')}"


def _names(starts: Sequence[Event]) -> str:
    ranks = [f"{entry.get('rank')} (pid {entry.get('pid')} on {entry.get('host')})" for entry in starts]
    return _listed("rank", ranks)


def _listed(noun: str, names: Sequence[str]) -> str:
    return f"{noun}{'s' * (len(names) > 1)} {', '.join(names)}"


def _name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
