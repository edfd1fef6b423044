"""A fleet of threads: elastic training without processes, where a rank dies exactly when a test says so.

A death is an exception that no program catches, in the next call of the victim, whichever thread makes it. All
others learn of it in the same moment, as if every operating system told at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from ..comm import Communicator
from ..elastic.fleet import Death, Fleet, Meeting, Process
from ..errors import CommAborted, CommError, CommTimeout, RankFailed
from ..transports import LocalTransport, Transport
from ..transports.base import POINT_TO_POINT, Message
from ..transports.local import Hub

T = TypeVar("T")


class Killed(BaseException):
    """This process has died."""


class ThreadJob:
    """The processes of a job, as threads; one for all of them.

    Args:
        size: How many processes begin.
        wanted: How many train; all of them if None.
        hosts: The host of each process; all on one if None.
        timeout_s: How long a call or a meeting may wait.
        recruit: Started as a new process by `Fleet.recruit`; None if this job cannot start processes.
    """

    def __init__(
        self,
        size: int,
        *,
        wanted: int | None = None,
        hosts: Sequence[str] | None = None,
        timeout_s: float = 20.0,
        recruit: Callable[[ThreadFleet], Any] | None = None,
    ) -> None:
        self.wanted, self.timeout_s, self.recruit = wanted or size, timeout_s, recruit
        self.changed = threading.Condition(threading.RLock())
        self.processes = {n: Process(n, hosts[n] if hosts else "host", 1000 + n) for n in range(size)}
        """All that were ever let in, by number."""
        self.waiting: list[int] = []
        """Recruits that wait to be let in."""
        self.alive = set(self.processes)
        self.dead: list[Death] = []
        self.doomed: set[int] = set()
        """Those that die in their next call."""
        self.here: set[int] = set()
        """Who has come to the meeting that is being held."""
        self.called = self.met = 0
        """How many meetings were called, and how many were held."""
        self.meetings: list[Meeting] = []
        self.over = False
        self.hubs: dict[Any, Hub] = {}
        self.watch: Callable[[int, str], None] = _watch_nothing
        """Called with the number of a process and the name of what it does, before it does it; may kill."""
        self.threads: list[threading.Thread] = []
        self.fleet: Callable[[ThreadJob, int], ThreadFleet] = ThreadFleet
        """Makes the fleet of the process with this number."""

    def kill(self, *numbers: int) -> None:
        """Have processes die together, each in its next call; the others learn of all of them at once."""
        with self.changed:
            for number in numbers:
                if number in self.alive and number not in self.doomed:
                    self.doomed.add(number)
                    self.alive.discard(number)
                    if number in self.processes:
                        self.dead.append(Death(self.processes[number], "died"))
        self.wake()

    def kill_at(self, moments: Sequence[tuple[int, int]]) -> None:
        """Have process n die when it does something for the k-th time, for every (n, k)."""
        due, counts = dict(moments), dict.fromkeys(dict(moments), 0)

        def watch(number: int, what: str) -> None:
            if number in due:
                counts[number] += 1
                if counts[number] == due[number]:
                    self.kill(number)

        self.watch = watch

    def wake(self) -> None:
        """Have all who wait look again."""
        with self.changed:
            self.changed.notify_all()
            hubs = list(self.hubs.values())
        for hub in hubs:
            with hub.changed:
                hub.changed.notify_all()

    def hub(self, key: Any, size: int) -> Hub:
        """The hub of a communicator, the same for all its ranks."""
        with self.changed:
            if key not in self.hubs:
                self.hubs[key] = Hub(size)
            return self.hubs[key]

    def check(self, number: int, what: str) -> None:
        """Raise `Killed` in a process that is to die."""
        self.watch(number, what)
        if number in self.doomed:
            raise Killed(f"process {number} in {what}")

    def start(self, body: Callable[[ThreadFleet], Any], number: int) -> dict[str, Any]:
        """Run a process; the dictionary will hold its "result", or its "error"."""
        outcome: dict[str, Any] = {}

        def process() -> None:
            try:
                outcome["result"] = body(self.fleet(self, number))
            except Killed as exc:
                outcome["killed"] = exc
            except BaseException as exc:
                outcome["error"] = exc
                self.kill(number)
            with self.changed:
                self.alive.discard(number)
            self.wake()

        thread = threading.Thread(target=process, name=f"process {number}", daemon=True)
        self.threads.append(thread)
        thread.start()
        return outcome


def _watch_nothing(number: int, what: str) -> None:
    pass


class ThreadFleet(Fleet):
    """The fleet as one of the threads sees it."""

    def __init__(self, job: ThreadJob, number: int) -> None:
        self._job, self.me, self.wanted, self.timeout_s = job, number, job.wanted, job.timeout_s
        self.recruits = job.recruit is not None
        self._connected = 0
        self._let_in = number in job.processes

    def meet(self, cause: CommError | None = None) -> Meeting:
        """See `Fleet.meet`."""
        job = self._job
        job.check(self.me, "meet")
        with job.changed:
            if not self._let_in:  # a recruit waits until others meet
                job.waiting.append(self.me)
                job.wake()
                job.changed.wait_for(lambda: self.me in job.processes or job.over, job.timeout_s)
                self._let_in = True
            if job.called == job.met:
                job.called += 1
            mine = job.called
            job.here.add(self.me)
        job.wake()
        deadline = time.monotonic() + job.timeout_s
        with job.changed:
            while job.met < mine:
                if self.me in job.doomed:
                    raise Killed(f"process {self.me} in meet")
                absent = job.alive - job.here - set(job.waiting)
                if not absent:
                    self._hold(mine)
                    break
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise RankFailed(f"processes {sorted(absent)} did not come to the meeting", sorted(absent))
                job.changed.wait(remaining)
            job.changed.notify_all()
            self._connected = 0
            return job.meetings[mine - 1]

    def _hold(self, number: int) -> None:
        """Everybody is here."""
        job = self._job
        for recruit in job.waiting:
            job.processes[recruit] = Process(recruit, "host", 1000 + recruit)
        alive = sorted((job.here & job.alive) | set(job.waiting))
        job.waiting.clear()
        told = tuple(job.dead)
        job.dead.clear()
        job.here.clear()
        job.met = number
        job.meetings.append(Meeting(number, tuple(job.processes[n] for n in alive), told))

    def connect(self, members: Sequence[int], *, control: bool = False) -> Communicator:
        """See `Fleet.connect`."""
        job = self._job
        job.check(self.me, "connect")
        self._connected += 1
        key = (job.met, tuple(members), self._connected)
        transport = _Mortal(job, job.hub(key, len(members)), members.index(self.me), tuple(members), job.met, key)
        return Communicator([transport], nodes=[job.processes[n].host for n in members])

    def stand_by(self, training: Collection[int]) -> bool:
        """See `Fleet.stand_by`."""
        job = self._job
        met = job.met

        def ends() -> bool:
            is_needed = any(death.process.number in training for death in job.dead)
            return job.called > met or is_needed or job.over or self.me in job.doomed

        with job.changed:
            job.changed.wait_for(ends)
        job.check(self.me, "stand_by")
        return job.called > met or not job.over

    def recruit(self, count: int) -> None:
        """See `Fleet.recruit`."""
        job = self._job
        assert job.recruit is not None
        for _ in range(count):
            with job.changed:
                number = max([*job.processes, *job.waiting, *job.alive], default=-1) + 1
                job.alive.add(number)
            job.start(job.recruit, number)

    def recruits_wait(self) -> bool:
        """See `Fleet.recruits_wait`."""
        return bool(self._job.waiting)

    def end(self) -> None:
        """See `Fleet.end`."""
        job = self._job
        with job.changed:
            job.over = True
            job.alive.discard(self.me)
        job.wake()


class _Mortal(LocalTransport):
    """A rank of a communicator of the fleet: its calls fail when a member is dead, or a meeting was called."""

    def __init__(
        self, job: ThreadJob, hub: Hub, rank: int, members: tuple[int, ...], epoch: int, key: Any
    ) -> None:
        super().__init__(hub, rank, timeout_s=job.timeout_s)
        self._job, self._members_of, self._epoch, self._key = job, members, epoch, key

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], *, tag: int = POINT_TO_POINT) -> None:
        """See `Transport.exchange`."""
        self._job.check(self._members_of[self.rank], self._call or "exchange")
        super().exchange(sends, recvs, tag=tag)

    def split(self, color: int, key: int) -> Transport:
        """See `Transport.split`."""
        members = self._members(color, key)
        self._splits += 1
        name = (self._key, self._splits, color)
        numbers = tuple(self._members_of[rank] for rank in members)
        hub = self._job.hub(name, len(members))
        return _Mortal(self._job, hub, members.index(self.rank), numbers, self._epoch, name)

    def poll_failures(self, groups: Collection[str]) -> CommError | None:
        """See `Transport.poll_failures`. Deaths and meetings end the calls that wait on a device, too."""
        try:
            self._check_alive()
        except CommError as exc:
            return exc
        except Killed as exc:
            return CommAborted(str(exc))
        return super().poll_failures(groups)

    def _check_alive(self) -> None:
        job = self._job
        me = self._members_of[self.rank]
        if me in job.doomed:
            raise Killed(f"process {me} in {self._call}")
        dead = [rank for rank, number in enumerate(self._members_of) if number in job.doomed]
        if dead:
            raise RankFailed(f"rank {self.rank}: ranks {dead} died", dead)
        if job.called > self._epoch:
            raise CommAborted(f"rank {self.rank}: a meeting was called")
        super()._check_alive()


def run_fleet(job: ThreadJob, body: Callable[[ThreadFleet], T], *, limit_s: float = 30.0) -> list[dict[str, Any]]:
    """Run every process of a job, a thread with its fleet; returns what became of each, by number.

    Args:
        job: The job.
        body: What every process does.
        limit_s: How long all of it may take.

    Returns:
        For every process a dictionary with "result", "error" or "killed".

    Raises:
        CommTimeout: Processes still run after `limit_s`; it names them.
    """
    outcomes = [job.start(body, number) for number in sorted(job.processes)]
    deadline = time.monotonic() + limit_s
    for thread in job.threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    running = [thread.name for thread in job.threads if thread.is_alive()]
    if running:
        raise CommTimeout(f"{', '.join(running)} still run after {limit_s:g} s")
    return outcomes
