"""The loop of elastic training: hold a rendezvous, choose the trainers, restore the state, train."""

from __future__ import annotations

import gc
import logging
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
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
    causes,
    shown,
)
from ..launch.cli import count
from ..live import writer as live
from ..logs import log_on_root
from . import start
from .changes import Change, describe_dead
from .fleet import Death, Fleet, Process, Rendezvous
from .roles import choose_trainers
from .session import Session
from .snapshot.restore import INITIAL, newest
from .snapshot.shards import LostStateError
from .snapshot.snapshots import Snapshot, SnapshotInfo
from .state import State, internals_of

T = TypeVar("T")

_log = logging.getLogger(__name__)

RECOVERABLE = (RankFailed, CommAborted, CommTimeout)
"""Errors that start a rendezvous. Every other error propagates, unless a rank has died as well."""

_NOTICE_S = 1.0
"""How long an error of the program waits for notice of a death, of which it may be a consequence."""


class Report(NamedTuple):
    """The report of one process to all others after a rendezvous."""

    snapshots: list[SnapshotInfo]
    run: str
    """A unique id for the next run of training, which is used if this process is its rank 0."""
    trainers: tuple[Process, ...]
    """The previous trainers, by rank; empty if this process does not know them."""
    entered: int
    """How many times trainers were chosen, as far as this process knows."""
    trained: bool
    """Whether the user's function was called on this process."""
    finished: bool
    """Whether it has returned on this process."""
    first: tuple[int, ...] = ()
    """The first trainers of the job, if this process took part in the first rendezvous."""


class _FatalError(Exception):
    """Training cannot continue, because of `error`, which is the same on all living processes."""

    def __init__(self, error: BaguaError) -> None:
        super().__init__(str(error))
        self.error = error


class _Outcome(NamedTuple):
    """The result of one round of the loop."""

    finished: bool
    """Whether this process is finished with training."""
    result: object = None


def run(
    state: State,
    *,
    min_ranks: int = 1,
    timeout_s: float = TIMEOUT_S,
    fleet: Fleet | None = None,
    op_order: OpOrder = "rank",
) -> Callable[[Callable[[Communicator], T]], T | None]:
    """Train, and continue with the remaining ranks when some die.

    Used as a decorator, it runs the function at once, and replaces it by its result:

        @elastic.run(state, min_ranks=2)
        def train(comm):
            ...

    The function is called with the communicator of the ranks that train. When one of them dies, does not answer
    in time, or is aborted, the calls of the others raise; do not catch these errors. An error of gloo, a store or
    a socket counts as well, if a death is noticed within a second. All living processes then hold a rendezvous,
    spares replace the dead, all trainers receive the state of the last commit, and the function is called again
    with a new communicator. Objects that depend on the previous communicator cannot be used any more: create
    engines and wrappers in the function.

    At the start all ranks receive the state of rank 0. Make no collective calls before; `run` connects. Until the
    end, the garbage collector skips objects of before (`gc.freeze`), so that a recovery is shorter.

    Args:
        state: The state that is committed and restored.
        min_ranks: With fewer ranks than this, training ends with `RankFailed` on all living processes. The larger
            of this and `bagua run --min-ranks` applies.
        timeout_s: How long a call may wait for its peers, and how long a process may be late before it is
            counted as dead, in seconds.
        fleet: The processes; by default those that were started with this one.
        op_order: The order in which the communicators of training reduce; see `Communicator.op_order`. A fleet
            that survives deaths has its own reductions, in the order of the ranks.

    Returns:
        A decorator, which returns the result of the function on this process, or None on a process that never
        trained.

    Raises:
        ArrayError: `state` is not a `State`, `op_order` is unknown, or `min_ranks` is more than there are ranks;
            on all ranks.
        BootstrapError: A communicator is open already.
        RankFailed: Too few ranks are left, or no snapshot of the state; the message names the dead processes.
    """
    if not isinstance(state, State):
        raise ArrayError(f"elastic.run: state is {shown(state)}, expected an elastic.State")
    if type(min_ranks) is not int or min_ranks < 1:
        raise ArrayError(f"elastic.run: min_ranks is {shown(min_ranks)}, expected an integer of at least 1")
    if op_order not in get_args(OpOrder):
        raise ArrayError(f"elastic.run: op_order is {shown(op_order)}, expected one of {get_args(OpOrder)}")
    if internals_of(state).session is not None:
        raise ArrayError("elastic.run: this state is being trained already; end that training first")

    def decorator(train: Callable[[Communicator], T]) -> T | None:
        if not callable(train):
            raise ArrayError(f"elastic.run: it decorates {shown(train)}, expected a function of a communicator")
        if fleet is None and current() is not None:
            raise BootstrapError(
                "elastic.run: a communicator is open already, which cannot go on when a rank dies; close it, and "
                "call nothing collective before elastic.run: it connects"
            )
        with nullcontext() if fleet is not None or gc.get_freeze_count() else _frozen():
            processes = start.start(timeout_s) if fleet is None else fleet
            result: T | None = _Loop(state, processes, min_ranks, op_order).run(train)
            return result

    return decorator


