"""The engine: runs an algorithm over buckets, on a lane, in step with training.

Buckets leave in the order of the plan on every rank, in whatever order they became ready, so that the calls of
all ranks match. The engine owns a duplicate of the communicator and the lane that uses it.

On device arrays everything here is in the order of CuPy's current stream: a bucket that leaves holds what the
caller enqueued before `ready`, and what the caller enqueues after `at(BACKWARD)` finds the average there.
"""

from __future__ import annotations

import difflib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np

from . import arrays
from .algorithms.base import (
    Algorithm,
    Payload,
    Point,
    State,
    check_algorithm_argument,
    check_size,
    complete,
    phase_of,
    phases_of,
    runs_in_rounds,
)
from .algorithms.checkpoints import (
    Facts,
    Saved,
    check_movable,
    check_tensors,
    check_together,
    checksum,
    facts_of,
    load_state,
    rules_of,
    save_state,
)
from .arrays import Array
from .bucket import Bucket, Plan, make_buckets
from .codecs.base import codecs_in
from .comm import Communicator
from .errors import ArrayError, CommMismatch
from .lane import Lane, StreamLane, ThreadLane
from .logs import megabytes, tell
from .pace import Exchanges, Pace, pace_of
from .pickling import Live
from .trace import Counter, ExchangeCounters, Tracer

__all__ = ["Engine", "Lane", "StreamLane", "ThreadLane"]

