"""Runs a trial: starts the training, reads its events, and strikes when the plan says so."""

from __future__ import annotations

import contextlib
import heapq
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from ..bench import ROOT
from .events import Event, EventReader
from .leftovers import TrialFolder
from .means import GIL_S, HARMLESS, Means, fill, forget_groups, harm, make_clock
from .plans import Blow, LinkFault, Trial

START_S = 180.0
"""Time limit before that: importing PyTorch is slow on a busy machine."""

FULL_MEMORY = 24 << 20
"""Bytes of the /dev/shm of a trial in which it becomes full: enough for a start."""

FULL_DISK = 2 << 20
"""Bytes of the disk of a trial in which it becomes full: enough for a dozen checkpoints."""

BEGINS = {"construct": "enter", "step": "step", "commit": "commit", "recover": "failed", "leave": "trained"}
BEGINS |= {"save": "save", "unsaved": "unsaved"}
BEGINS |= dict.fromkeys(["dead host", "cut host", *get_args(LinkFault)], "step")
"""Events by which a process reports a phase."""


@dataclass(frozen=True)
class Stroke:
    """A process that was killed or stopped."""

    t: float
    pid: int
    blow: int
    """The index of the blow."""
    rank: int | None
    """Its rank then; None for a spare."""
    signal: int
    means: Means = "signal"

    @property
    def kills(self) -> bool:
        """Whether the process is dead then, and not only late."""
        return self.signal != signal.SIGSTOP and self.means not in ("GIL", "link")


@dataclass
class Seen:
    """The outcome of a trial."""

    began: float
    events: list[Event] = field(default_factory=list)
    strokes: list[Stroke] = field(default_factory=list)
    exit_code: int | None = None
    """None: it did not end in time."""
    seconds: float = 0.0
    output: str = ""
    stacks: str = ""
    """Stacks of processes that crashed or did not end in time."""
    left: list[str] = field(default_factory=list)

    def of(self, what: str, pid: int | None = None) -> list[Event]:
        """The events of this kind, of this process or of all."""
        return [e for e in self.events if e.what == what and pid in (None, e.pid)]

    def pids(self) -> list[int]:
        """All processes that have started, in that order."""
        return [e.pid for e in self.of("hello")]

    def gone(self) -> set[int]:
        """Processes that were killed, or were stopped and not admitted again in time."""
        back = {e.pid for e in self.events if e.what in ("done", "stood by")}
        harmed = [stroke for stroke in self.strokes if stroke.means not in HARMLESS]
        return {stroke.pid for stroke in harmed if stroke.kills or stroke.pid not in back}

    def ranks(self) -> dict[int, int]:
        """The current or last rank of each process that has trained."""
        return {e.pid: e.facts["rank"] for e in self.of("enter")}


def command_of(trial: Trial, folder: TrialFolder, data: Path) -> list[str]:
    """The command that starts the training."""
    run = [sys.executable, "-m", "bagua_comm", "run", "-n", str(trial.ranks), *trial.flags()]
    return [*run, *training_of(trial, folder, data)]


def training_of(trial: Trial, folder: TrialFolder, data: Path) -> list[str]:
    """The module that trains, and its arguments, as `run` takes them."""
    arguments = ["--pipe", folder.path / "events", "--data", data, "--algorithm", trial.case.text]
    arguments += ["--framework", trial.case.framework, "--steps", trial.steps]
    arguments += ["--optimizer", trial.case.optimizer, "--extras", ",".join(trial.case.extras)]
    arguments += ["--commit-every", trial.commit_every, "--min-ranks", trial.min_ranks]
    arguments += ["--timeout-s", trial.timeout_s, "--microbatches", trial.microbatches]
    arguments += ["--alike" if trial.case.alike else "--no-alike"]
    arguments += ["--replay" if trial.case.repeats else "--no-replay"]
    arguments += ["--checkpoints", folder.disk] if trial.uses("full disk") else []
    return ["-m", "benchmarks.faults.training", *map(str, arguments)]


