"""A fleet over MPI that survives deaths (Open MPI with ULFM: `bagua run --ulfm`).

All processes are ranks of one communicator of MPI, and no other one is made (see `transports.mpi.channel`). A
meeting is an assembly that ends with all living processes agreeing, in rounds of four steps:

    come      tell all others, and wait until all that live have come; who stays away too long is killed
    agree     on who lives: MPI agrees on an AND of bits, alike on all, or fails on all if one more has died
    tell      each other who one is, what one wants, and which processes one has killed
    agree     that all have heard; if not, begin another round

If newcomers wait at a meeting (see `recruits`), the living make one communicator with them, agree that all have
got it, go on in it, and meet again, with the newcomers.

The end of the job is an assembly as well, so that no process leaves while another one may have to train its last
steps again.
"""

from __future__ import annotations

import ctypes
import logging
import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from ... import kernels
from ...bootstrap import environment
from ...bootstrap.connection import open_world
from ...bootstrap.rank_exit import set_abort_group
from ...comm import Communicator
from ...errors import BootstrapError, CommAborted, CommError, CommMismatch, RankFailed, UnsupportedError
from ...processes import ProcessId, sees_starter, this_host
from ...trace import NULL
from ...transports.mpi.world import Place
from ..fleet import Death, Fleet, Meeting, Process
from . import spawn as recruits
from .channel import ChannelTransport
from .parent import Origin
from .processes import ENDS, FAILS, FAREWELL_S, MEETINGS, MEETS, Crew
from .spawn import Recruit, Recruiter, Welcome

BITS = 30
"""How many processes an agreement of MPI is about; it agrees on an int."""

BEAT_S = 0.25
"""How often a process that waits at an assembly tells the others that it does."""

NAP_S = 0.0005
"""How long it sleeps between looks at what the others do."""

STAND_BY_NAP_S = 0.002
"""How long a process that stands by sleeps between them."""

MOST_LOST = 20
"""How many newcomers may have died until no more are started."""

MEET, END, SPARE = "meet", "end", "spare"
"""What a process wants of an assembly: to go on; to end the job; or whichever the others want."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Card:
    """What a process tells the others at an assembly."""

    wants: str
    process: ProcessId
    host: str
    """See `processes.this_host`."""
    name: str
    """The host's name."""
    killed: tuple[tuple[int, str], ...]
    """Which processes this one has killed, and why."""
    brings: tuple[Recruit, ...] = ()
    """The newcomers that wait to be let in, which this one has started."""


def _place(each: _Card | Recruit) -> Place:
    return Place(each.name, each.process.pid, each.process.is_visible())


def gather(timeout_s: float) -> MPIFleet:
    """The fleet of all processes that mpirun has started, once all are here. Collective.

    Raises:
        BootstrapError: BAGUA_SPARES leaves nobody to train.
    """
    job, size = environment.job(), MPI.COMM_WORLD.Get_size()
    spares = job.spares
    if job.recruiter:
        return _joined(Origin.parse(job.recruiter), timeout_s)
    if spares >= size:
        raise BootstrapError(
            f"elastic.run: BAGUA_SPARES is {spares}, so that none of {size} processes would train; start more of "
            "them, or fewer spares"
        )
    kernels.on_host()  # this loads them, and after a death all would wait for the slowest
    fleet = MPIFleet(MPI.COMM_WORLD, timeout_s=timeout_s, wanted=size - spares)
    fleet.begin()
    return fleet


def _joined(origin: Origin, timeout_s: float) -> MPIFleet:
    """The fleet that this process is let into, as a newcomer."""
    comm, welcome = recruits.join(origin)
    fleet = MPIFleet(comm, timeout_s=timeout_s, wanted=welcome.wanted, welcome=welcome)
    fleet.begin()
    return fleet