Storage: TypeAlias = Sequence[Array] | Mapping[Payload, Sequence[Array]]
"""Memory of the buckets: one flat array for each; by payload, if an algorithm exchanges gradients and weights in
turn."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Wrapper(Protocol):
    """What trains by an engine, as `bagua_torch.DistributedDataParallel` does."""

    def complete(self) -> None:
        """End a step in which the optimizer did not step. Collective."""

    def detach(self) -> None:
        """Leave what it trains to itself; the other ranks hear nothing of it."""


class Engine(Live):
    """Exchanges the buckets of a plan by an algorithm.

    Collective. All ranks give the same plan and algorithm; they are compared. On every rank and in every step,
    call `ready` when a tensor is complete, and `at` when training reaches a point (`FORWARD`, `BACKWARD`,
    `STEP`). Close the engine, or use it as a context manager.

    Args:
        comm: The ranks. The engine works on a duplicate of it.
        algorithm: What to exchange, when and how.
        plan: Which tensors travel together.
        storage: The memory of the buckets, gradients or weights as the algorithm's `payload` says: one flat
            array each. For an algorithm that exchanges both in turn, {"grad": [...], "weight": [...]}. The
            engine keeps views of it.
        tracer: Where spans go; the communicator's by default.

    Raises:
        ArrayError: `storage` does not fit the plan or the algorithm, or the algorithm does not support this
            number of ranks.
        CommMismatch: The ranks' plans or algorithms differ.
        UnsupportedError: The algorithm cannot exchange the dtype of a tensor; the message names the tensor.
    """

    def __init__(
        self,
        comm: Communicator,
        algorithm: Algorithm,
        plan: Plan,
        storage: Storage,
        *,
        tracer: Tracer | None = None,
    ) -> None:
        check_algorithm_argument("Engine", "algorithm", algorithm)
        check_fit(algorithm, plan, comm.size)
        self.algorithm, self.plan = algorithm, plan
        self._buckets = self._buckets_over(plan, storage)
        self._training = ""
        """Random, and the same on all ranks: it tells which states were saved together."""
        self._compare(comm)
        self._tracer = tracer or comm.tracer
        self._lane = comm.lane(self._lane_kind(comm))
        self._lane.tracer = self._tracer
        self._comm: Communicator = self._lane.comm
        self._exchanges = Exchanges(self._lane, self._tracer)
        self._closed = False
        self._prepare_codecs()
        self._begin_phase(began=0)
        self._tell_plan()
        self._in_step = False
        self.wrapper: Callable[[], Wrapper | None] = _no_wrapper
        """Gives what trains by this engine, if something does."""
        if comm.keeper is not None:
            comm.keeper.adopt(self)

    # A training step --------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """How many training steps have ended."""
        return self._exchanges.step

    @property
    def phase(self) -> Algorithm:
        """The algorithm of this step; it changes at FORWARD."""
        return self._phase

    @property
    def payload(self) -> Payload:
        """What is exchanged in this step: "grad" or "weight"."""
        return self._phase.payload

    def ready(self, name: str) -> None:
        """Say that the values of a tensor are complete in this step.

        A bucket whose tensors all are complete leaves as soon as all buckets before it have left.

        Raises:
            ArrayError: There is no such tensor, or it was complete already.
        """
        if name not in self._names:
            close = difflib.get_close_matches(str(name), self._names)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ArrayError(f"ready: there is no tensor {name!r}{hint}")
        self._in_step = True
        self._pace.ready(name)

    def ready_bucket(self, index: int) -> None:
        """Say that the values of all tensors of a bucket are complete in this step; see `ready`.

        Raises:
            ArrayError: There is no such bucket, or a tensor was complete already.
        """
        if not 0 <= index < len(self.buckets):
            raise ArrayError(f"ready_bucket: index is {index}, expected 0 to {len(self.buckets) - 1}")
        self._in_step = True
        self._pace.ready_bucket(index)

    def at(self, point: Point) -> None:
        """Say that training has reached a point: the window opens or closes, if it does so there.

        Collective. At `BACKWARD`, tensors that did not become ready are sent as zeros, so that no rank waits for
        ever for a tensor that another rank does not use. If the algorithm exchanges in `Rounds`, ranks do not
        wait for each other here.

        Raises:
            CommError: An exchange failed.
        """
        if not isinstance(point, Point):
            raise ArrayError(f"at: point is {point!r}, expected a Point")
        if point is Point.FORWARD and phase_of(self.algorithm, self.step) != self._phase:
            self._pace.finish()
            self._begin_phase(began=self.step)
            tell(_log, self._comm.rank, "from step %d on: %s", self.step, self._phase)
        self._in_step = point is Point.FORWARD
        self._pace.at(point)
        if point is Point.STEP:
            self._exchanges.step += 1

    def complete_step(self) -> None:
        """End a step that only its wrapper knows to have ended: before what the algorithm keeps is read.

        Raises:
            ArrayError: A step is under way: its gradients are not averaged yet.
        """
        if self._in_step:
            raise ArrayError(
                f"a training step is under way (step {self.step} of {self.algorithm}): its forward pass has "
                "begun, and its gradients are not averaged yet; call it between two steps"
            )
        wrapper = self.wrapper()
        if wrapper is not None:
            wrapper.complete()

    def hold(self) -> None:
        """Keep the gradients in the buckets as one addend of this step's mean, and leave zeros in the buckets.

        For `Reproducible(addends=M)`: on every rank, after each microbatch of a step but the last, and before the
        first tensor is `ready`.

        Raises:
            ArrayError: The algorithm keeps no addends, a bucket has left, or this rank holds all but its last.
        """
        if self._exchanges.stopped:
            return
        if self._exchanges.sent:
            raise ArrayError("hold: buckets have left in this step; hold microbatches before the last one begins")
        for bucket, state in zip(self.buckets, self.states, strict=True):
            complete(self._phase).hold(bucket, state)

    def settle(self) -> None:
        """Wait for exchanges between two steps, and write them back: before weights are read or saved."""
        self._pace.settle()

    def flush(self) -> None:
        """Wait for all exchanges that were submitted; raises the first error among them."""
        self._exchanges.wait()

    def stop(self) -> None:
        """Finish what is under way, and exchange nothing until `resume`; stopping twice does nothing.

        Collective: returns when all ranks have stopped. If the algorithm exchanges in `Rounds`, they go on until
        then, and the last one leaves all ranks with the same weights, up to rounding.
        """
        if not self._exchanges.stopped:
            self._pace.finish()
            self._exchanges.stopped = True

    def resume(self) -> None:
        """Go on after `stop`.

        Collective.
        """
        self._exchanges.stopped = False

    @property
    def counters(self) -> ExchangeCounters:
        """What was exchanged so far on this rank, and how long training waited; `.as_dict()` for other tools."""
        return self._exchanges.counters

    @property
    def counter(self) -> Counter:
        """What was exchanged so far: payload and wire bytes of this rank."""
        return self.counters.exchange

    @property
    def commits(self) -> int:
        """How many times the buckets were written back."""
        return self.counters.commits

    # Another plan -----------------------------------------------------------------------------------

    def replan(
        self, plan: Plan, storage: Storage | None = None, *, algorithm: Algorithm | None = None
    ) -> list[Array] | dict[Payload, list[Array]]:
        """Go on with another plan for the same tensors; their values and the algorithm's state move along.

        Collective. Call it between steps.

        Args:
            plan: The new plan.
            storage: Memory for it; if None, new arrays of the library of the old ones.
            algorithm: The same algorithm with other settings, for example another average or codec; it goes on
                counting steps.

        Returns:
            The memory now used: one flat array per bucket, by payload if there are two of them.

        Raises:
            ArrayError: The plan has other tensors, the algorithm is another one, or `storage` or the state does
                not fit.
            CommMismatch: The ranks' plans or algorithms differ.
            UnsupportedError: The algorithm cannot exchange the dtype of a tensor; the message names the tensor.
        """
        algorithm = self.algorithm if algorithm is None else algorithm
        check_algorithm_argument("replan", "algorithm", algorithm)
        if _kinds(algorithm) != _kinds(self.algorithm):
            raise ArrayError(f"replan: algorithm is {algorithm}, expected {self.algorithm} with other settings")
        check_fit(algorithm, plan, self._comm.size)
        self._pace.finish()
        if _tensors_of(plan) != _tensors_of(self.plan):
            raise ArrayError("replan: the new plan has other tensors than the old one")
        saved = self._saved()
        check_movable(saved, plan.buckets)
        storage = self._allocate(plan) if storage is None else storage
        old, self._buckets = self._buckets, self._buckets_over(plan, storage)
        self.plan, self.algorithm = plan, algorithm
        for payload, buckets in self._buckets.items():
            _copy_tensors(old[payload], buckets)
        self._compare(self._comm)
        self._prepare_codecs()
        self._begin_phase(began=self._exchanges.began)
        self._load(saved)
        self._tell_plan()
        flats = {payload: [bucket.flat for bucket in buckets] for payload, buckets in self._buckets.items()}
        return flats if len(flats) > 1 else flats[self.payload]

    def _allocate(self, plan: Plan) -> Storage:
        """Zeroed memory for `plan`, of the library of the buckets."""
        run = arrays.namespace(self.buckets[0].flat) if self.buckets else np
        return {
            payload: [run.zeros(spec.size, arrays.dtype_named(spec.dtype)) for spec in plan.buckets]
            for payload in self._buckets
        }

    # Checkpoints ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the algorithm keeps between steps, on this rank: arrays and numbers by tensor name, copied.

        Call it between steps, and before the weights are copied: what was exchanged since the last step is
        written back to them first.
        """
        self._pace.before_saving()
        tensors = self._saved()
        rank, size = self._comm.rank, self._comm.size
        facts = Facts(repr(self.algorithm), self.step, repr(self._phase), self._exchanges.began, rank, size)
        digest = facts.digest(self._training, self.algorithm, tensors)
        return {
            **facts._asdict(),
            "digest": digest,
            "checksum": checksum(*facts, digest, saved=tensors),
            "tensors": tensors,
        }

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and the number of ranks."""
        return self._comm.rank, self._comm.size

    def reshape_rules(self) -> dict[str, dict[str, str | None]]:
        """What becomes of the state on another number of ranks, by tensor and path: see `rules_of`."""
        pairs = zip(self.buckets, self.states, strict=True)
        return {name: rules_of(state) for bucket, state in pairs for name in bucket.views}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, also under another plan.

        Collective. All ranks load what was saved together, in one step of one training. Some algorithms keep
        arrays that differ between ranks: replicas of neighbours' weights (LowPrecisionDecentralized,
        LowPrecisionOnePeer) or residuals (ErrorFeedback). Then every rank loads what it saved itself, on the same
        number of ranks. All other algorithms keep nothing, or the same on all ranks: what any rank saved then
        loads on any rank, on any number of ranks.

        What is under way is finished, but not written back.

        Raises:
            ArrayError: On all ranks alike, and the engine stays as it was. A rank's state was saved with another
                algorithm, for other tensors, by an earlier version, or by another rank if that matters; it is
                damaged; or the ranks' states were not saved together.
        """
        self._pace.before_loading()  # the lane must be idle before its communicator is used here
        names = [name for bucket in self.buckets for name in bucket.views]
        rows = self._together(lambda: (facts_of(saved, self.algorithm, names), saved["digest"], _new_token()))
        facts, _, _ = rows[self._comm.rank]
        check_together(self.algorithm, [(theirs, digest) for theirs, digest, _ in rows])
        phase = phase_of(self.algorithm, facts.step)
        goes_on = repr(phase) == facts.phase  # else the phase that was saved has ended
        buckets = self._buckets[phase.payload]
        states = [phase.init(bucket, self._comm) for bucket in buckets]
        pairs = list(zip(buckets, states, strict=True)) if goes_on else []
        rank, size = self._comm.rank, self._comm.size
        self._together(lambda: check_tensors(phase, pairs, facts, saved, rank=rank, size=size))
        self._training, self._exchanges.step = rows[0][2], facts.step
        self._begin_phase(began=facts.phase_began if goes_on else facts.step, states=states)
        if goes_on:
            self._load(saved["tensors"])

    def _together(self, check: Callable[[], T]) -> list[T]:
        """What `check` returns on every rank; an error on one rank is an ArrayError on all. Collective."""
        outcome: tuple[T | None, str | None] = (None, None)
        cause: Exception | None = None
        try:
            outcome = (check(), None)
        except ArrayError as exc:
            outcome, cause = (None, str(exc)), exc
        except Exception as exc:  # if it were raised here, the other ranks would wait for this one
            outcome, cause = (None, f"the state cannot be read: {exc!r}"), exc
        outcomes: list[Any] = self._comm.allgather_object(outcome)
        for rank, (_, problem) in enumerate(outcomes):
            if problem is not None:
                raise ArrayError(f"load_state_dict: rank {rank}: {problem}") from cause
        return [value for value, _ in outcomes]

    def _saved(self) -> Saved:
        saved: Saved = {}
        for bucket, state in zip(self.buckets, self.states, strict=True):
            saved.update(save_state(bucket, state))
        return saved

    def _load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        for bucket, state in zip(self.buckets, self.states, strict=True):
            load_state(bucket, state, saved)

    # The end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish what is under way, and free the lane and its communicator; closing twice does nothing.

        Collective.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.stop()
        finally:
            self._lane.close()

    @property
    def closed(self) -> bool:
        """Whether it was closed, or given up."""
        return self._closed

    def give_up(self) -> None:
        """Stop without waiting for other ranks, since the communicator is broken; the lane ends by itself."""
        if self._closed:
            return
        self._closed = True
        self._exchanges.stopped = True
        wrapper = self.wrapper()
        if wrapper is not None:
            wrapper.detach()
        self._lane.give_up()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()

    # The beginning ----------------------------------------------------------------------------------

    def _buckets_over(self, plan: Plan, storage: Storage) -> dict[Payload, list[Bucket]]:
        """Buckets over `storage`, for every payload that the algorithm exchanges."""
        given = storage if isinstance(storage, Mapping) else {self.algorithm.payload: storage}
        needed = {phase.payload for phase in phases_of(self.algorithm)}
        if not needed <= set(given):
            wanted = " and ".join(map(repr, sorted(needed)))
            raise ArrayError(f"storage is for {', '.join(map(repr, given))}, but {self.algorithm} needs {wanted}")
        return {payload: make_buckets(plan, given[payload]) for payload in sorted(needed)}

    def _compare(self, comm: Communicator) -> None:
        """Raise unless all ranks have this plan and this algorithm. Collective."""
        mine = (self.plan.digest(), repr(self.algorithm))
        rows = comm.allgather_object((mine, _new_token()))
        self._training = rows[0][1]
        for rank, (other, _) in enumerate(rows):
            if other != mine:
                what = "plan" if other[0] != mine[0] else "algorithm"
                raise CommMismatch(
                    f"rank {comm.rank} and rank {rank} have different {what}s: "
                    + (f"{mine[1]} and {other[1]}" if what == "algorithm" else "the tensors differ")
                )

    def _tell_plan(self) -> None:
        """Log what is exchanged from now on."""
        buckets = self.plan.buckets
        largest = max((bucket.nbytes for bucket in buckets), default=0)
        tell(
            _log,
            self._comm.rank,
            "%s: %d tensors in %d buckets, %s, the largest %s; on a %s",
            self.algorithm,
            sum(len(bucket.tensors) for bucket in buckets),
            len(buckets),
            megabytes(sum(bucket.nbytes for bucket in buckets)),
            megabytes(largest),
            type(self._lane).__name__,
        )

    def _lane_kind(self, comm: Communicator) -> Literal["thread", "stream"]:
        """Return "stream" if exchanges only enqueue work, else "thread": in `Rounds` the host waits for ranks."""
        flats = [bucket.flat for buckets in self._buckets.values() for bucket in buckets]
        moved_by = [comm.carrier(flat, call="Engine", name="storage") for flat in flats]
        streamed = flats and not runs_in_rounds(self.algorithm) and all(t.enqueues for t in moved_by)
        return "stream" if streamed else "thread"

    def _prepare_codecs(self) -> None:
        """Load the kernels of codecs now, while no lane works.

        On the host, this begins to compile them where they are not on disk. On a device, CUDA loads a kernel when
        it is first launched, and may wait until the device is idle. A call of NCCL on the
        lane may be running then, whose peer waits in another thread to launch the same kernel. Kernels of sums,
        of optimizers and of CuPy itself are loaded when they are first used.
        """
        for phase in phases_of(self.algorithm):
            for flat in {bucket.flat.dtype: bucket.flat for bucket in self._buckets[phase.payload]}.values():
                for codec in codecs_in(phase):
                    codec.prepare(flat)

    def _begin_phase(self, began: int, states: list[State] | None = None) -> None:
        """Set up the algorithm of step `began`, with new states unless some are given."""
        self._phase = phase_of(self.algorithm, began)
        self.buckets = self._buckets[self._phase.payload]
        self._names = {name for bucket in self.buckets for name in bucket.views}
        if states is None:
            states = [self._phase.init(bucket, self._comm) for bucket in self.buckets]
        self.states = states
        self._exchanges.begin_phase(self._phase, self.buckets, self.states, began)
        self._pace: Pace = pace_of(self._exchanges)


