"""The loop around training: meet, agree on who trains, bring the state back, train; and again after a death."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeVar, get_args

from ..arrays import OpOrder
from ..bootstrap import current
from ..bootstrap.connection import TIMEOUT_S
from ..bootstrap.environment import job as current_job
from ..comm import Communicator
from ..errors import (
    ArrayError,
    BaguaError,
    BootstrapError,
    CommAborted,
    CommError,
    CommTimeout,
    RankFailed,
    UnsupportedError,
    shown,
)
from ..logs import log_on_root
from . import start
from .changes import Change, History, names_of
from .fleet import Death, Fleet, Meeting, Process
from .roles import choose
from .session import FIRST, Session
from .snapshot.restore import newest
from .snapshot.snapshots import Copy, Held
from .state import State

T = TypeVar("T")

_log = logging.getLogger(__name__)

RECOVERABLE = (RankFailed, CommAborted, CommTimeout)
"""Errors after which the living meet. Every other error is the program's own, and passes."""


class Report(NamedTuple):
    """What a process tells the others at a meeting."""

    held: list[Held]
    run: str
    """A name that nothing else has: that of the next run of training, if this process is its rank 0."""
    members: tuple[Process, ...]
    """Who trained last, by rank; empty if this process does not know."""
    entered: int
    """How many times ranks were chosen, as far as this process knows."""
    trained: bool
    """Whether the function was called here."""
    finished: bool
    """Whether it has returned here."""


class _GivenUpError(Exception):
    """Training cannot go on; `error` says why, the same on all who are left."""

    def __init__(self, error: BaguaError) -> None:
        super().__init__(str(error))
        self.error = error


class _Outcome(NamedTuple):
    """What came of one meeting."""

    over: bool
    """Whether this process is through."""
    result: Any = None


def run(
    state: State,
    *,
    min_ranks: int = 1,
    regrow: bool = False,
    timeout_s: float = TIMEOUT_S,
    fleet: Fleet | None = None,
    op_order: OpOrder = "rank",
) -> Callable[[Callable[[Communicator], T]], T | None]:
    """Train with the ranks that there are, and go on with those that are left when some die.

    Used as a decorator, it runs the function at once, and its name stands for what the function has returned:

        @elastic.run(state, min_ranks=2)
        def train(comm):
            ...

    The function is called with the communicator of the ranks that train. When one of them dies, does not answer
    in time, or is aborted, the calls of the others raise; let these errors pass. All who live meet then, those
    that stood by take the places of the dead, everybody gets the state of the last commit, and the function is
    called again with a new communicator. What it made from the last one is given up: make engines and wrappers
    in it.

    At the start everybody gets the state of rank 0. Call nothing collective before; `run` connects.

    Args:
        state: What is brought back.
        min_ranks: With fewer ranks than this training ends, with `RankFailed` on all that are left. The larger
            one of this and `bagua run --min-ranks` counts.
        regrow: Start processes in the place of those that died, and let them in at a later commit.
        timeout_s: How long a call may wait for its peers, and how long a process that is needed may stay away
            before it is taken for dead, in seconds.
        fleet: The processes; by default those that were started with this one.
        op_order: The order in which the communicators of training reduce; see `Communicator.op_order`. A fleet
            that survives deaths has its own reductions, in the order of the ranks.

    Returns:
        A decorator. What it returns is what the function returned on this process; None if this process stood by
        until the end.

    Raises:
        ArrayError: `state` is not a `State`, `op_order` is unknown, or `min_ranks` is more than there are ranks;
            on all ranks alike.
        BootstrapError: A communicator is open already.
        UnsupportedError: `regrow` is asked for, and this fleet cannot start processes; on all ranks alike.
        RankFailed: Too few ranks are left, or nobody is left who knows the state; the message names the dead.
    """
    if not isinstance(state, State):
        raise ArrayError(f"elastic.run: state is {shown(state)}, expected an elastic.State")
    if type(min_ranks) is not int or min_ranks < 1:
        raise ArrayError(f"elastic.run: min_ranks is {shown(min_ranks)}, expected an integer of at least 1")
    if op_order not in get_args(OpOrder):
        raise ArrayError(f"elastic.run: op_order is {shown(op_order)}, expected one of {get_args(OpOrder)}")
    if state.__dict__["_session"] is not None:
        raise ArrayError("elastic.run: this state is being trained already; end that training first")

    def decorator(train: Callable[[Communicator], T]) -> T | None:
        if not callable(train):
            raise ArrayError(f"elastic.run: it decorates {shown(train)}, expected a function of a communicator")
        if fleet is None and current() is not None:
            raise BootstrapError(
                "elastic.run: a communicator is open already, which cannot go on when a rank dies; close it, and "
                "call nothing collective before elastic.run: it connects"
            )
        processes = start.start(timeout_s) if fleet is None else fleet
        if regrow and not processes.recruits:
            raise UnsupportedError(
                "elastic.run: regrow=True, but processes cannot be started in the place of dead ones here; start "
                "spares with the job, bagua run --spares 1, which take the places at once"
            )
        result: T | None = _Loop(state, processes, min_ranks, regrow, op_order).run(train)
        return result

    return decorator