_last: list[State] = []
"""The state of the last training that was started in this process."""


def history() -> list[Change]:
    """The changes of the ranks in the last training started in this process, the oldest first; see `Change`."""
    return _last[-1].history if _last else []


@dataclass
class _Failure:
    """Why and when this process starts or joins a rendezvous."""

    error: CommError | None
    time_s: float = field(default_factory=time.time)
    noticed_s: float = field(default_factory=time.monotonic)
    """The same by a clock that cannot be set."""


class _Loop:
    def __init__(self, state: State, fleet: Fleet, min_ranks: int, op_order: OpOrder) -> None:
        self._state, self._fleet, self._op_order = state, fleet, op_order
        job = current_job()
        self._job = replace(job, folder=job.folder or fleet.folder)
        self._min_ranks = max(min_ranks, job.min_ranks or 1)
        self._session = Session(state, fleet.me, self._job)
        self._trainers: tuple[Process, ...] = ()
        self._entered = 0
        self._dead: list[Death] = []
        """Deaths since training was entered last."""
        self._first: tuple[int, ...] = ()
        """The first trainers of the job, known before any of them can have trained."""
        self._trained = self._finished = False
        self._unchanged = INITIAL
        """The number of the last commit, if it has the initial state."""
        self._result: object = None

    def run(self, train: Callable[[Communicator], object]) -> Any:
        internals = internals_of(self._state)
        internals.session = self._session
        _last[:] = [self._state]
        try:
            failure: _Failure | None = None
            while True:
                try:
                    outcome = self._round(train, failure)
                except RECOVERABLE as exc:
                    failure = _Failure(_without_frames(exc))
                    self._session.leave()
                else:
                    if outcome.finished:
                        self._session.close()
                        return outcome.result
                    failure = _Failure(None)
        except _FatalError as exc:
            raise exc.error from None
        except BaseException as exc:
            self._fleet.fail(f"{type(exc).__name__}: {exc}")
            raise
        finally:
            self._session.leave()
            self._session.write_records()
            internals.session = None

    def _round(self, train: Callable[[Communicator], object], failure: _Failure | None) -> _Outcome:
        """Hold a rendezvous, choose the trainers, restore the state, and train or stand by."""
        fleet = self._fleet
        rendezvous = self._rendezvous(failure)
        # The first one has all that training needs, so that spares have initialized it once.
        numbers = [process.number for process in rendezvous.alive]
        if rendezvous.number == 1:
            self._first = tuple(choose_trainers(numbers, [], fleet.wanted))
        everyone = fleet.connect(numbers, control=rendezvous.number > 1)
        self._session.defer_records(everyone)
        snapshots = self._session.snapshots()
        infos = [each.info for each in snapshots]
        facts = self._trainers, self._entered, self._trained, self._finished, self._first
        report = Report(infos, secrets.token_hex(8), *facts)
        rows = everyone.allgather_object(report)
        known = max(rows, key=lambda row: row.entered)
        pairs = zip(rows, rendezvous.alive, strict=True)
        finished = [row.finished for row, process in pairs if process in known.trainers]
        if finished and all(finished):
            fleet.end()
            return _Outcome(finished=True, result=self._result)
        trainers = self._choose(rendezvous, known)
        commit = self._restore(everyone, rendezvous, rows, known, trainers, snapshots)
        del snapshots  # those of dead processes would keep their memory and descriptors while this one trains
        newest_version = max((each.version for row in rows for each in row.snapshots), default=INITIAL)
        everyone.close()
        before, self._trainers, self._entered = known.trainers, trainers, known.entered + 1
        training = [process.number for process in trainers]
        if fleet.me not in training:
            self._dead = []
            live.note("standing by")
            return _Outcome(finished=not fleet.stand_by(training))
        comm = fleet.connect(training)
        comm.op_order = self._op_order
        self._session.defer_records(comm)
        if known.entered:
            gc.collect()  # communicators of before hold descriptors and shared memory, in cycles of references
            self._report_change(comm, rendezvous, failure, before, commit)
        elif commit != INITIAL:
            _report_restart(comm, commit)
        self._dead = []
        run = rows[rendezvous.alive.index(trainers[0])].run
        hosts = [process.host for process in trainers]
        if commit in (INITIAL, self._unchanged):
            self._unchanged = newest_version + 1
        self._session.enter(comm, hosts, run, newest_version + 1, living=numbers)
        return self._train(train, comm)

    def _rendezvous(self, failure: _Failure | None) -> Rendezvous:
        live.note("rendezvous")
        try:
            rendezvous = self._fleet.rendezvous(None if failure is None else failure.error)
        except CommError as exc:
            raise _FatalError(exc) from exc
        self._dead += rendezvous.dead
        for death in rendezvous.dead:
            facts = {"dead": asdict(death.process), "reason": death.reason, "meeting": rendezvous.number}
            self._job.record("death", **facts)
        return rendezvous

    def _choose(self, rendezvous: Rendezvous, known: Report) -> tuple[Process, ...]:
        """The next trainers, by rank; raises if they are too few."""
        by_number = {process.number: process for process in rendezvous.alive}
        before = [process.number for process in known.trainers]
        chosen = choose_trainers(list(by_number), before, self._fleet.wanted)
        trainers = tuple(by_number[number] for number in chosen)
        if len(trainers) >= self._min_ranks:
            return trainers
        if not known.entered and not self._dead:
            only = f"but only {count(len(trainers), 'rank')} can train"
            text = f"elastic.run: min_ranks is {self._min_ranks}, {only}"
            raise self._fatal(ArrayError(text))
        raise self._fatal(
            RankFailed(
                f"{count(len(trainers), 'rank')} {'is' if len(trainers) == 1 else 'are'} left, "
                f"and min_ranks is {self._min_ranks}; dead: {describe_dead(self._dead)}",
                [rank for rank, process in enumerate(known.trainers) if process.number not in by_number],
            )
        )

    def _fatal(self, error: BaguaError) -> _FatalError:
        self._fleet.end()
        return _FatalError(error)

    def _restore(
        self,
        everyone: Communicator,
        rendezvous: Rendezvous,
        rows: Sequence[Report],
        known: Report,
        trainers: Sequence[Process],
        snapshots: Sequence[Snapshot],
    ) -> int:
        """Give the newest commit to the trainers; returns its number. `snapshots` are those of this process."""
        ranks = [rendezvous.alive.index(process) for process in trainers]
        hosts = [process.host for process in rendezvous.alive]
        sources = newest([row.snapshots for row in rows])
        if sources is None:
            root, problem = ranks[0], None
            numbers = [process.number for process in rendezvous.alive]
            # A spare that is still in the first rendezvous does not know yet that others train.
            before = tuple(each.number for each in known.trainers) or max(row.first for row in rows)
            are_lost = bool(before) and not set(before) & set(numbers)
            if known.entered > 1:
                # The last holders of a commit died after it was restored, and before the next commit.
                restored = [
                    rank
                    for rank in ranks
                    if rendezvous.alive[rank] in known.trainers and rows[rank].entered == known.entered
                ]
                are_lost, root = not restored, next(iter(restored), root)
            if are_lost or any(row.trained for row in rows):
                raise self._fatal(
                    RankFailed(
                        f"no snapshot of the state is left; dead: {describe_dead(self._dead)}; start again, "
                        "from a checkpoint if there is one"
                    )
                )
            if known.entered > 1:
                _log.warning(
                    "no snapshot of the state is left; training continues from the state that process %d has "
                    "restored, and the private state of ranks that have died is lost",
                    rendezvous.alive[root].number,
                )
            if everyone.rank == root:
                problem = self._session.hold_initial(rows[root].run)
                snapshots = self._session.snapshots()  # others do not read: they might find it half written
            held = everyone.allgather_object((problem, [each.info for each in snapshots]))
            if (problem := held[root][0]) is not None:
                name = f"process {rendezvous.alive[root].number}"
                raise self._fatal(ArrayError(f"elastic.run: {name} cannot keep the initial state: {problem}"))
            sources = newest([infos for _, infos in held])
            assert sources is not None
        try:
            with everyone.tracer.span("restore", commit=sources.version):
                self._session.restore(everyone, sources, snapshots, ranks, hosts)
        except LostStateError as exc:
            text = f"nothing is left of {exc}; dead: {describe_dead(self._dead)}; start again"
            text += ", from a checkpoint if there is one"
            raise self._fatal(RankFailed(text, sources.missing)) from None
        return sources.version

    def _report_change(
        self,
        comm: Communicator,
        rendezvous: Rendezvous,
        failure: _Failure | None,
        before: tuple[Process, ...],
        commit: int,
    ) -> None:
        """Add a change of the ranks to the history, and call the callbacks."""
        failure = failure or _Failure(None)
        error = failure.error
        change = Change(
            number=rendezvous.number,
            time_s=failure.time_s,
            cause="joined a rendezvous" if error is None else f"{type(error).__name__}: {error}",
            dead=tuple(self._dead),
            before=before,
            after=self._trainers,
            commit=commit,
        )
        internals = internals_of(self._state)
        internals.history.append(change)
        internals.noticed_s = failure.noticed_s
        log_on_root(_log, comm.rank, "ranks have changed: %s", change)
        if commit in (INITIAL, self._unchanged) and change.dead and comm.rank == 0:
            _log.warning(
                "no step had been committed: training starts again from its initial state; a call of "
                "state.commit() keeps the steps until then"
            )
        for callback in internals.callbacks:
            callback(change)

    def _failure_within(self, comm: Communicator, wait_s: float) -> CommError | None:
        """The error of a death, or of a rendezvous, that is noticed within `wait_s`; None if there is none.

        The first sign of a death may be an error of another library, such as that of a store or a socket.
        """
        end_s = time.monotonic() + wait_s
        while (failure := self._fleet.failure(comm)) is None and time.monotonic() < end_s:
            time.sleep(wait_s / 100)
        return failure if isinstance(failure, RECOVERABLE) else None

    def _train(self, train: Callable[[Communicator], object], comm: Communicator) -> _Outcome:
        self._trained, self._finished = True, False
        live.note("training")
        try:
            self._result = train(comm)
        except RECOVERABLE:
            raise
        except BaseException as exc:
            if _may_follow(exc) and (failure := self._failure_within(comm, _NOTICE_S)) is not None:
                _log.warning("%s: %s is taken for a consequence: %s", type(exc).__name__, exc, failure)
                raise failure from exc
            comm.__exit__(type(exc), exc, exc.__traceback__)  # the others need not wait for this rank
            raise
        self._finished = True
        comm.barrier()  # until all have returned, any of them may have to train again
        self._job.record("trained")
        self._session.note_recovery()
        with suppress(CommError):
            comm.close()
        self._fleet.end()
        return _Outcome(finished=True, result=self._result)


