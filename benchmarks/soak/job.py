"""The training under `run --spares --restarts` on two emulated hosts, what it reports, and who disturbs it."""

from __future__ import annotations

import heapq
import itertools
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bagua_comm
from bagua_comm.system.processes import kill, start_of
from bagua_comm.testing import run_ranks

from ..bench import ROOT
from ..faults.events import Event, EventReader
from ..faults.leftovers import TrialFolder
from ..faults.model import Data
from ..faults.numpy_model import NumpyModel
from ..faults.trial import START_S
from ..netlab import Lab
from .plan import Disturbance, disturbances
from .resources import History, files_in

ALGORITHM = "GradientAllReduce(Reproducible(addends=12))"
"""Its bytes depend on neither the number of ranks nor their order: those of a run that nobody disturbs."""

RANKS, SPARES, HOSTS, RATE = 3, 1, 2, "1gbit"
PAUSE_S = 0.2
"""Seconds of rest before each step."""

TIMEOUT_S = 20.0
"""How long a rank waits for another one, in a call and at a start."""

STALL_S = 60.0
"""The training has failed if no step beyond the last is committed for so long."""

GIVE_UP_S = 300.0
"""After so long without a step it is ended."""

LOOK_S = 2.0
"""Seconds between two looks at the resources."""

TRAINS_S = 5.0
"""The job trains if its last step was not longer ago."""

QUIET_S = 5.0
"""Seconds before the end in which nothing is disturbed."""


@dataclass
class Member:
    """A process that trains or waits for that."""

    pid: int
    start: int
    rank: int | None = None


@dataclass
class Soak:
    """What was seen of a job."""

    began: float
    history: History = field(default_factory=History)
    members: dict[int, Member] = field(default_factory=dict)
    files: list[tuple[float, float, int]] = field(default_factory=list)
    """The time, the size in MiB and the number of all files in memory, over all hosts."""
    loads: list[tuple[float, float]] = field(default_factory=list)
    """The time, and the load of the machine: how many processes wanted to run in the last minute."""
    committed: list[tuple[float, int]] = field(default_factory=list)
    """When the commits of steps returned that nobody had committed before."""
    digests: dict[int, set[str]] = field(default_factory=dict)
    """The digests of the weights that were committed, by step."""
    final: list[tuple[int, str]] = field(default_factory=list)
    """The steps and the digests of the weights with which ranks have ended."""
    counts: Counter[str] = field(default_factory=Counter)
    """How often each event came."""
    disturbed: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None
    seconds: float = 0.0
    output: str = ""
    left: list[str] = field(default_factory=list)

    def last_step(self) -> int:
        """The last step that was committed."""
        return self.committed[-1][1] if self.committed else 0

    def longest_pause_s(self) -> float:
        """The longest time without a commit of a new step, since the first."""
        times = [t for t, _ in self.committed] + ([] if self.exit_code == 0 else [self.seconds])
        return max((after - before for before, after in itertools.pairwise(times)), default=0.0)

    def take(self, event: Event) -> None:
        """Note an event of a process."""
        self.counts[event.what] += 1
        step = event.facts.get("step")
        if event.what == "hello":
            self.members[event.pid] = Member(event.pid, start_of(event.pid))
        elif event.what == "enter" and event.pid in self.members:
            self.members[event.pid].rank = event.facts["rank"]
            self.history.begin(event.pid, event.t - self.began)
        elif event.what == "commit":
            self.digests.setdefault(int(step or 0), set()).add(event.facts["digest"])
        elif event.what == "committed" and (not self.committed or step > self.committed[-1][1]):
            self.committed.append((event.t - self.began, int(step)))
        elif event.what in ("done", "ended", "stood by"):
            self.members.pop(event.pid, None)
            if event.what == "done":
                self.final.append((event.facts["step"], event.facts["digest"]))


def soak(lab: Lab, data: Path, record: Path, *, seconds: float, seed: int, every_s: float, least: int) -> Soak:
    """Train for so long, disturbed, or until it stalls.

    Args:
        lab: The hosts.
        data: The npz file that the training reads.
        record: Where `run` writes its record.
        seconds: How long it trains.
        seed: Of the disturbances.
        every_s: Seconds between two of them, on average.
        least: With fewer ranks than this, the job is started again.
    """
    with (
        TrialFolder(f"soak-{seed}") as folder,
        EventReader(folder.path / "events") as reader,
        open(folder.path / "output", "w+b") as output,
    ):
        folder.own_memory = False  # each host has its own
        until = time.monotonic() + seconds
        process = subprocess.Popen(
            _command(lab, folder, data, record, until, least),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=folder.environment(),
            start_new_session=True,
        )
        seen = Soak(time.monotonic())
        try:
            _watch(process, reader, until, seen, _Disturber(lab, folder, seen, disturbances(seed, every_s)))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(20)
        seen.left = folder.left() + [f"/dev/shm/{path.name}" for path in lab.memory.glob("h*/*")]
        output.seek(0)
        seen.output = output.read().decode(errors="replace")
    return seen


