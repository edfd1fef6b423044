"""Processes that take the places of dead ones over MPI: how a running job starts them, and how it lets them in.

    recruiter    start them, in the background     MPI_Comm_spawn, in a thread: a second or more
    newcomers    start Python, the program and MPI, and say that they are ready
    all          at a meeting after that           let_in: one communicator of all, some milliseconds
    newcomers    come to the next meeting

Until they are ready nobody waits for them, and one that dies or is late costs the others nothing. A communicator
of MPI is made in `let_in` alone. Open MPI may crash the survivors if a process dies in these milliseconds; then
the job is lost, and `bagua run --restarts` starts it again from memory.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

from mpi4py import MPI

from ...bootstrap.job import Job
from ...errors import RankFailed
from ...processes import ProcessId, kill, start_of, started_with, this_host
from ...transports.mpi.time_limit import in_time
from ..snapshot.sealing import seal
from .parent import VARIABLE, Origin

START_S = 60.0
"""How long newcomers may take until they are ready; those that take longer are killed, and others are started."""

LET_IN_S = 10.0
"""How long it may take to make the communicator with them; otherwise the job goes on without them."""

TRIES = 3
"""How often processes are started in the place of the same dead ones."""

APPEAR_S = 10.0
"""How long newcomers may take until they are seen, where all processes of the job see each other."""

LOOK_S = 0.5
"""How often the recruiter looks whether newcomers that are not ready yet live."""

NAP_S = 0.001
"""How long newcomers, and those who let them in, sleep between two looks."""

_READY, _VERDICT, _LET_IN = 1, 2, 3
"""Tags of messages between the recruiter and the newcomers."""

_COME, _WELCOME = "come", "welcome"

_log = logging.getLogger(__name__)


class Recruit(NamedTuple):
    """A newcomer that is ready."""

    process: ProcessId
    host: str
    """See `processes.this_host`."""
    name: str
    """The host's name."""


class Welcome(NamedTuple):
    """What newcomers must know of the job."""

    numbers: list[int]
    """The numbers of the processes, by their ranks in the communicator of all."""
    wanted: int
    meetings: int
    started: int
    """How many processes were started with the job."""


# The recruiter --------------------------------------------------------------------------------------------


class Recruiter:
    """Starts processes in the background.

    Args:
        variables: Their environment variables, beside those that MPI needs.
        job: Whose record tells of them.
    """

    def __init__(self, variables: dict[str, str], job: Job) -> None:
        self._variables, self._job = variables, job
        self._group: Group | None = None
        self._count, self._here, self._tries = 0, True, 0

    def start(self, count: int, *, here: bool) -> None:
        """Start so many processes, unless some are being started; `here` if they will be seen from here."""
        if self._group is None:
            self._count, self._here, self._tries = count, here, 0
            self._try()

    def _try(self) -> None:
        self._tries += 1
        self._job.record("recruits", count=self._count)
        self._group = Group(self._count, self._variables, here=self._here)

    def ready(self) -> Group | None:
        """Those that are ready; looks after those that are not, and starts others in their place."""
        group = self._group
        if group is None:
            return None
        trouble = group.trouble()
        if trouble is None:
            return group if group.recruits else None
        group.give_up()
        self._group = None
        if self._tries < TRIES:
            _log.warning("processes that were started in the place of dead ones %s; others are started", trouble)
            self._try()
        else:
            _log.warning(
                "%d times processes were started in the place of dead ones, and %s; training goes on with fewer",
                self._tries,
                trouble,
            )
        return None

    def take(self) -> Group | None:
        """Those that are ready, who are let in or given up now."""
        group = self.ready()
        if group is not None:
            self._group = None
        return group

    def close(self) -> None:
        """End those that were not let in."""
        if self._group is not None:
            self._group.give_up()
            self._group = None


class Group:
    """Newcomers that were started together, and the way of the recruiter to them.

    Args:
        count: How many are started.
        variables: Their environment variables.
        here: Whether all of them start where this process sees them: on its host, and not in another container.
    """

    def __init__(self, count: int, variables: dict[str, str], *, here: bool) -> None:
        self._origin = Origin(secrets.token_hex(8), ProcessId.mine())
        self._count, self._variables = count, variables
        self._here = here
        self._begun_s = self._looked_s = time.monotonic()
        self._seen = self._given_up = False
        self._error: Exception | None = None
        self.pair: MPI.Intracomm | None = None
        """The recruiter, which is rank 0, and the newcomers."""
        self.recruits: tuple[Recruit, ...] = ()
        """The newcomers, once all are ready."""
        threading.Thread(target=self._start, name="recruit", daemon=True).start()

    def _start(self) -> None:
        """Start them, and wait until they are ready; for ever if one dies before."""
        try:
            program = [sys.executable, *sys.orig_argv[1:]]
            sealed = seal(self._variables, {VARIABLE: self._origin.text()}, program)
            settings = {"map_by": "slot:OVERSUBSCRIBE", "bind_to": "none", "PMIX_ENVAR": sealed.variable}
            between = MPI.COMM_SELF.Spawn("env", sealed.command, self._count, MPI.Info.Create(settings))
            pair = between.Merge(False)
            between.Disconnect()  # otherwise MPI crashes later
            pair.Set_errhandler(MPI.ERRORS_RETURN)
            recruits = tuple(Recruit(*pair.recv(None, rank, _READY)) for rank in range(1, self._count + 1))
        except Exception as exc:
            self._error = exc
            return
        self.pair, self.recruits = pair, recruits
        if self._given_up:
            self.give_up()

    def trouble(self) -> str | None:
        """Why they cannot be let in any more; None if they can, or will be."""
        if self._error is not None:
            return f"could not be started: {self._error}"
        if any(each.process.state() in ("ended", "stopped") for each in self.recruits):
            return "died or were stopped before they were let in"
        now = time.monotonic()
        if self.recruits or now - self._looked_s < LOOK_S:
            return None
        self._looked_s = now
        if now - self._begun_s > START_S:
            return f"were not ready in {START_S:.3g} s"
        living = len(started_with(VARIABLE, self._origin.text()))
        self._seen = self._seen or living >= self._count
        if self._here and not self._seen and now - self._begun_s > APPEAR_S:
            return f"did not appear in {APPEAR_S:.3g} s, or died at once"
        some_died = self._seen and living < self._count and not self.recruits
        return "died before they were ready" if some_died else None

    def give_up(self) -> None:
        """End them."""
        self._given_up = True
        for process in started_with(VARIABLE, self._origin.text()):
            kill(process, start_of(process))

    def tell(self, what: object) -> None:
        """Send something to all of them."""
        assert self.pair is not None
        for rank in range(1, self._count + 1):
            with suppress(MPI.Exception):
                self.pair.send(what, rank, _VERDICT)