def run_trial(
    trial: Trial,
    data: Path,
    command: Callable[[Trial, TrialFolder, Path], list[str]] = command_of,
    fail: Callable[[Blow, Seen], list[int]] | None = None,
) -> Seen:
    """Run a trial to its end, and clean up.

    Args:
        trial: The trial.
        data: The npz file that the training reads.
        command: Makes the command that starts the training.
        fail: Strikes instead of a signal, and returns the processes that it hit.
    """
    memory = FULL_MEMORY if trial.uses("full memory") else None
    disk = FULL_DISK if trial.uses("full disk") else None
    with (
        TrialFolder(trial.name, memory, disk) as folder,
        EventReader(folder.path / "events") as listener,
        open(folder.path / "output", "w+b") as output,
    ):
        process = subprocess.Popen(
            folder.inside(command(trial, folder, data)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=folder.environment() | _variables_of(trial, folder),
            start_new_session=True,
        )
        try:
            seen = _watch(trial, process, listener, folder, fail)
            if seen.exit_code is None:
                _ask_for_stacks(folder)
        finally:
            _end(process)
            forget_groups()
        seen.left = [] if seen.exit_code is None else folder.left()
        files = [file for file in sorted(folder.path.glob("stacks-*")) if file.stat().st_size]
        seen.stacks = "\n".join(f"{file.name}\n{file.read_text()}" for file in files)
        output.seek(0)
        seen.output = output.read().decode(errors="replace")
    return seen


def _variables_of(trial: Trial, folder: TrialFolder) -> dict[str, str]:
    """The environment variables that the means of a trial need."""
    seconds = [blow.seconds for blow in trial.blows if blow.means == "GIL"]
    found = {GIL_S: str(max(seconds))} if seconds else {}
    return found | (make_clock(folder.path) if trial.uses("clock") else {})


def _watch(
    trial: Trial,
    process: subprocess.Popen[bytes],
    listener: EventReader,
    folder: TrialFolder,
    fail: Callable[[Blow, Seen], list[int]] | None,
) -> Seen:
    """Read events and strike until the training has ended."""
    seen = Seen(time.monotonic())
    due: list[tuple[float, int, Callable[[], None]]] = []  # a heap: when, which, what
    waiting = list(enumerate(trial.blows))
    ended, until = False, seen.began + START_S
    while not ended:
        now = time.monotonic()
        if now > until:
            seen.seconds = now - seen.began
            return seen
        ended = process.poll() is not None  # before listening, so that its last events are not missed
        for event in listener.listen(0.0 if ended else min(0.05, due[0][0] - now if due else 0.05)):
            if event.what == "enter" and not seen.of("enter"):
                until = event.t + trial.limit_s
            seen.events.append(event)
            if event.what == "saved" and seen.strokes and seen.strokes[-1].means == "full disk":
                # This save had its room before, and has freed that of an older checkpoint.
                fill(folder.disk, trial.blows[seen.strokes[-1].blow].room)
            if waiting and not due and _comes(event, waiting[0][1], seen):
                number, blow = waiting.pop(0)
                strike = _striker(number, blow, seen, due, folder, fail)
                heapq.heappush(due, (event.t + blow.delay_s, len(seen.events), strike))
        while due and due[0][0] <= time.monotonic():
            heapq.heappop(due)[2]()
    seen.exit_code, seen.seconds = process.returncode, time.monotonic() - seen.began
    return seen


def _comes(event: Event, blow: Blow, seen: Seen) -> bool:
    """Whether an event reports the phase in which the blow falls."""
    if seen.strokes and event.t < seen.strokes[-1].t:
        return False
    return event.what == BEGINS[blow.phase] and event.facts.get("step", blow.step) >= blow.step


def _striker(
    number: int,
    blow: Blow,
    seen: Seen,
    due: list[tuple[float, int, Callable[[], None]]],
    folder: TrialFolder,
    fail: Callable[[Blow, Seen], list[int]] | None,
) -> Callable[[], None]:
    """Return the function that strikes this blow."""

    def strike() -> None:
        if fail is not None:
            now, ranks = time.monotonic(), seen.ranks()
            seen.strokes += [
                Stroke(now, pid, number, ranks.get(pid), blow.signal, blow.means) for pid in fail(blow, seen)
            ]
            return
        targets = _targets(blow, seen)
        for choice in blow.choices:
            if not targets:
                return
            pid = targets.pop(int(choice * len(targets)))
            rank = seen.ranks().get(pid)
            stroke = Stroke(time.monotonic(), pid, number, rank, blow.signal, blow.means)
            with contextlib.suppress(ProcessLookupError):
                harm(blow.means, pid, blow.signal, blow.room or blow.seconds, folder)
                seen.strokes.append(stroke)
                if blow.resume_s is not None:
                    heapq.heappush(due, (stroke.t + blow.resume_s, -pid, lambda pid=pid: _resume(pid)))

    return strike


def _resume(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _targets(blow: Blow, seen: Seen) -> list[int]:
    """The processes that the blow may hit, in a fixed order."""
    over = {e.pid for e in seen.events if e.what in ("done", "ended", "stood by")}
    living = [pid for pid in seen.pids() if pid not in seen.gone() | over]
    ranks = seen.ranks()
    if blow.whom == "rank":
        return sorted((pid for pid in living if pid in ranks), key=lambda pid: ranks[pid])
    return [pid for pid in living if pid not in ranks]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End `run`, with SIGTERM first so that it can clean up."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)


def _ask_for_stacks(folder: TrialFolder) -> None:
    """Make the processes of a trial write their stacks."""
    for pid in folder.processes():
        if (folder.path / f"stacks-{pid}").exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)


def shortened(text: str, count: int = 100) -> list[str]:
    """The last lines of a text."""
    return text.splitlines()[-count:]


DULL = ("step", "commit", "committed")


def timeline(seen: Seen) -> list[str]:
    """The events without successful steps and commits, one a line."""
    shown = [e for i, e in enumerate(seen.events) if e.what not in DULL or _is_last(seen.events, i)]
    struck = [
        Event(s.t, s.pid, f"STRUCK by {s.signal if s.means == 'signal' else s.means}", {"rank": s.rank})
        for s in seen.strokes
    ]
    return [
        f"{event.t - seen.began:8.3f} {event.pid:>7} {event.what:>11} {str(event.facts)[:300]}"
        for event in sorted([*shown, *struck])
    ]


def _is_last(events: Sequence[Event], number: int) -> bool:
    """Whether the next event of the process is of another kind, or there is none."""
    return next((e.what for e in events[number + 1 :] if e.pid == events[number].pid), "") not in DULL
