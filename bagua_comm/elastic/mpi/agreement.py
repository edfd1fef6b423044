"""How the living processes of an MPI job agree on who is alive.

Agreements are held in rounds of four steps:

    join      notify all others, and wait until all living processes have joined; late ones are fenced (killed)
    agree     on who is alive: MPI agrees on an AND of bits, which fails on all processes if one more has died
    exchange  who each process is, what it wants, and which processes it has killed
    agree     that all have received that; otherwise begin another round
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from ...comm import Communicator
from ...errors import CommAborted, CommError, RankFailed
from ...trace import NULL
from ...transports.mpi.world import Place
from ..fleet import ProcessInfo
from .channel import ChannelTransport
from .processes import ENDING, JOIN, ROUNDS, JobProcesses

BITS = 30
"""How many processes one MPI agreement covers; it agrees on an int."""

HEARTBEAT_S = 0.25
"""Interval at which a waiting process repeats its notice."""

POLL_S = 0.0005
"""Interval at which a waiting process polls."""

RESUME, FINISH, EITHER = "resume", "finish", "either"
"""The wish of a process in an agreement: to continue training; to end the job; or that of the others."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Participant:
    """The message of one process to all others in an agreement."""

    wants: str
    info: ProcessInfo
    killed: tuple[tuple[int, str], ...] = ()
    """The processes that it has killed, and why."""