# All who are at a meeting ---------------------------------------------------------------------------------


def let_in(old: MPI.Comm, group: Group | None, recruiter: int) -> tuple[MPI.Intracomm, list[int]]:
    """A communicator of the living and of newcomers behind them. Collective among the living.

    Args:
        old: That of the living, and of the dead.
        group: The newcomers; only the recruiter has them.
        recruiter: The recruiter's rank in `old`.

    Returns:
        The communicator, and those of `old` who are in it, by their ranks there.

    Raises:
        CommTimeout: It could not be made in time.
        MPI.Exception: It could not be made.
    """

    def make() -> tuple[MPI.Intracomm, list[int]]:
        living = cast(MPI.Intracomm, cast(MPI.Intracomm, old).Shrink())
        living.Set_errhandler(MPI.ERRORS_RETURN)
        ranks = _ranks_in(old, living)
        pair = group.pair if group is not None else None
        return _merged(living, ranks.index(recruiter), pair or MPI.COMM_SELF, 1, behind=False), ranks

    if group is not None:
        group.tell(_COME)
    return in_time(make, LET_IN_S, "letting newcomers in", kind=threading.Thread)


def _ranks_in(old: MPI.Comm, living: MPI.Comm) -> list[int]:
    everyone, group = old.Get_group(), living.Get_group()
    try:
        return list(group.Translate_ranks(range(group.Get_size()), everyone))
    finally:
        everyone.Free()
        group.Free()


def _merged(mine: MPI.Intracomm, first: int, pair: MPI.Intracomm, peer: int, *, behind: bool) -> MPI.Intracomm:
    """A communicator of this group and of another one.

    Collective.

    Args:
        mine: The communicator of this group.
        first: The rank there of the process that is in `pair`.
        pair: One with somebody of the other group; only that process needs it.
        peer: The rank of the other group's process in `pair`.
        behind: Whether this group's ranks come last.
    """
    between = mine.Create_intercomm(first, pair, peer, _LET_IN)
    between.Set_errhandler(MPI.ERRORS_RETURN)
    everyone = between.Merge(behind)
    between.Disconnect()  # otherwise MPI crashes later
    everyone.Set_errhandler(MPI.ERRORS_RETURN)
    return everyone


# A newcomer -----------------------------------------------------------------------------------------------


def join(origin: Origin) -> tuple[MPI.Intracomm, Welcome]:
    """Say that this newcomer is ready, and wait until it is let in. Collective among those started together.

    Raises:
        CommTimeout: The others do not take part.
        RankFailed: It is not let in.
    """

    def report() -> MPI.Intracomm:
        between = MPI.Comm.Get_parent()
        pair = between.Merge(True)
        between.Disconnect()
        pair.Set_errhandler(MPI.ERRORS_RETURN)
        pair.send(Recruit(ProcessId.mine(), this_host(), os.uname().nodename), 0, _READY)
        return pair

    pair = in_time(report, START_S, "reporting to the process that has started this one")
    _hear(pair, origin, float("inf"))
    everyone = in_time(lambda: _merged(MPI.COMM_WORLD, 0, pair, 0, behind=True), LET_IN_S, "being let in")
    welcome = _hear(pair, origin, 3 * LET_IN_S)
    return everyone, Welcome(*welcome)


def _hear(pair: MPI.Comm, origin: Origin, limit_s: float) -> Any:
    """What the recruiter says next."""
    until = time.monotonic() + limit_s
    while True:
        try:
            if pair.Iprobe(0, _VERDICT):
                return pair.recv(None, 0, _VERDICT)
        except MPI.Exception as exc:
            raise RankFailed(f"{origin}, which has started this process, is gone: {exc}") from exc
        if time.monotonic() > until:
            raise RankFailed(f"{origin}, which has started this process, did not let it in")
        time.sleep(NAP_S)


def numbered(numbers: Sequence[int], ranks: Sequence[int], size: int, count: int) -> list[int]:
    """The numbers of the processes of a communicator that newcomers are in.

    Args:
        numbers: Those of the communicator before, by rank.
        ranks: Who of that one is in the new one, by rank.
        size: How many numbers were given so far.
        count: How many newcomers there are; they come last.

    >>> numbered([0, 1, 2], ranks=[0, 2], size=3, count=1)
    [0, 2, 3]
    """
    return [*(numbers[rank] for rank in ranks), *range(size, size + count)]