def _command(lab: Lab, folder: TrialFolder, data: Path, record: Path, until: float, least: int) -> list[str]:
    run = [*lab.run_command(ranks_per_host=-(-(RANKS + SPARES) // HOSTS)), "-n", str(RANKS)]
    run += ["--spares", str(SPARES), "--min-ranks", str(least), "--restarts", "100000", "--env", "TMPDIR"]
    run += ["--record", str(record)]
    training = ["-m", "benchmarks.faults.training", "--pipe", folder.path / "events", "--data", data]
    training += ["--algorithm", ALGORITHM, "--steps", 10**9, "--until", until, "--pause-s", PAUSE_S]
    training += ["--timeout-s", TIMEOUT_S, "--min-ranks", least, "--no-replay"]
    return lab.inside(0, *run, *map(str, training))


def _watch(
    process: subprocess.Popen[bytes],
    reader: EventReader,
    until: float,
    seen: Soak,
    disturber: _Disturber,
) -> None:
    look = told = seen.began
    while True:
        over = process.poll() is not None
        for event in reader.listen(0.0 if over else 0.1):
            seen.take(event)
        now = time.monotonic()
        seen.seconds = now - seen.began
        if over:
            seen.exit_code = process.returncode
            return
        since = seen.committed[-1][0] if seen.committed else START_S - GIVE_UP_S
        if seen.seconds - since > GIVE_UP_S:
            return
        disturber.undo(now)
        if seen.committed and now < until - QUIET_S:
            disturber.act(now, trains=seen.seconds - since < TRAINS_S)
        if now > look:
            look = now + LOOK_S
            disturber.look(now)
        if now > told + 60:
            told = now
            done = f"step {seen.last_step()}, {len(seen.disturbed)} disturbances"
            print(f"{seen.seconds:7.0f} s: {done}", flush=True)


class _Disturber:
    """Disturbs a job, and looks at what it uses.

    Args:
        lab: The hosts.
        folder: The folder of the job.
        seen: What was seen of it, to which this adds.
        plan: The disturbances.
    """

    def __init__(self, lab: Lab, folder: TrialFolder, seen: Soak, plan: Iterator[Disturbance]) -> None:
        self._lab, self._folder, self._seen, self._plan = lab, folder, seen, plan
        self._next: tuple[float, Disturbance] | None = None
        self._undo: list[tuple[float, int, Callable[[], None]]] = []

    def undo(self, now: float) -> None:
        """End the disturbances whose time is over."""
        while self._undo and self._undo[0][0] <= now:
            heapq.heappop(self._undo)[2]()

    def act(self, now: float, *, trains: bool) -> None:
        """Begin the next disturbance if it is due; while the job starts again or recovers, it waits."""
        if self._next is None:
            upcoming = next(self._plan)
            self._next = (now + upcoming.after_s, upcoming)
        elif trains and self._next[0] <= now:
            what, self._next = self._next[1], None
            hit = self._strike(what, now)
            row = {"t": round(now - self._seen.began, 1), "kind": what.kind, "hit": hit}
            self._seen.disturbed.append(row)

    def look(self, now: float) -> None:
        """Note what the job uses."""
        t = now - self._seen.began
        self._seen.history.add(self._folder.processes(), t)
        self._seen.files.append((t, *files_in(self._lab.memory)))
        self._seen.loads.append((t, os.getloadavg()[0]))

    def _strike(self, what: Disturbance, now: float) -> list[str]:
        if what.kind == "slow":
            host = int(what.choices[0] * HOSTS)
            self._lab.limit(host, what.rate)
            self._later(now + what.seconds, lambda: self._lab.limit(host, RATE))
            return [f"h{host} at {what.rate}"]
        if what.kind == "cut":
            host = HOSTS - 1  # the first is that of `run`
            self._lab.cut(host)
            self._later(now + what.seconds, lambda: self._lab.mend(host))
            return [f"h{host}"]
        victims = self._victims(what)
        for member in victims:
            if what.kind == "stop":
                with suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGSTOP)
                self._later(now + what.seconds, lambda member=member: _resume(member))  # type: ignore[misc]
            else:
                kill(member.pid, member.start)
                self._seen.members.pop(member.pid, None)
        return [f"rank {m.rank}" if m.rank is not None else "spare" for m in victims]

    def _victims(self, what: Disturbance) -> list[Member]:
        alive = [m for m in self._seen.members.values() if m.start and start_of(m.pid) == m.start]
        self._seen.members = {member.pid: member for member in alive}
        if what.kind == "all":
            return [member for member in alive if member.rank is not None]
        alive.sort(key=lambda member: member.start)
        if not what.oldest_too:
            alive = alive[1:]
        chosen = []
        for choice in what.choices[: 2 if what.kind == "pair" else 1]:
            if alive:
                chosen.append(alive.pop(int(choice * len(alive))))
        return chosen

    def _later(self, t: float, undo: Callable[[], None]) -> None:
        heapq.heappush(self._undo, (t, len(self._seen.disturbed), undo))


def _resume(member: Member) -> None:
    if start_of(member.pid) == member.start:
        with suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGCONT)


def undisturbed(data: Path, steps: int) -> list[str]:
    """The digest of the weights after 0, 1, ... `steps` steps of one rank that nobody disturbs."""
    algorithm = eval(ALGORITHM, vars(bagua_comm))

    def train(comm: Any) -> list[str]:
        model = NumpyModel(Data(data), algorithm, alike=True)
        taken = model.connect(comm)
        found = [model.digest()]
        for step in range(steps):
            taken.take(step)
            taken.engine.settle()
            found.append(model.digest())
        taken.close()
        return found

    (digests,) = run_ranks(1, train)
    return digests