class Agreement:
    """The agreements of one process with all others.

    Args:
        processes: The processes of the job.
        timeout_s: How long a process may stay away before it is fenced.
    """

    def __init__(self, processes: JobProcesses, timeout_s: float) -> None:
        self._processes, self._timeout_s = processes, timeout_s
        self._limit_s = 3 * timeout_s + 10
        """How long a wait may take: longer than fencing late processes takes."""
        self.round = 0
        """Number of rounds so far."""
        self.control: ChannelTransport | None = None
        """Connects all participants of the last agreement."""
        self.participants: dict[int, Participant] = {}
        """By process, its message in the last agreement that it took part in."""
        self._killed: dict[int, str] = {}
        """Why this process has killed others."""
        self._kind = JOIN
        self._cause: CommError | None = None
        self._heartbeat_s = self._started_s = 0.0
        """When this process last repeated its notice, and when the agreement started."""

    def hold(self, wants: str, cause: CommError | None) -> dict[int, Participant]:
        """Wait until all living processes have joined and agree; returns them by number, the same on all.

        Collective among all living processes. If the job has ended meanwhile, the result is empty.

        Args:
            wants: `RESUME`, `FINISH` or `EITHER`.
            cause: The error that is the reason for it.

        Raises:
            RankFailed: The others have counted this process as dead, or cannot agree.
            CommAborted: The program has failed on another process.
        """
        processes = self._processes
        self._cause, self._kind = cause, JOIN if wants == RESUME else ENDING
        self._heartbeat_s, self._started_s = 0.0, time.monotonic()
        processes.on_wait = self._watch
        try:
            self._wait(lambda: all(processes.last_notice(each) is not None for each in processes.living()))
            while True:
                participants = self._hold_round(wants)
                if participants is not None:
                    return participants
                if wants != RESUME and self._has_job_ended():
                    return {}
        finally:
            processes.on_wait = None

    def _has_job_ended(self) -> bool:
        """Whether the others have agreed that the job has ended: a process that has died since had left it."""
        notices = self._processes.notices
        heard = (notice for each in range(self._processes.size) for notice, _ in notices.from_rank(each))
        return any(notice.completed.get(ROUNDS, 0) > self._processes.rounds for notice in heard)

    def _hold_round(self, wants: str) -> dict[int, Participant] | None:
        """All participants, or None if a process has died meanwhile; the same on all."""
        processes = self._processes
        self.round += 1
        alive = self._agree_on_living()
        if alive is None:
            return None
        if processes.index not in alive:
            raise RankFailed(
                f"process {processes.index}: the others have counted this process as dead, and continue "
                "without it"
            )
        channel = processes.channel_of_round(self.round)
        control = ChannelTransport(processes, alive, channel, timeout_s=self._limit_s, with_window=False)
        this = Participant(wants, ProcessInfo.of_this(), tuple(self._killed.items()))
        rows: list[Participant] = []
        with suppress(CommError):
            rows = Communicator([control], tracer=NULL).allgather_object(this)
        if not self.agree(bool(rows)):
            control.abandon("a process died in a rendezvous")
            return None
        participants = dict(zip(alive, rows, strict=True))
        self.control = control
        self.participants.update(participants)
        for process, each in participants.items():
            processes.places[process] = Place(each.info.name, each.info.pid, each.info.is_visible())
        return participants

    def _agree_on_living(self) -> list[int] | None:
        """The living processes, as all agree; None if one more has died."""
        processes = self._processes
        processes.acknowledge()
        dead, alive = processes.failed(), list[int]()
        for first in range(0, processes.size, BITS):
            some = range(first, min(first + BITS, processes.size))
            bits = self.agree(sum(1 << (each - first) for each in some if each not in dead))
            if bits is None:
                return None
            alive += [each for each in some if bits >> (each - first) & 1]
        return alive

    def agree(self, bits: int) -> int | None:
        """The AND of the bits of all living processes; None on all of them if one more has died.

        Collective among all living processes.
        """
        value = np.array([bits], np.int32)
        request: MPI.Request | None = None
        try:
            request = self._processes.comm.Iagree(value)
            self._wait(request.Test, self._limit_s)
        except MPI.Exception as exc:
            if exc.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING):
                self._processes.acknowledge()
                return None
            raise RankFailed(f"process {self._processes.index}: MPI cannot agree: {exc}") from exc
        except BaseException:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((request, value)))  # MPI may still write there
            raise
        return int(value[0])

    # Waiting, and fencing -----------------------------------------------------------------------------

    def _wait(self, done: Callable[[], bool], limit_s: float = float("inf")) -> None:
        start_s = time.monotonic()
        while not done():
            self._watch()
            if time.monotonic() - start_s > limit_s:
                raise RankFailed(
                    f"process {self._processes.index}: all processes have joined, but did not agree in "
                    f"{limit_s:.3g} s"
                )
            time.sleep(POLL_S)

    def _watch(self) -> None:
        """Repeat the notice of this process, and fence others; called repeatedly while it waits."""
        processes, now = self._processes, time.monotonic()
        if processes.failed() - processes.dead:
            processes.acknowledge()  # otherwise MPI delivers no notices
        if now - self._heartbeat_s > HEARTBEAT_S:
            self._heartbeat_s = now
            processes.announce(self._kind, self._cause)
        if failure := processes.failure():
            processes.over = True
            raise CommAborted(f"process {processes.index} ends: {failure}")
        self._fence_silent(now)

    def _fence_silent(self, now: float) -> None:
        """Fence processes that do not join in time, or have joined and send no more heartbeats."""
        if now - self._started_s < self._timeout_s:
            return
        silent = {}
        for process in self._processes.living():
            last = self._processes.last_notice(process)
            since_s = max(self._started_s, last[1] if last is not None else 0.0)
            if now - since_s > self._timeout_s:
                silent[process] = now - since_s
        for process, silent_s in silent.items():
            self._fence(process, silent_s, silent)

    def _fence(self, process: int, silent_s: float, silent: Iterable[int]) -> None:
        """Kill a process that is visible from here; raise if no process can, or if killing it had no effect."""
        index, participants = self._processes.index, self.participants
        name = f"process {process} ({self._processes.places[process]}) has not answered for {silent_s:.3g} s"
        if process not in participants or index not in participants:
            return  # it has missed the first rendezvous: `mpi_start.start` reports that, and ends the job
        info = participants[process].info
        if info.is_visible() and process not in self._killed:
            state = info.state()
            stopped = ", being stopped" if state == "stopped" else ""
            self._killed[process] = f"did not answer for {silent_s:.3g} s{stopped}, and was killed"
            if not info.kill() and state != "ended":
                raise RankFailed(f"process {index}: {name}, and it cannot be killed")
            _log.warning("%s; it was killed", name)
        answering = [
            each for each in (index, *self._processes.living()) if each not in silent and each in participants
        ]
        if not any(participants[each].info.namespace == info.namespace for each in answering):
            raise RankFailed(
                f"process {index}: {name}, and no process of the job answers on its host, and in its container, "
                "that could kill it: the host is down or stopped, or the link to it is broken"
            )
        if silent_s > 2 * self._timeout_s + 10:
            raise RankFailed(f"process {index}: {name}, and MPI does not detect that it was killed")