_last: list[State] = []
"""The state of the training that was begun last in this process."""


def history() -> list[Change]:
    """The changes of the ranks in the training begun last in this process, the oldest first; see `Change`."""
    return _last[-1].history if _last else []


@dataclass
class _Failure:
    """Why this process goes to a meeting, and since when."""

    error: CommError | None
    time_s: float


class _Loop:
    def __init__(self, state: State, fleet: Fleet, min_ranks: int, regrow: bool, op_order: OpOrder) -> None:
        self._state, self._fleet = state, fleet
        self._regrow, self._op_order = regrow, op_order
        more = self._fleet.recruits_wait if regrow else None
        job = current_job()
        self._job = replace(job, folder=job.folder or fleet.folder)
        self._min_ranks = max(min_ranks, job.min_ranks or 1)
        self._session = Session(state, fleet.me, self._job, more)
        self._history: History = state.__dict__["_history"]
        self._members: tuple[Process, ...] = ()
        self._entered = 0
        self._dead: list[Death] = []
        """Who has died since training was entered last."""
        self._trained = self._finished = False
        self._result: Any = None

    def run(self, train: Callable[[Communicator], Any]) -> Any:
        own = self._state.__dict__
        own["_session"] = self._session
        _last[:] = [self._state]
        try:
            failure: _Failure | None = None
            while True:
                try:
                    outcome = self._once(train, failure)
                except RECOVERABLE as exc:
                    failure = _Failure(_without_frames(exc), time.time())
                    self._session.leave()
                else:
                    if outcome.over:
                        self._session.close()
                        return outcome.result
                    failure = _Failure(None, time.time())
        except _GivenUpError as exc:
            raise exc.error from None
        except BaseException as exc:
            self._fleet.fail(f"{type(exc).__name__}: {exc}")
            raise
        finally:
            self._session.leave()
            self._session.settle()
            own["_session"] = None

    def _once(self, train: Callable[[Communicator], Any], failure: _Failure | None) -> _Outcome:
        """From one meeting to the next."""
        fleet = self._fleet
        meeting = self._meet(failure)
        # The first communicator of all has what training needs, so that those who stand by have once made it.
        numbers = [process.number for process in meeting.alive]
        everyone = fleet.connect(numbers, control=meeting.number > 1)
        self._session.record_later(everyone)
        copies = self._session.copies()
        held = [copy.held for copy in copies]
        report = Report(held, secrets.token_hex(8), self._members, self._entered, self._trained, self._finished)
        rows = everyone.allgather_object(report)
        known = max(rows, key=lambda row: row.entered)
        pairs = zip(rows, meeting.alive, strict=True)
        finished = [row.finished for row, process in pairs if process in known.members]
        if finished and all(finished):
            fleet.end()
            return _Outcome(over=True, result=self._result)
        members = self._choose(meeting, known)
        commit = self._restore(everyone, meeting, rows, known, members, copies)
        newest_held = max((each.version for row in rows for each in row.held), default=FIRST)
        everyone.close()
        before, self._members, self._entered = known.members, members, known.entered + 1
        if self._regrow and len(members) < fleet.wanted and fleet.me == meeting.alive[0].number:
            fleet.recruit(fleet.wanted - len(members))
        training = [process.number for process in members]
        if fleet.me not in training:
            self._dead = []
            return _Outcome(over=not fleet.stand_by(training))
        comm = fleet.connect(training)
        comm.op_order = self._op_order
        self._session.record_later(comm)
        if known.entered:
            self._changed(comm, meeting, failure, before, commit)
        self._dead = []
        run = rows[meeting.alive.index(members[0])].run
        self._session.enter(comm, [process.host for process in members], run, newest_held + 1)
        return self._train(train, comm)

    def _meet(self, failure: _Failure | None) -> Meeting:
        try:
            meeting = self._fleet.meet(None if failure is None else failure.error)
        except CommError as exc:
            raise _GivenUpError(exc) from exc
        self._dead += meeting.dead
        for death in meeting.dead:
            self._job.record("death", dead=asdict(death.process), reason=death.reason, meeting=meeting.number)
        return meeting

    def _choose(self, meeting: Meeting, known: Report) -> tuple[Process, ...]:
        """Who trains next, by rank; raises where they are too few."""
        by_number = {process.number: process for process in meeting.alive}
        before = [process.number for process in known.members]
        members = tuple(by_number[number] for number in choose(list(by_number), before, self._fleet.wanted))
        if len(members) >= self._min_ranks:
            return members
        if not known.entered and not self._dead:
            raise self._given_up(
                ArrayError(
                    f"elastic.run: min_ranks is {self._min_ranks}, but only {len(members)} ranks can train"
                )
            )
        raise self._given_up(
            RankFailed(
                f"{len(members)} ranks are left, and min_ranks is {self._min_ranks}; "
                f"dead: {names_of(self._dead)}",
                [rank for rank, process in enumerate(known.members) if process.number not in by_number],
            )
        )

    def _given_up(self, error: BaguaError) -> _GivenUpError:
        self._fleet.end()
        return _GivenUpError(error)

    def _restore(
        self,
        everyone: Communicator,
        meeting: Meeting,
        rows: Sequence[Report],
        known: Report,
        members: Sequence[Process],
        copies: Sequence[Copy],
    ) -> int:
        """Bring the newest commit to those who train; returns its number. `copies` are those of this process."""
        places = [meeting.alive.index(process) for process in members]
        hosts = [process.host for process in meeting.alive]
        held = [row.held for row in rows]
        sources = newest(held)
        if sources is None:
            left = [process for process in meeting.alive if process in known.members]
            if any(row.trained for row in rows) or (known.entered and not left):
                raise self._given_up(
                    RankFailed(
                        f"nobody who is left knows the state; dead: {names_of(self._dead)}; start again, from a "
                        "checkpoint if there is one"
                    )
                )
            problem = None
            if everyone.rank == places[0]:
                problem = self._session.offer_first(rows[places[0]].run)
            copies = self._session.copies()
            told = everyone.allgather_object((problem, [copy.held for copy in copies]))
            if (problem := told[places[0]][0]) is not None:
                who = f"process {meeting.alive[places[0]].number}"
                raise self._given_up(
                    ArrayError(f"elastic.run: {who} cannot keep the state to begin with: {problem}")
                )
            sources = newest([held for _, held in told])
            assert sources is not None
        with everyone.tracer.span("restore", commit=sources.version):
            self._session.restore(everyone, sources, copies, places, hosts)
        return sources.version

    def _changed(
        self,
        comm: Communicator,
        meeting: Meeting,
        failure: _Failure | None,
        before: tuple[Process, ...],
        commit: int,
    ) -> None:
        """Note a change of the ranks, and tell the user's functions."""
        error = failure.error if failure is not None else None
        change = Change(
            number=meeting.number,
            time_s=time.time() if failure is None else failure.time_s,
            cause="called to a meeting" if error is None else f"{type(error).__name__}: {error}",
            dead=tuple(self._dead),
            before=before,
            after=self._members,
            commit=commit,
        )
        self._history.add(change)
        log_on_root(_log, comm.rank, "ranks have changed: %s", change)
        for callback in self._state.__dict__["_callbacks"]:
            callback(change)

    def _train(self, train: Callable[[Communicator], Any], comm: Communicator) -> _Outcome:
        self._trained, self._finished = True, False
        try:
            self._result = train(comm)
        except RECOVERABLE:
            raise
        except BaseException as exc:
            comm.__exit__(type(exc), exc, exc.__traceback__)  # the others need not wait for this rank
            raise
        self._finished = True
        comm.barrier()  # until all have returned, any of them may be needed again
        self._job.record("trained")
        self._session.note_recovery()
        with suppress(CommError):
            comm.close()
        self._fleet.end()
        return _Outcome(over=True, result=self._result)


def _without_frames(exc: CommError) -> CommError:
    """The error without the frames that it came through: they hold what training has made."""
    waiting: list[BaseException | None] = [exc]
    seen: set[int] = set()
    while waiting:
        error = waiting.pop()
        if error is not None and id(error) not in seen:  # causes and contexts may go round in a circle
            seen.add(id(error))
            error.__traceback__ = None
            waiting += [error.__cause__, error.__context__]
    return exc
