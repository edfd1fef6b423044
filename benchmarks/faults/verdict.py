"""The verdict on a trial: whether it continued, or ended as it must; and how soon.

A trial that continues must:
* end in time with exit code 0, on every process that is alive, with as many ranks as possible;
* restore what was committed: bytes that some rank committed at that step, or, if weights differ between ranks and
  their number has changed, the mean over the ranks; and no earlier step than the last for which `commit` returned
  on a survivor;
* end with the same bytes on all ranks;
* end with those bytes again when the steps since the last failure are repeated, undisturbed, if the steps of the
  algorithm can be repeated; and with the bytes of an undisturbed training, if its sums are reproducible.

Where /dev/shm is full, a trial may also end, with that as the reason.

Where the disk of the checkpoints is full for a while, a save fails on all ranks with that as the reason, the
newest checkpoint is the last one that was saved, and a later save succeeds.

In a split, at most one half goes on. The processes that are cut off end, with an error that names one that they
do not reach.

A trial of a sharded model that loses a rank and its buddy must end with an error that says what is lost.

A trial with too few ranks left must end on all of them within 5 seconds, with an error that names every process
that died, except one that dies at the last moment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .events import Event
from .plans import Trial
from .trial import Seen

END_WITHIN_S = 5.0

NEWS_S = 0.1
"""Seconds before the end in which a process may die unnamed, during the rendezvous for another death."""


@dataclass
class Verdict:
    """The verdict on a trial."""

    outcome: str
    """"went on", "ended" (as it must), "failed", or "missed": no blow fell, or the last after the training."""
    problems: list[str] = field(default_factory=list)
    recovery_s: float | None = None
    """Seconds from the last blow to the first step that all ranks have made."""
    ended_s: float | None = None
    """Seconds from the last blow to the end of the last rank, if too few were left."""


def judge(trial: Trial, seen: Seen, undisturbed: str | None = None) -> Verdict:
    """Judge a trial.

    Args:
        trial: The trial as planned.
        seen: Its outcome.
        undisturbed: The digest of an undisturbed training, for algorithms whose sums are reproducible.
    """
    if seen.exit_code is None:
        return Verdict("failed", [f"did not end in {trial.limit_s:.0f} s", *_where(seen)])
    if not seen.strokes:
        problems = [] if seen.exit_code == 0 else [f"exit code {seen.exit_code} before any blow"]
        return Verdict("failed" if problems else "missed", problems)
    if trial.uses("full memory") and seen.exit_code:  # SIGBUS ends whoever writes there; `run` has to say why
        problems = [] if "was full, and processes" in seen.output else ["nothing named the full /dev/shm"]
        return Verdict("failed" if problems else "ended", problems)
    if trial.uses("full memory"):  # it may have ended others than those that were struck
        problems = [*_of_restoring(seen), *_of_weights(trial, seen, undisturbed)]
        problems += [] if seen.of("done") else ["no rank trained to the end"]
        return Verdict("failed" if problems else "went on", problems)
    alive = [pid for pid in seen.pids() if pid not in seen.gone()]
    if trial.kind == "host":  # all are started again
        alive = [e.pid for e in seen.of("hello") if e.t > seen.strokes[-1].t] or alive
    if _too_late(seen, alive):
        problems = [*_of_restoring(seen), *_of_weights(trial, seen, undisturbed)]
        return Verdict("failed" if problems else "missed", problems)
    if trial.kind == "too few":
        problems, ended_s = list(_of_an_end(seen, alive)), _end_of(seen, alive)
        return Verdict("failed" if problems else "ended", problems, ended_s=ended_s)
    if trial.case.framework == "sharded" and len(seen.strokes) > 1 and _says_what_is_lost(seen, alive):
        return Verdict("ended", ended_s=_end_of(seen, alive))
    problems = [*_of_the_end(trial, seen, alive), *_of_restoring(seen), *_of_weights(trial, seen, undisturbed)]
    problems += _of_a_split(seen) if trial.fault == "split brain" else []
    problems += _of_checkpoints(trial, seen) if trial.uses("full disk") else []
    recovery_s = _first_step(seen, alive)
    return Verdict("failed" if problems else "went on", problems, recovery_s=recovery_s)


def _too_late(seen: Seen, alive: list[int]) -> bool:
    """Whether the last victim had trained to the end, and only `run` could say that it died."""
    over = {e.pid for e in seen.events if e.what in ("done", "stood by")}
    victim = seen.strokes[-1].pid
    return over.issuperset(alive) and f"(pid {victim} " in seen.output and "died after training" in seen.output


# Trials that continue ------------------------------------------------------------------------------------------


def _of_the_end(trial: Trial, seen: Seen, alive: list[int]) -> Iterator[str]:
    if seen.exit_code != 0:
        yield f"exit code {seen.exit_code}"
    trained = {e.pid for e in seen.of("enter")}
    over = {e.pid: e.what for e in seen.events if e.what in ("done", "stood by", "ended")}
    for pid in alive:
        first = pid in seen.pids()[: trial.ranks + trial.spares] or trial.kind == "host"
        if over.get(pid) == "ended":
            (event,) = seen.of("ended", pid)
            yield f"process {pid} ended with {event.facts['error']}: {event.facts['message']}"
        elif pid not in over and (first or pid in trained):
            yield f"process {pid} vanished after {_last(seen, pid)}"
    done = seen.of("done")
    if not done:
        yield "no rank trained to the end"
        return
    most = min(trial.ranks, trial.ranks + trial.spares - len(seen.gone()))
    least = max(1, most)
    sizes = {e.facts["size"] for e in done}
    if len(sizes) != 1:
        yield f"ranks ended among {sorted(sizes)} ranks"
    elif not (size := sizes.pop()) >= least or (size > least and not trial.uses("link") and not _late(seen)):
        yield f"{size} ranks trained to the end, expected {least}"


def _late(seen: Seen) -> bool:
    """Whether the last blow fell after the last step of some rank."""
    return any(e.t < seen.strokes[-1].t for e in seen.of("trained"))


def _of_restoring(seen: Seen) -> Iterator[str]:
    committed: dict[int, dict[str, Event]] = {}
    for event in seen.of("commit"):
        committed.setdefault(event.facts["step"], {})[event.facts["digest"]] = event
    first = {e.facts["digest"] for e in seen.of("enter") if e.facts["step"] == 0}
    for event in seen.of("enter"):
        step, digest = event.facts["step"], event.facts["digest"]
        if step and digest not in committed.get(step, ()) and not _is_mean(event, seen):
            yield f"rank {event.facts['rank']} came back to step {step} with bytes that nobody committed"
        returned = [e.facts["step"] for e in seen.of("committed", event.pid) if e.t < event.t]
        if returned and step < max(returned):
            yield f"rank {event.facts['rank']} came back to step {step}; it had committed step {max(returned)}"
    if len(first) > 1:
        yield "ranks began with different weights"


def _is_mean(entered: Event, seen: Seen) -> bool:
    """Whether the weights that a rank came back to are the mean of those that ranks committed.

    All ranks came back to the same then, and its sum is the mean of their sums, up to rounding.
    """
    step, size = entered.facts["step"], entered.facts["size"]
    commits = {e.pid: e for e in seen.of("commit") if e.facts["step"] == step and e.t < entered.t}
    peers = [e for e in seen.of("enter") if (e.facts["step"], e.facts["size"]) == (step, size)]
    if len(commits) == size or not commits or {e.facts["digest"] for e in peers} != {entered.facts["digest"]}:
        return False
    totals = [e.facts["total"] for e in commits.values()]
    mean = sum(totals) / len(totals)
    return bool(abs(entered.facts["total"] - mean) <= 1e-3 * max(1.0, *map(abs, totals)))


def _of_weights(trial: Trial, seen: Seen, undisturbed: str | None) -> Iterator[str]:
    done = seen.of("done")
    digests = {e.facts["digest"] for e in done}
    if len(digests) > 1:
        yield f"ranks ended with different bytes: {sorted(digests)}"
    for event in done:
        again = event.facts.get("replayed")
        if trial.case.repeats and again != event.facts["digest"]:
            yield f"rank {event.facts['rank']}: the steps since {event.facts['began']} taken again end elsewhere"
    if trial.case.reproducible and undisturbed is not None and digests - {undisturbed}:
        yield "the bytes are not those of a training that nobody disturbed"


def _first_step(seen: Seen, alive: list[int]) -> float | None:
    """From the last blow until all ranks have done a step."""
    blow = seen.strokes[-1].t
    entered: dict[int, Event] = {}
    since: dict[int, float] = {}
    for event in seen.events:
        if event.t < blow or event.pid not in alive:
            continue
        if event.what == "enter":
            if event.facts["size"] != next((e.facts["size"] for e in entered.values()), None):
                entered, since = {}, {}
            entered[event.pid] = event
            since.pop(event.pid, None)
        elif event.what == "step" and event.pid in entered:
            since.setdefault(event.pid, event.t)
            if len(since) == entered[event.pid].facts["size"]:
                return max(since.values()) - blow
    return None


def _of_checkpoints(trial: Trial, seen: Seen) -> Iterator[str]:
    unsaved: dict[int, list[str]] = {}
    for event in seen.of("unsaved"):
        unsaved.setdefault(event.facts["step"], []).append(event.facts["message"])
    if not unsaved:
        yield "no save failed"
    for step, messages in unsaved.items():
        if (
            len(messages) != trial.ranks
            or len(set(messages)) != 1
            or "No space left on device" not in messages[0]
        ):
            yield f"saving step {step}, the ranks reported {messages}, expected the same full disk on all"
    for event in seen.of("loaded"):
        saved = [e.facts for e in seen.of("saved", event.pid) if e.t < event.t]
        last = saved[-1] if saved else {}
        if any(event.facts[name] != last.get(name) for name in ("step", "digest")):
            yield f"process {event.pid} loaded step {event.facts['step']}; {last} was saved last"
        if unfinished := [name for name in event.facts["names"] if not name.removeprefix("step-").isdecimal()]:
            yield f"process {event.pid} found {unfinished} in the folder"
    if unsaved and max((e.facts["step"] for e in seen.of("saved")), default=0) < max(unsaved):
        yield "nothing was saved after the disk had room again"


def _of_a_split(seen: Seen) -> Iterator[str]:
    blow, cut = seen.strokes[-1].t, {stroke.pid for stroke in seen.strokes}
    rest = set(seen.pids()) - cut
    first = {e.pid for e in seen.of("hello") if e.t < blow}
    tried = {pid: max((e.facts["step"] for e in seen.of("commit", pid)), default=0) for pid in first}
    # A step is committed by all together, or by a half that goes on alone; then it enters again, or gets ahead.
    alone = [
        any(e.t > blow for e in seen.of("enter") if e.pid in half)
        or any(
            e.facts["step"] > min(map(tried.__getitem__, first))
            for e in seen.of("committed")
            if e.pid in half & first
        )
        for half in (cut, rest)
    ]
    if all(alone):
        yield "both halves went on: there are two histories"
    for pid in sorted(cut):
        messages = [e.facts["message"] for e in seen.of("ended", pid)]
        if not messages and not seen.of("done", pid):
            yield f"process {pid}, which was cut off, did not say why it ended; last seen at {_last(seen, pid)}"
        elif messages and not any(re.search(rf"\b{each}\b", messages[0]) for each in rest & first):
            yield f"process {pid}, which was cut off, named none of {sorted(rest & first)}: {messages[0]}"


# Trials that end --------------------------------------------------------------------------------------------


def _says_what_is_lost(seen: Seen, alive: list[int]) -> bool:
    return all(any("nothing is left of" in e.facts["message"] for e in seen.of("ended", pid)) for pid in alive)


def _of_an_end(seen: Seen, alive: list[int]) -> Iterator[str]:
    if seen.exit_code == 0:
        yield "exit code 0, though too few ranks were left"
    for pid in alive:
        ended = seen.of("ended", pid)
        if not ended:
            yield f"process {pid} did not say why it ended; it was last seen at {_last(seen, pid)}"
            continue
        message = ended[0].facts["message"]
        met_s = next((e.t for e in seen.of("failed", pid)), ended[0].t)
        # Who dies while the others meet for another death may be dead too late for their words.
        known = [s.pid for s in seen.strokes if s.t < met_s or s.t < ended[0].t - NEWS_S]
        if missing := [each for each in known if not re.search(rf"\b{each}\b", message)]:
            yield f"process {pid} did not name {missing}: {message}"
    if (took := _end_of(seen, alive)) is not None and took > END_WITHIN_S:
        yield f"the last rank ended after {took:.1f} s"


def _end_of(seen: Seen, alive: list[int]) -> float | None:
    ends = [e.t for e in seen.of("ended") if e.pid in alive]
    return max(ends) - seen.strokes[-1].t if ends else None


def _last(seen: Seen, pid: int) -> str:
    said = [e for e in seen.events if e.pid == pid]
    return f"{said[-1].what!r} {said[-1].facts}" if said else "nothing"


def _where(seen: Seen) -> Iterator[str]:
    for pid in seen.pids():
        if pid not in seen.gone():
            yield f"process {pid} was last seen at {_last(seen, pid)}"