class MPIFleet(Fleet):
    """The processes that mpirun has started, of which some may die.

    Args:
        comm: The communicator of all of them; no other thread may make collective calls of it.
        timeout_s: How long a process may stay away from a meeting, and a call may wait for its peers.
        wanted: How many processes train while there are as many.
        welcome: What this process was told, if it is a newcomer.
    """

    def __init__(self, comm: MPI.Comm, *, timeout_s: float, wanted: int, welcome: Welcome | None = None) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._crew = Crew(comm, None if welcome is None else welcome.numbers)
        self._started = self._crew.size
        """How many processes were started with the job."""
        if welcome is not None:
            set_abort_group(comm)
            self._crew.meetings, self._started = welcome.meetings, welcome.started
            self._crew.dead = set(range(self._crew.size)) - set(welcome.numbers)
        self.recruits = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._recruiter = Recruiter(environment.job_variables(), environment.job())
        self.me, self.wanted, self.timeout_s = self._crew.me, wanted, timeout_s
        self._round = 0
        self._control: ChannelTransport | None = None
        """Among all that were at the last assembly."""
        self._cards: dict[int, _Card] = {}
        """By process, what it has told at the last assembly that it was at."""
        self._killed: dict[int, str] = {}
        """Why this process has killed others."""
        self._comms: list[Communicator] = []
        """Those made since the last meeting."""
        self._first: Meeting | None = None
        """The first meeting, until `meet` has returned it."""
        self._noticed: RankFailed | None = None
        """The death that this process noticed while it stood by."""
        self._cause: CommError | None = None
        self._kind = MEETS
        self._beat_s = self._called_s = 0.0
        """When this process last told the others that it waits, and since when all should come."""

    # Meetings ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Hold the first meeting; the first call of `meet` returns what was agreed. Collective."""
        self._first = self.meet()

    def meet(self, cause: CommError | None = None) -> Meeting:
        """See `Fleet.meet`."""
        if self._first is not None:
            meeting, self._first = self._first, None
            return meeting
        cause, self._noticed = cause or self._noticed, None
        self._give_up(cause)
        before = self._crew.dead
        while True:
            cards = self._assemble(MEET, cause)
            bringer = next((process for process, card in sorted(cards.items()) if card.brings), None)
            if bringer is not None:
                self._let_in(bringer, cards[bringer].brings)
            elif all(card.wants == MEET for card in cards.values()):
                break
        self._crew.meetings += 1
        self._crew.dead, self._crew.needed = set(range(self._crew.size)) - set(cards), set(cards)
        reasons: dict[int, str] = {}
        for process, why in (each for card in cards.values() for each in card.killed):
            # Several may have killed it; the first of them has seen most.
            reasons[process] = max(why, reasons.get(process, ""), key=len)
        dead = [
            Death(self._process(each), reasons.get(each, "died")) for each in sorted(self._crew.dead - before)
        ]
        return Meeting(self._crew.meetings, tuple(map(self._process, sorted(cards))), tuple(dead))

    def stand_by(self, training: Collection[int]) -> bool:
        """See `Fleet.stand_by`."""
        crew = self._crew
        crew.needed = set(training)
        while True:
            kinds = {notice.kind for _, notice in crew.calls()}
            if dead := crew.deaths():
                self._noticed = RankFailed(f"process {self.me}, standing by: {crew.obituary(dead)}")
            if dead or MEETS in kinds or FAILS in kinds:
                return True
            if ENDS in kinds:
                return not self._ends(SPARE)
            time.sleep(STAND_BY_NAP_S)

    def end(self) -> None:
        """See `Fleet.end`."""
        if not self._ends(END):
            raise CommAborted(f"process {self.me} was done, but another one calls a meeting")

    def fail(self, reason: str) -> None:
        """See `Fleet.fail`."""
        self._crew.say_failed(reason)

    def _ends(self, wants: str) -> bool:
        """Whether the job has ended, as all agree; False if some call a meeting."""
        cards = self._assemble(wants, None)
        if any(card.wants == MEET for card in cards.values()):
            return False
        self._say_farewell(cards)
        return True

    def _say_farewell(self, everyone: Iterable[int]) -> None:
        """Wait until the others have learnt that the job has ended, but not for long."""
        self._recruiter.close()
        self._crew.over = True
        self._crew.meetings += 1
        until = time.monotonic() + FAREWELL_S
        self._crew.say(ENDS, None)
        others = set(everyone) - {self.me}
        while others and time.monotonic() < until:
            others &= set(self._crew.living())
            others -= {process for process, _ in self._crew.calls()}
            time.sleep(NAP_S)

    def _process(self, number: int) -> Process:
        place = self._crew.places[number]
        return Process(number, place.host, place.process)

    def _give_up(self, cause: CommError | None) -> None:
        """Give up what is under way in all communicators of this fleet."""
        reason = "the processes meet" + (f" after {type(cause).__name__}: {cause}" if cause is not None else "")
        for transport in list(self._crew.transports):
            if isinstance(transport, ChannelTransport):
                transport.abandon(reason)
        for comm in self._comms:
            for beside in comm.transports[1:]:
                with suppress(CommError):
                    beside.leave(reason)
        self._comms.clear()
        self._crew.completed.clear()

    # Assemblies -------------------------------------------------------------------------------------

    def _assemble(self, wants: str, cause: CommError | None) -> dict[int, _Card]:
        """The cards of all living processes, by number, once all have come and agree; the same on all."""
        crew = self._crew
        self._cause, self._kind = cause, MEETS if wants == MEET else ENDS
        self._beat_s, self._called_s = 0.0, time.monotonic()
        crew.watch = self._keep_watch
        try:
            self._come()
            while True:
                cards = self._hold_round(wants)
                if cards is not None:
                    return cards
                if wants != MEET and self._somebody_has_left():
                    return {}
        finally:
            crew.watch = None

    def _somebody_has_left(self) -> bool:
        """Whether the others have agreed that the job has ended, and one of them has died of it since."""
        notices = (notice for each in range(self._crew.size) for notice, _ in self._crew.notices.from_rank(each))
        return any(notice.completed.get(MEETINGS, 0) > self._crew.meetings for notice in notices)

    def _come(self) -> None:
        """Wait until all living processes have come."""
        crew = self._crew
        self._wait(lambda: all(crew.waits(process) is not None for process in crew.living()))

    def _hold_round(self, wants: str) -> dict[int, _Card] | None:
        """The cards of all, or None if a process has died meanwhile; the same on all."""
        self._round += 1
        alive = self._agree_on_the_living()
        if alive is None:
            return None
        if self.me not in alive:
            raise RankFailed(
                f"process {self.me}: the others have taken this process for dead, and go on without it"
            )
        channel = self._crew.channel_of_round(self._round)
        patience_s = self._patience_s()
        control = ChannelTransport(self._crew, alive, channel, timeout_s=patience_s, with_window=False)
        group = self._recruiter.ready() if wants == MEET else None
        brings = group.recruits if group is not None else ()
        names = this_host(), socket.gethostname()
        card = _Card(wants, ProcessId.mine(), *names, tuple(self._killed.items()), brings)
        told: list[_Card] = []
        with suppress(CommError):
            told = Communicator([control], tracer=NULL).allgather_object(card)
        if not self._agree(bool(told)):
            control.abandon("a process died at a meeting")
            return None
        cards = dict(zip(alive, told, strict=True))
        self._control = control
        self._cards.update(cards)
        for process, each in cards.items():
            self._crew.places[process] = _place(each)
        return cards

    def _agree_on_the_living(self) -> list[int] | None:
        """Who lives, as all agree; None if one more has died."""
        self._crew.acknowledge()
        dead, alive = self._crew.failed(), list[int]()
        for first in range(0, self._crew.size, BITS):
            some = range(first, min(first + BITS, self._crew.size))
            bits = self._agree(sum(1 << (each - first) for each in some if each not in dead))
            if bits is None:
                return None
            alive += [each for each in some if bits >> (each - first) & 1]
        return alive

    def _agree(self, bits: int) -> int | None:
        """The AND of all living processes' bits; None on all of them if one more has died."""
        value = np.array([bits], np.int32)
        request: MPI.Request | None = None
        try:
            request = self._crew.comm.Iagree(value)
            self._wait(request.Test, self._patience_s())
        except MPI.Exception as exc:
            if exc.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING):
                self._crew.acknowledge()
                return None
            raise RankFailed(f"process {self.me}: MPI cannot agree: {exc}") from exc
        except BaseException:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((request, value)))  # MPI may still write there
            raise
        return int(value[0])

    # Watching the others ----------------------------------------------------------------------------

    def _wait(self, done: Callable[[], bool], limit_s: float = float("inf")) -> None:
        start_s = time.monotonic()
        while not done():
            self._keep_watch()
            if time.monotonic() - start_s > limit_s:
                raise RankFailed(
                    f"process {self.me}: the processes have come, but did not agree in {limit_s:.3g} s"
                )
            time.sleep(NAP_S)

    def _patience_s(self) -> float:
        """How long a wait at an assembly may take: longer than it takes to kill those that do not come."""
        return 3 * self.timeout_s + 10

    def _keep_watch(self) -> None:
        """What a process does while it waits at an assembly: tell that it does, and watch the others."""
        crew, now = self._crew, time.monotonic()
        if crew.failed() - crew.dead:
            crew.acknowledge()  # else nothing is heard
        if now - self._beat_s > BEAT_S:
            self._beat_s = now
            crew.say(self._kind, self._cause)
        if failure := crew.failure():
            crew.over = True
            raise CommAborted(f"process {self.me} ends: {failure}")
        self._fence_off_the_silent(now)

    def _fence_off_the_silent(self, now: float) -> None:
        """Kill those that are seen from here and do not come, or have come and say nothing more."""
        if now - self._called_s < self.timeout_s:
            return
        silent = {}
        for process in self._crew.living():
            said = self._crew.waits(process)
            since_s = max(self._called_s, said[1] if said is not None else 0.0)
            if now - since_s > self.timeout_s:
                silent[process] = now - since_s
        for process, silent_s in silent.items():
            self._fence_off(process, silent_s, silent)

    def _fence_off(self, process: int, silent_s: float, silent: Iterable[int]) -> None:
        """Kill a process that is seen from here; raise if no process can, or if that was of no use."""
        card = self._cards.get(process)
        who = f"process {process} ({self._crew.places[process]}) has not answered for {silent_s:.3g} s"
        if card is None or self.me not in self._cards:
            return  # it has not come to the first meeting: `start_fleet` says so, and ends the job
        if card.process.is_visible() and process not in self._killed:
            state = card.process.state()
            stopped = ", being stopped" if state == "stopped" else ""
            self._killed[process] = f"did not answer for {silent_s:.3g} s{stopped}, and was killed"
            if not card.process.kill() and state != "ended":
                raise RankFailed(f"process {self.me}: {who}, and it cannot be killed")
            _log.warning("%s; it was killed", who)
        neighbours = [
            each for each in (self.me, *self._crew.living()) if each not in silent and each in self._cards
        ]
        if not any(self._cards[each].process.namespace == card.process.namespace for each in neighbours):
            where = "on its host, and in its container,"
            raise RankFailed(f"process {self.me}: {who}, and no process of the job {where} can kill it")
        if silent_s > 2 * self.timeout_s + 10:
            raise RankFailed(f"process {self.me}: {who}, and MPI does not notice that it was killed")

    # Communicators ----------------------------------------------------------------------------------

    def connect(self, members: Sequence[int], *, control: bool = False) -> Communicator:
        """See `Fleet.connect`."""
        numbers = list(members)
        self._crew.needed = set(numbers)
        transport = ChannelTransport(
            self._crew, numbers, self._new_channel(numbers), timeout_s=self.timeout_s, with_window=not control
        )
        hosts = [self._cards[each].host for each in numbers]
        comm = open_world(transport, hosts, gpu="none" if control else "auto")
        self._comms.append(comm)
        return comm

    def _new_channel(self, members: list[int]) -> int:
        """The channel that the first of these processes hands out. Collective among them."""
        control = self._control
        if control is None:
            raise CommMismatch("connect: there was no meeting before")
        if (
            self.me not in members
            or len(set(members)) != len(members)
            or not set(members) <= set(control.members)
        ):
            raise CommMismatch(
                f"connect: members are {members}, expected different ones of {control.members}, process "
                f"{self.me} among them"
            )
        ranks, offer = [control.members.index(each) for each in members], np.array([0, *members], np.int64)
        if self.me == members[0]:
            offer[0] = self._crew.new_channel()
            control.exchange([(rank, offer) for rank in ranks[1:]], [])
        else:
            control.exchange([], [(ranks[0], offer)])
            if offer[1:].tolist() != members:
                raise CommMismatch(
                    f"connect: process {self.me} connects {members}, but process {members[0]} connects "
                    f"{offer[1:].tolist()}"
                )
        return int(offer[0])

    # Newcomers --------------------------------------------------------------------------------------

    def recruit(self, count: int) -> None:
        """See `Fleet.recruit`."""
        if not self.recruits:
            raise UnsupportedError(
                "this MPI starts no processes beside threads that call it; start spares with the job: bagua run "
                "--spares 1"
            )
        lost = sum(process >= self._started for process in self._crew.dead)
        if lost < MOST_LOST:
            namespaces = {self._cards[each].process.namespace for each in (self.me, *self._crew.living())}
            self._recruiter.start(count, here=len(namespaces) == 1 and sees_starter("PMIX_NAMESPACE"))
        else:
            _log.warning("%d newcomers have died; no more are started", lost)

    def recruits_wait(self) -> bool:
        """See `Fleet.recruits_wait`."""
        return self._recruiter.ready() is not None

    def _let_in(self, bringer: int, newcomers: Sequence[Recruit]) -> None:
        """Go on with newcomers, or without them, if that fails; the same on all. Collective."""
        crew = self._crew
        group = self._recruiter.take() if bringer == self.me else None
        made: tuple[MPI.Intracomm, list[int]] | None = None
        with suppress(CommError, MPI.Exception):
            made = recruits.let_in(crew.comm, group, crew.rank_of(bringer))
        while (agreed := self._agree(made is not None)) is None:
            pass  # another one has died; what was made is as good
        if not agreed or made is None:
            _log.warning("newcomers could not be let in; training goes on without them")
            if group is not None:
                group.give_up()
            return
        comm, ranks = made
        numbers = recruits.numbered(crew.numbers, ranks, crew.size, len(newcomers))
        crew.move(comm, numbers)
        set_abort_group(comm)
        self._round = 0
        for number, each in zip(numbers[-len(newcomers) :], newcomers, strict=True):
            self._cards[number] = _Card(MEET, *each, ())
            crew.places[number] = _place(each)
        if group is not None:
            group.tell(Welcome(numbers, self.wanted, crew.meetings, self._started))
