"""A fleet of threads: elastic training without processes, where a test decides exactly when a rank dies.

A death is an exception that programs do not catch, raised in the next call of the victim on any of its threads.
All others detect it at the same moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from ..comm import Communicator
from ..elastic.fleet import Death, Fleet, Process, Rendezvous
from ..errors import CommAborted, CommError, CommTimeout, RankFailed
from ..transports import LocalTransport, Transport
from ..transports.labels import Ended, Labelled, Receive
from ..transports.local import Hub
from .worlds import still_running

T = TypeVar("T")


class Killed(BaseException):
    """This process has been killed."""


class ThreadJob:
    """The processes of a job, as threads; shared by all of them.

    Args:
        size: How many processes are started.
        wanted: How many train; all of them if None.
        hosts: The host of each process; a single host if None.
        timeout_s: How long a call or a rendezvous may wait.
    """

    def __init__(
        self, size: int, *, wanted: int | None = None, hosts: Sequence[str] | None = None, timeout_s: float = 20.0
    ) -> None:
        self.wanted, self.timeout_s = wanted or size, timeout_s
        self.changed = threading.Condition(threading.RLock())
        self.processes = {n: Process(n, hosts[n] if hosts else "host", 1000 + n) for n in range(size)}
        """All processes that have ever been admitted, by number."""
        self.joining: list[int] = []
        """Processes that were started later, and are ready to join."""
        self.alive = set(self.processes)
        self.dead: list[Death] = []
        self.doomed: set[int] = set()
        """Processes that die in their next call."""
        self.present: set[int] = set()
        """Processes that have joined the pending rendezvous."""
        self.requested_rounds = self.completed_rounds = 0
        """How many rendezvous were started, and how many were completed."""
        self.rounds: list[Rendezvous] = []
        """The completed rendezvous."""
        self.over = False
        self.hubs: dict[object, Hub] = {}
        self.watch: Callable[[int, str], object] = lambda number, what: None
        """Called with the number of a process and the name of its next operation; may kill the process."""
        self.threads: list[threading.Thread] = []
        self.fleet: Callable[[ThreadJob, int], ThreadFleet] = ThreadFleet
        """Makes the fleet of a process, given its number."""

    def kill(self, *numbers: int) -> None:
        """Kill processes together, each in its next call; the others detect all of these deaths at once."""
        with self.changed:
            for number in numbers:
                if number in self.alive and number not in self.doomed:
                    self.doomed.add(number)
                    self.alive.discard(number)
                    if number in self.processes:
                        self.dead.append(Death(self.processes[number], "died"))
        self.wake()

    def kill_at(self, moments: Sequence[tuple[int, int]]) -> None:
        """Kill process n in its k-th operation, for every (n, k)."""
        due, counts = dict(moments), dict.fromkeys(dict(moments), 0)

        def watch(number: int, what: str) -> None:
            if number in due:
                counts[number] += 1
                if counts[number] == due[number]:
                    self.kill(number)

        self.watch = watch

    def wake(self) -> None:
        """Wake all waiting threads."""
        with self.changed:
            self.changed.notify_all()
            hubs = list(self.hubs.values())
        for hub in hubs:
            with hub.changed:
                hub.changed.notify_all()

    def hub(self, key: object, size: int) -> Hub:
        """The hub of a communicator, the same for all its ranks."""
        with self.changed:
            if key not in self.hubs:
                self.hubs[key] = Hub(size)
            return self.hubs[key]

    def check(self, number: int, what: str) -> None:
        """Raise `Killed` in a doomed process."""
        self.watch(number, what)
        if number in self.doomed:
            raise Killed(f"process {number} in {what}")

    def start(self, body: Callable[[ThreadFleet], object], number: int) -> dict[str, Any]:
        """Start a process; the returned dictionary will hold its "result", "error" or "killed".

        A process with a number that the job does not have yet is admitted at the next rendezvous.
        """
        outcome: dict[str, Any] = {}
        with self.changed:
            self.alive.add(number)

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


class ThreadFleet(Fleet):
    """The fleet of one of the threads."""

    def __init__(self, job: ThreadJob, number: int) -> None:
        self._job, self.me, self.wanted, self.timeout_s = job, number, job.wanted, job.timeout_s
        self._connected = 0
        self._admitted = number in job.processes

    def rendezvous(self, cause: CommError | None = None) -> Rendezvous:
        """See `Fleet.rendezvous`."""
        job = self._job
        job.check(self.me, "rendezvous")
        with job.changed:
            if not self._admitted:  # a process that was started later waits for the others
                job.joining.append(self.me)
                job.wake()
                job.changed.wait_for(lambda: self.me in job.processes or job.over, job.timeout_s)
                self._admitted = True
            if job.requested_rounds == job.completed_rounds:
                job.requested_rounds += 1
            number = job.requested_rounds
            job.present.add(self.me)
        job.wake()
        deadline = time.monotonic() + job.timeout_s
        with job.changed:
            while job.completed_rounds < number:
                if self.me in job.doomed:
                    raise Killed(f"process {self.me} in rendezvous")
                missing = job.alive - job.present - set(job.joining)
                if not missing:
                    self._complete(number)
                    break
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise RankFailed(f"processes {sorted(missing)} did not join the rendezvous", sorted(missing))
                job.changed.wait(remaining)
            job.changed.notify_all()
            self._connected = 0
            return job.rounds[number - 1]

    def _complete(self, number: int) -> None:
        """Complete a rendezvous that all have joined."""
        job = self._job
        for process in job.joining:
            job.processes[process] = Process(process, "host", 1000 + process)
        alive = sorted((job.present & job.alive) | set(job.joining))
        job.joining.clear()
        dead = tuple(job.dead)
        job.dead.clear()
        job.present.clear()
        job.completed_rounds = number
        job.rounds.append(Rendezvous(number, tuple(job.processes[n] for n in alive), dead))

    def connect(self, members: Sequence[int], *, control: bool = False) -> Communicator:
        """See `Fleet.connect`."""
        job = self._job
        job.check(self.me, "connect")
        self._connected += 1
        round_ = job.completed_rounds
        key = (round_, tuple(members), self._connected)
        transport = _FleetTransport(
            job, job.hub(key, len(members)), members.index(self.me), tuple(members), round_, key
        )
        return Communicator([transport], nodes=[job.processes[n].host for n in members])

    def stand_by(self, training: Collection[int]) -> bool:
        """See `Fleet.stand_by`."""
        job = self._job
        completed = job.completed_rounds

        def is_over() -> bool:
            trainer_died = any(death.process.number in training for death in job.dead)
            return job.requested_rounds > completed or trainer_died or job.over or self.me in job.doomed

        with job.changed:
            job.changed.wait_for(is_over)
        job.check(self.me, "stand_by")
        return job.requested_rounds > completed or not job.over

    def end(self) -> None:
        """See `Fleet.end`."""
        job = self._job
        with job.changed:
            job.over = True
            job.alive.discard(self.me)
        job.wake()


class _FleetTransport(LocalTransport):
    """A rank of a communicator of the fleet: calls fail once a member is dead or a rendezvous has started."""

    def __init__(
        self, job: ThreadJob, hub: Hub, rank: int, members: tuple[int, ...], round_: int, key: object
    ) -> None:
        super().__init__(hub, rank, timeout_s=job.timeout_s)
        self._job, self._members_of, self._round, self._key = job, members, round_, key

    def leave_and_take(self, sends: Sequence[Labelled], receives: Sequence[Receive], tag: int) -> Ended:
        """See `LocalTransport.leave_and_take`."""
        self._job.check(self._members_of[self.rank], self._call or "exchange")
        return super().leave_and_take(sends, receives, tag)

    def split(self, color: int, key: int) -> Transport:
        """See `Transport.split`."""
        members = self._members(color, key)
        self._splits += 1
        name = (self._key, self._splits, color)
        numbers = tuple(self._members_of[rank] for rank in members)
        hub = self._job.hub(name, len(members))
        return _FleetTransport(self._job, hub, members.index(self.rank), numbers, self._round, name)

    def poll_failures(self, groups: Collection[str]) -> CommError | None:
        """See `Transport.poll_failures`. Waits on a device end at a death or rendezvous, too."""
        try:
            self._check_alive()
        except CommError as exc:
            return exc
        except Killed as exc:
            return CommAborted(str(exc))
        return super().poll_failures(groups)

    def _check_alive(self) -> None:
        job = self._job
        number = self._members_of[self.rank]
        if number in job.doomed:
            raise Killed(f"process {number} in {self._call}")
        dead = [rank for rank, number in enumerate(self._members_of) if number in job.doomed]
        if dead:
            raise RankFailed(f"rank {self.rank}: ranks {dead} died", dead)
        if job.requested_rounds > self._round:
            raise CommAborted(f"rank {self.rank}: a rendezvous has started")
        super()._check_alive()


def run_fleet(job: ThreadJob, body: Callable[[ThreadFleet], T], *, limit_s: float = 30.0) -> list[dict[str, Any]]:
    """Run every process of a job as a thread; returns the outcome of each, by number.

    Args:
        job: The job.
        body: The program of every process.
        limit_s: How long all processes may take together.

    Returns:
        For every process a dictionary with "result", "error" or "killed".

    Raises:
        CommTimeout: Processes still run after `limit_s`; the message names them and their last calls. Its cause
            is the error of another process, if one had an error.
    """
    outcomes = [job.start(body, number) for number in sorted(job.processes)]
    if running := still_running(job.threads, limit_s):
        first_error = next((outcome["error"] for outcome in outcomes if "error" in outcome), None)
        raise CommTimeout(f"after {limit_s:g} s still run: {running}") from first_error
    return outcomes