def _no_wrapper() -> Wrapper | None:
    return None


def _new_token() -> str:
    return secrets.token_hex(8)


def _tensors_of(plan: Plan) -> set[Any]:
    return {tensor for bucket in plan.buckets for tensor in bucket.tensors}


def _copy_tensors(old: Sequence[Bucket], new: Sequence[Bucket]) -> None:
    """Copy the values of all tensors to the new buckets."""
    views = {name: view for bucket in old for name, view in bucket.views.items()}
    for bucket in new:
        for name, view in bucket.views.items():
            view[...] = views[name]


def _kinds(algorithm: Algorithm) -> list[tuple[type, Payload]]:
    """The types of an algorithm's phases, whatever its settings."""
    return [(type(phase), phase.payload) for phase in phases_of(algorithm)]


def check_fit(algorithm: Algorithm, plan: Plan, size: int) -> None:
    """Raise unless the algorithm can exchange the tensors of `plan` over `size` ranks.

    Raises:
        ArrayError: It does not support this number of ranks.
        UnsupportedError: It cannot exchange the dtype of a tensor; the message names the tensor.
    """
    for bucket in plan.buckets:
        try:
            complete(algorithm).check(bucket.dtype)
        except TypeError as exc:
            names = ", ".join(repr(tensor.name) for tensor in bucket.tensors[:3])
            raise type(exc)(f"tensor {names}: {exc}") from exc
    check_size(algorithm, size)
