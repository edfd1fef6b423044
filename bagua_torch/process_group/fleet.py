"""A fleet over torch.distributed: processes that find each other through torchrun's store.

Gloo cannot exclude a process from a group. So after a death the living processes hold a rendezvous in the store,
and connect anew, under a new key. Round r of the rendezvous has four sorts of keys:

    request/r      a process has started the rendezvous; every process polls this key, and aborts its
                   communicators
    present/r/i    process i has joined
    dead/i         process i is dead, and why: a process that sees it by its process id (on the same host, in the
                   same container) has found it ended, or has killed it because it was late; if none of those
                   answers, any process declares it dead
    result/r       the living and the dead processes, written once, by the first process that misses no other

Besides, process i counts its heartbeats under heartbeat/i, and all processes theirs under heartbeat. Torchrun's
agent on the first node serves the store. When it is gone, a rendezvous raises an error that says so; training
continues until then.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from bagua_comm import ArrayError, CommAborted, CommError, CommTimeout, Communicator, RankFailed
from bagua_comm.bootstrap import environment
from bagua_comm.bootstrap.connection import open_world
from bagua_comm.elastic.fleet import Death, Fleet, Process, ProcessInfo, Rendezvous
from bagua_comm.flight.batches import named
from bagua_comm.transports import Transport

from . import agent_folder, transport
from .bootstrap import reported, torchrun_store, use_device
from .failure_detector import FailureDetector
from .rendezvous import POLL_S, join
from .store import FleetStore, Store
from .waiter import run_watched

T = TypeVar("T")

WATCH_S = 0.05
"""Interval at which each process checks whether a rendezvous has started."""

HEARTBEAT_S = 1.0
"""Interval of heartbeats."""

AGENT_S = 60.0
"""How long a process waits for torchrun's agent to end it; the agent checks its processes every 0.1 s."""

STOP_S = 5.0
"""How long to wait for the end of the watching thread, whose last request to the store may be pending."""

ENDED, DOOMED = "has ended well", "is ended by torchrun, together with"
"""How the reason of a death begins: the process has finished, or torchrun's agent ends it."""

_log = logging.getLogger(__name__)


def start_fleet(timeout_s: float) -> TorchrunFleet:
    """The fleet of the processes that torchrun has started with this one.

    Collective. If torchrun restarts all processes when one dies, their snapshots are files that outlive them.

    Raises:
        ArrayError: BAGUA_SPARES leaves no process to train.
        BootstrapError: The other processes do not join, or there is no folder for snapshots.
        RankFailed: The store of torchrun's agent cannot be reached.
    """
    with reported("elastic.run: torchrun started this process, but the store of its agent cannot be reached"):
        store, rank, size = torchrun_store(timeout_s)
    folder = agent_folder.provide() if environment.number_from_torchrun("TORCHELASTIC_MAX_RESTARTS") else None
    agent = agent_folder.agent()
    return TorchrunFleet(
        store, rank, size, timeout_s=timeout_s, spares=environment.job().spares, folder=folder, agent=agent
    )


