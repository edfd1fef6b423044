"""The engine: runs an algorithm over buckets, on a lane, in step with training.

Buckets leave in the order of the plan on every rank, in whatever order they became ready, so that the calls of
all ranks match. The engine owns a duplicate of the communicator and the lane that uses it.

On device arrays everything here is in the order of CuPy's current stream: a bucket that leaves holds what the
caller enqueued before `ready`, and what the caller enqueues after `at(BACKWARD)` finds the average there.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from ..algorithms.base import (
    Algorithm,
    Payload,
    Point,
    State,
    check_algorithm_argument,
    complete,
    phase_of,
    phases_of,
    runs_in_rounds,
)
from ..algorithms.residuals import gather_residuals
from ..algorithms.state import (
    Facts,
    Saved,
    alike_arrays,
    check_kept,
    check_movable,
    check_tensors,
    check_together,
    checksum,
    facts_of,
    load_state,
    rules_of,
    save_state,
)
from ..arrays import Array
from ..bucket import Bucket, Plan, make_buckets
from ..comm import Communicator
from ..errors import ArrayError
from ..lane import Lane, StreamLane, ThreadLane
from ..logs import tell
from ..pickling import Live
from ..trace import Counter, ExchangeCounters, Tracer
from .changes import (
    allocated,
    average_in_place,
    check_fit,
    compared,
    copy_tensors,
    kind_of,
    kinds_of,
    new_token,
    prepare_codecs,
    tell_plan,
    tensors_of,
    together,
)
from .schedule import Exchanges, Pace, pace_of

__all__ = ["Engine", "Lane", "StreamLane", "ThreadLane", "check_fit"]

Storage: TypeAlias = Sequence[Array] | Mapping[Payload, Sequence[Array]]
"""Memory of the buckets: one flat array for each; by payload, if an algorithm exchanges gradients and weights in
turn."""

_log = logging.getLogger(__name__)


class Wrapper(Protocol):
    """What trains by an engine, as `bagua_torch.DistributedDataParallel` does."""

    def complete(self) -> None:
        """End a step in which the optimizer did not step. Collective."""

    def detach(self) -> None:
        """Leave what it trains to itself; the other ranks hear nothing of it."""

    def make_equal(self) -> None:
        """Make the weights of all ranks their mean, and the optimizers rank 0's. Collective."""


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
            array each. For an algorithm that exchanges both in turn, {"grad": [...], "weight": [...]}; for one
            that exchanges gradients alone, `resume` averages the weights given. The engine keeps views of it.
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
        self._buckets = self._buckets_over(plan, storage, algorithm)
        self._weights = list(storage.get("weight", ())) if isinstance(storage, Mapping) else []
        """Weights that were given, also where the algorithm exchanges gradients alone."""
        self._training = compared(comm, plan, algorithm)
        """Random, and the same on all ranks: it tells which states were saved together."""
        self._tracer = tracer or comm.tracer
        self._lane = comm.lane(self._lane_kind(comm))
        self._lane.tracer = self._tracer
        self._comm: Communicator = self._lane.comm
        self._exchanges = Exchanges(self._lane, self._tracer)
        self._closed = False
        self._differ = False
        """Whether ranks' weights may differ now, because of what was done so far; see `_make_equal`."""
        prepare_codecs(algorithm, self._buckets)
        self._begin_phase(began=0)
        tell_plan(_log, self._comm.rank, plan, algorithm, on=type(self._lane).__name__)
        self._in_step = self._held = False
        self.wrapper: Callable[[], Wrapper | None] = _no_wrapper
        """Gives what trains by this engine, if something does."""
        if comm.engine_registry is not None:
            comm.engine_registry.register(self)

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

    @property
    def communicates(self) -> bool:
        """Whether ranks exchange something in this step, and wait for each other; the same on all ranks."""
        return self._exchanges.communicates

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
        wait for each other here, except at the last `STEP` before another algorithm of `after` follows. If ranks'
        weights differ then, and that one needs equal ones, they become the mean of all ranks.

        Raises:
            CommError: An exchange failed.
        """
        if not isinstance(point, Point):
            raise ArrayError(f"at: point is {point!r}, expected a Point")
        if point is Point.FORWARD and not self.stopped and phase_of(self.algorithm, self.step) != self._phase:
            self._change_phase()
        self._in_step, self._held = point is Point.FORWARD, self._held and point is not Point.BACKWARD
        self._pace.at(point)
        if point is Point.STEP:
            self._exchanges.step += 1
            if self._drifts or self.stopped:
                self._differ = True
            if self._differ and not self.stopped:
                self._make_equal()

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
            ArrayError: The algorithm keeps no addends, a bucket has left, this rank holds all but its last, or
                the engine is stopped.
        """
        if self.stopped:
            raise ArrayError("hold: the engine is stopped and averages nothing; call resume before")
        if self._exchanges.sent:
            raise ArrayError("hold: buckets have left in this step; hold microbatches before the last one begins")
        self._held = True
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

        Until `resume`, each rank trains as a single process does, and `at` is not collective: ranks may make
        different numbers of steps. Steps are counted, but the next phase of `after` begins only after `resume`.
        """
        if not self.stopped:
            self._pace.stop()
            self._exchanges.stopped = True

    def resume(self) -> None:
        """Go on after `stop`, with the weights as they are now; without one it does nothing.

        Collective. Ranks that made fewer steps since `stop` count as many as the one that made most, except in
        `Rounds`. Algorithms that exchange weights go on from the weights of each rank. Under all others the ranks
        need equal weights: if one of them made a step, the weights of all become their mean, and so does what the
        algorithm keeps, as QAdam's momentum. An engine alone reaches weights only in its storage; average others
        yourself. `bagua_torch.DistributedDataParallel` averages all parameters, and copies rank 0's buffers and
        optimizers.
        """
        if not self.stopped:
            return
        # The lane is idle, so that its communicator can be used here.
        table = self._comm.allgather(np.array([self.step, self._differ, self._in_step]))
        self._exchanges.stopped = False
        self._differ = bool(table[:, 1].any())
        if not runs_in_rounds(self._phase):
            self._exchanges.step = int(table[:, 0].max())
        if self._differ and not table[:, 2].any():  # else when the step ends
            self._make_equal()
        self._pace.resume()

    @property
    def stopped(self) -> bool:
        """Whether it was stopped, and exchanges nothing until `resume`."""
        return self._exchanges.stopped

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

        Collective. Call it between steps. What an average with error feedback has lost moves along too: another
        average adds it to the next array. If other settings of `after` lead to another phase, that one begins
        anew, as it does after the last step of the phase before.

        Args:
            plan: The new plan.
            storage: Memory for it; if None, new arrays of the library of the old ones.
            algorithm: The same algorithm with other settings, for example another average or codec; it goes on
                counting steps.

        Returns:
            The memory now used: one flat array per bucket, by payload if there are two of them.

        Raises:
            ArrayError: The plan has other tensors, the algorithm is another one, `storage` or the state does not
                fit, or something that the algorithm keeps would be lost.
            CommMismatch: The ranks' plans or algorithms differ.
            UnsupportedError: The algorithm cannot exchange the dtype of a tensor; the message names the tensor.
        """
        algorithm = self.algorithm if algorithm is None else algorithm
        check_algorithm_argument("replan", "algorithm", algorithm)
        if kinds_of(algorithm) != kinds_of(self.algorithm):
            raise ArrayError(f"replan: algorithm is {algorithm}, expected {self.algorithm} with other settings")
        if self._held:
            raise ArrayError("replan: addends are held, and would be lost; call it between two steps")
        check_fit(algorithm, plan, self._comm.size)
        self._pace.finish()
        if tensors_of(plan) != tensors_of(self.plan):
            raise ArrayError("replan: the new plan has other tensors than the old one")
        began, phase = self._exchanges.began, phase_of(algorithm, self._exchanges.began)
        goes_on = kind_of(phase) == kind_of(self._phase)
        if not goes_on:
            began, phase = self.step, phase_of(algorithm, self.step)
        if goes_on and algorithm != self.algorithm:
            for bucket, state in zip(self.buckets, self.states, strict=True):
                gather_residuals(bucket, state)
        saved = self._saved() if goes_on else {}
        check_movable(saved, plan.buckets)
        self._training = compared(self._comm, plan, algorithm)
        if isinstance(storage, Mapping) and "weight" in storage:
            self._weights = list(storage["weight"])
        storage = allocated(plan, self._buckets) if storage is None else storage
        buckets = self._buckets_over(plan, storage, algorithm)
        if not goes_on:
            self._differ = bool(self._comm.allreduce(np.array(self._differ, np.uint8), op="max"))
            self._make_equal(phase)
        for payload, new in buckets.items():
            copy_tensors(self._buckets[payload], new)
        states = [complete(phase).init(bucket, self._comm) for bucket in buckets[phase.payload]]
        if goes_on:
            for bucket, state in zip(buckets[phase.payload], states, strict=True):
                check_kept(bucket, state, saved)
        self._buckets, self.plan, self.algorithm = buckets, plan, algorithm
        prepare_codecs(algorithm, self._buckets)
        self._begin_phase(began, states)
        if goes_on:
            self._load(saved)
        tell_plan(_log, self._comm.rank, plan, algorithm, on=type(self._lane).__name__)
        flats = {payload: [bucket.flat for bucket in buckets] for payload, buckets in self._buckets.items()}
        return flats if len(flats) > 1 else flats[self.payload]

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
        rows = together(
            self._comm, lambda: (facts_of(saved, self.algorithm, names), saved["digest"], new_token())
        )
        facts, _, _ = rows[self._comm.rank]
        check_together(self.algorithm, [(theirs, digest) for theirs, digest, _ in rows])
        phase = phase_of(self.algorithm, facts.phase_began)
        goes_on = repr(phase_of(self.algorithm, facts.step)) == facts.phase  # else it ends at FORWARD
        buckets = self._buckets[phase.payload]
        states = [phase.init(bucket, self._comm) for bucket in buckets]
        pairs = list(zip(buckets, states, strict=True)) if goes_on else []
        rank, size = self._comm.rank, self._comm.size
        together(self._comm, lambda: check_tensors(phase, pairs, facts, saved, rank=rank, size=size))
        self._training, self._exchanges.step = rows[0][2], facts.step
        self._begin_phase(facts.phase_began, states)
        self._differ = self._drifts and goes_on
        if goes_on:
            self._load(saved["tensors"])

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
        self._lane.abort()

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

    def _buckets_over(self, plan: Plan, storage: Storage, algorithm: Algorithm) -> dict[Payload, list[Bucket]]:
        """Buckets over `storage`, for every payload that the algorithm exchanges."""
        given = storage if isinstance(storage, Mapping) else {algorithm.payload: storage}
        needed = {phase.payload for phase in phases_of(algorithm)}
        if not needed <= set(given):
            wanted = " and ".join(map(repr, sorted(needed)))
            raise ArrayError(f"storage is for {', '.join(map(repr, given))}, but {algorithm} needs {wanted}")
        return {payload: make_buckets(plan, given[payload]) for payload in sorted(needed)}

    def _lane_kind(self, comm: Communicator) -> Literal["thread", "stream"]:
        """Return "stream" if exchanges only enqueue work, else "thread": in `Rounds` the host waits for ranks."""
        flats = [bucket.flat for buckets in self._buckets.values() for bucket in buckets]
        moved_by = [comm.transport_for(flat, call="Engine", name="storage") for flat in flats]
        streamed = flats and not runs_in_rounds(self.algorithm) and all(t.enqueues for t in moved_by)
        return "stream" if streamed else "thread"

    def _change_phase(self) -> None:
        """Finish the algorithm of the steps so far, and begin that of this step. Collective."""
        if self._differ or not self._drifts:  # else it was finished before weights became equal
            self._pace.finish()
        self._make_equal()
        self._begin_phase(self.step)
        tell(_log, self._comm.rank, "from step %d on: %s", self.step, self._phase)

    def _make_equal(self, ahead: Algorithm | None = None) -> None:
        """Average the weights if they differ between ranks, and the algorithm of the next step needs equal ones.

        Collective, unless they do not differ, which all ranks know.

        Args:
            ahead: That algorithm, if it begins anew; else what follows in the course of training.
        """
        if not self._differ:
            return
        begins = ahead is not None
        if ahead is None:
            ahead = phase_of(self.algorithm, self.step)
            begins = ahead != self._phase
        if (self._drifts and not begins) or not complete(ahead).equal_start:
            return
        self._pace.finish()
        if not begins:
            average_in_place(self._comm, [array for state in self.states for array in alike_arrays(state)])
        wrapper = self.wrapper()
        if wrapper is not None:
            wrapper.make_equal()
        else:
            moved = [bucket.flat for bucket in self._buckets.get("weight", ())]
            average_in_place(self._comm, moved or self._weights)
        self._differ = False

    def _begin_phase(self, began: int, states: list[State] | None = None) -> None:
        """Set up the algorithm of step `began`, with new states unless some are given."""
        self._phase = phase_of(self.algorithm, began)
        self._drifts = complete(self._phase).drifts
        self.buckets = self._buckets[self._phase.payload]
        self._names = {name for bucket in self.buckets for name in bucket.views}
        if states is None:
            states = [self._phase.init(bucket, self._comm) for bucket in self.buckets]
        self.states = states
        self._exchanges.begin_phase(self._phase, self.buckets, self.states, began)
        self._pace: Pace = pace_of(self._exchanges)


def _no_wrapper() -> Wrapper | None:
    return None