def _may_follow(exc: BaseException) -> bool:
    """Whether an error may be the consequence of a death, as those of gloo, stores and sockets may.

    Other errors are those of the program: all ranks raise them, and the first one that ends has not died.
    """
    of_library = isinstance(exc, BaguaError) and not isinstance(exc, BootstrapError)
    return isinstance(exc, (RuntimeError, ConnectionError, TimeoutError, BootstrapError)) and not of_library


@contextmanager
def _frozen() -> Iterator[None]:
    """Let collections in a `with` block skip the objects of before: those of imports take 0.3 s after a death."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _report_restart(comm: Communicator, commit: int) -> None:
    """Say that training continues from memory, after all processes of the job were started again.

    It is logged like all decisions; where nobody reads the log, the first rank prints it beside what the launcher
    prints on the restart.
    """
    text = f"training continues from commit {commit}, which is left in memory, on {comm.size} ranks"
    log_on_root(_log, comm.rank, "%s", text)
    if comm.rank == 0 and not _log.isEnabledFor(logging.INFO):
        print(f"elastic.run: {text}", file=sys.stderr, flush=True)


def _without_frames(exc: CommError) -> CommError:
    """The error without its tracebacks, which would keep the objects of training alive."""
    for error in causes(exc):
        error.__traceback__ = None
    return exc