class TorchrunFleet(Fleet):
    """The processes that torchrun has started, of which some may die.

    Collective. A process that torchrun restarts while the others live waits until they admit it.

    Args:
        store: A store that outlives every process: that of torchrun's agent.
        rank: The rank that torchrun gave this process.
        size: How many processes torchrun has started.
        timeout_s: How long a process may stay away from a rendezvous, and a call may wait for its peers.
        spares: How many of the processes are spares at the start.
        folder: Where snapshots outlive the processes; None if torchrun does not restart these.
        agent: See `ProcessInfo.agent`.

    Raises:
        ArrayError: All processes are spares.
        BootstrapError: The other processes do not join.
        RankFailed: The store cannot be reached.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        spares: int = 0,
        folder: Path | None = None,
        agent: int | None = None,
    ) -> None:
        if not 0 <= spares < size:
            raise ArrayError(f"elastic.run: {spares} of {size} processes are spares, so that none would train")
        self._store, self.folder = store, folder
        self.wanted, self.timeout_s = size - spares, timeout_s
        membership = join(store, rank, size, timeout_s=timeout_s, agent=agent)
        self.me, self._processes, self._rounds = membership.number, membership.processes, membership.rounds
        self._alive = sorted(self._processes)
        self._started = size
        """How many processes were started together; restarted ones get the numbers after these."""
        self._fleet_store = FleetStore(store, membership.prefix)
        self._connected: Counter[tuple[int, ...]] = Counter()
        """How often these processes have connected since the last rendezvous."""
        self._transports: list[Transport] = []
        self._detector = FailureDetector(self._fleet_store, self._processes)
        self._lock = threading.Lock()
        self._requested = threading.Event()
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="bagua-fleet", daemon=True)
        self._watcher.start()
        atexit.register(self._stop_watching)

    # Rendezvous -------------------------------------------------------------------------------------

    def rendezvous(self, cause: CommError | None = None) -> Rendezvous:
        """See `Fleet.rendezvous`."""
        number = self._rounds + 1
        self._fleet_store.set(f"request/{number}")
        self._abort_pending(number)
        self._fleet_store.set(f"present/{number}/{self.me}")
        since_s = time.monotonic()
        while (result := self._fleet_store.get(f"result/{number}")) is None:
            missing = self._missing(number)
            if not missing:
                result = self._fleet_store.set_once(f"result/{number}", self._outcome())
                break
            present = [each for each in self._alive if each not in missing]
            self._detector.find_dead(missing, present)
            if time.monotonic() - since_s > self.timeout_s:
                self._detector.fence(missing, present, f"did not answer for {self.timeout_s:g} s")
            time.sleep(POLL_S)
        return self._complete(number, result)

    def _missing(self, number: int) -> list[int]:
        """Processes that have not joined, and are not known to be dead."""
        if self._fleet_store.has(*(f"present/{number}/{each}" for each in self._alive)):
            return []
        return [
            each
            for each in self._alive
            if not self._fleet_store.has(f"present/{number}/{each}")
            and self._fleet_store.get(f"dead/{each}") is None
        ]

    def _outcome(self) -> dict[str, Any]:
        """The result of this rendezvous, as this process sees it."""
        dead = {each: self._fleet_store.get(f"dead/{each}") for each in self._alive}
        ending = {self._agent(each): each for each, why in dead.items() if why not in (None, ENDED)}
        for each in self._alive:
            if dead[each] is None and self._agent(each) in ending:
                dead[each] = f"{DOOMED} {self._process(ending[self._agent(each)])}"
        alive = [each for each in self._alive if dead[each] is None]
        processes = {each: asdict(self._processes[each]) for each in self._alive}
        for each in range(self._started, self._started + self._fleet_store.add("joining")):
            if each not in self._processes and (info := self._fleet_store.get(f"process/{each}")) is not None:
                alive.append(each)
                processes[each] = info
        return {"alive": alive, "dead": [(i, why) for i, why in dead.items() if why], "processes": processes}

    def _agent(self, number: int) -> tuple[str, int]:
        """Identifies the processes that torchrun ends together with this one."""
        info = self._processes[number]
        return (info.namespace, -number if info.agent is None else info.agent)

    def _complete(self, number: int, result: dict[str, Any]) -> Rendezvous:
        if self.me not in result["alive"]:
            reason = dict(result["dead"]).get(self.me, "had not joined")
            if reason.startswith(DOOMED):
                time.sleep(AGENT_S)  # a commit now would be one of fewer ranks than are about to continue
            raise RankFailed(
                f"process {self.me} {reason}, according to the other ranks, which continue without it"
            )
        self._processes.update({int(each): ProcessInfo(**info) for each, info in result["processes"].items()})
        dead = tuple(Death(self._process(each), reason) for each, reason in result["dead"])
        with self._lock:
            self._rounds, self._alive = number, result["alive"]
            self._requested.clear()
        self._connected.clear()
        self._detector.reset()
        return Rendezvous(number, tuple(map(self._process, self._alive)), dead)

    def _process(self, number: int) -> Process:
        return self._processes[number].process(number)

    def stand_by(self, training: Collection[int]) -> bool:
        """See `Fleet.stand_by`."""
        check_s = 0.0
        while not self._requested.wait(WATCH_S):
            if self._fleet_store.has("over"):
                return False
            if time.monotonic() >= check_s:
                check_s = time.monotonic() + HEARTBEAT_S
                if self._detector.find_dead(training, [self.me], silent_s=self.timeout_s):
                    return True
        return True

    def end(self) -> None:
        """See `Fleet.end`."""
        self._stop_watching()
        atexit.unregister(self._stop_watching)
        with suppress(RankFailed):  # without the store no process can read it
            self._fleet_store.set(f"dead/{self.me}", ENDED)
            self._fleet_store.set("over")
        if self.folder is not None:
            agent_folder.remove_when_done(self.folder, self.me)

    # Communicators ----------------------------------------------------------------------------------

    def connect(self, members: Sequence[int], *, control: bool = False) -> Communicator:
        """See `Fleet.connect`."""
        numbers = tuple(self._check_members(members, self._alive))
        self._connected[numbers] += 1
        names = ",".join(map(str, numbers))
        key = f"{self._fleet_store.prefix}/connect/{self._rounds}/{names}/{self._connected[numbers]}"
        info = transport.RendezvousInfo(self._store, key, numbers.index(self.me), len(numbers))
        opened = transport.ProcessGroupTransport(
            timeout_s=self.timeout_s, rendezvous=info, guard=lambda call: self._guarded(numbers, call)
        )
        with self._lock:
            self._transports.append(opened)
        hosts = [self._processes[each].host for each in numbers]
        comm = open_world(opened, hosts, gpu="none" if control else "auto")
        use_device(comm)
        with self._lock:
            self._transports += comm.transports[1:]
        if self._requested.is_set():
            self._abort(comm.transports)
        return comm

    def failure(self, comm: Communicator) -> CommError | None:
        """See `Fleet.failure`."""
        if self._requested.is_set():
            return CommAborted("another process started a rendezvous")
        host = comm.host
        lost = host.lost_among(range(comm.size)) if isinstance(host, transport.ProcessGroupTransport) else []
        return RankFailed(f"rank {comm.rank} lost {named(lost)}", lost) if lost else None

    def _guarded(self, members: Sequence[int], call: Callable[[], T]) -> T:
        """The result of a call that connects processes; an error if one dies, or a rendezvous starts, meanwhile.

        Gloo waits for a dead process as long as for a late one.
        """
        others = [each for each in members if each != self.me]
        until_s = time.monotonic() + self.timeout_s + WATCH_S

        def check() -> None:
            if dead := self._detector.find_dead(others, [self.me]):
                names = ", ".join(str(self._process(each)) for each in dead)
                raise RankFailed(f"connect: {names} died meanwhile", [members.index(each) for each in dead])
            if self._requested.is_set():
                raise CommAborted("connect: another process started a rendezvous")
            if time.monotonic() > until_s:
                raise CommTimeout(f"connect: process {self.me} waited {self.timeout_s:g} s for the others")

        return run_watched(call, check, WATCH_S)

    def _abort_pending(self, number: int) -> None:
        """Abort pending operations in all communicators, before round `number`, if that is the next one."""
        with self._lock:
            if self._rounds + 1 == number:
                self._requested.set()
                aborted, self._transports = self._transports, []
                self._abort(aborted)

    @staticmethod
    def _abort(transports: Iterable[Transport]) -> None:
        # Device transports first: they notify their peers through the host transport.
        for each in [*transports][::-1]:
            with suppress(CommError):
                if not isinstance(each, transport.ProcessGroupTransport):  # it would wait for a store that hangs
                    each.leave("a rendezvous started")
                each.abort()

    # Beside training --------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Send heartbeats, and abort pending operations when a rendezvous starts."""
        next_s = 0.0
        try:
            store = FleetStore(self._store, self._fleet_store.prefix)
            while not self._stopped.wait(WATCH_S):
                number = self._rounds + 1
                if not self._requested.is_set() and store.has(f"request/{number}"):
                    self._abort_pending(number)
                if time.monotonic() >= next_s:
                    next_s = time.monotonic() + HEARTBEAT_S
                    store.add(f"heartbeat/{self.me}", 1)
                    store.add("heartbeat", 1)
        except RankFailed as exc:
            _log.warning("%s", exc)

    def _stop_watching(self) -> None:
        """Stop the watching thread. A request to the store while Python exits would abort the process."""
        self._stopped.set()
        self._watcher.join(STOP_S)
