"""The engine: runs an algorithm over buckets, on a lane, beside the steps of training.

Buckets leave in the order of the plan on every rank, in whatever order they became ready, so that the calls of
all ranks match. The engine owns a duplicate of the communicator and the lane that uses it.

On device arrays all work is ordered by CuPy's current stream: a bucket that leaves holds what the caller enqueued
before `ready`, and what the caller enqueues after `at(BACKWARD)` finds the average there.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..algorithms.base import (
    Algorithm,
    Payload,
    Point,
    State,
    check_algorithm_argument,
    runs_in_rounds,
)
from ..algorithms.residuals import gather_residuals
from ..algorithms.state import Saved, StateHeader, check_movable, replicated_arrays
from ..arrays import Array
from ..bucket import Plan
from ..comm import Communicator
from ..comm.public_methods import public_method
from ..errors import ArrayError
from ..execution.lane import StreamLane
from ..logs import log_on_root
from ..objects.closing import Closing
from ..objects.pickling import Live
from ..trace import Counter, ExchangeCounters, Tracer
from .checks import check_fit, check_same_training
from .exchanges import Exchanges
from .mean_weights import MeanWeights
from .monitor import HealthMonitor
from .points import PointOrder
from .progress import Progress
from .restore import (
    check_same_types,
    check_state_dict,
    load_states,
    make_state_dict,
    make_states,
    phase_to_continue,
    save_states,
)
from .schedule import ExchangeSchedule, schedule_of
from .storage import (
    GivenArrays,
    Storage,
    allocate,
    average_in_place,
    buckets_over,
    copy_tensors,
    lane_kind,
    log_plan,
    memory_of,
    prepare_codecs,
    tensors_of,
)
from .weights import EngineWeights

_log = logging.getLogger(__name__)


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class EngineCallbacks:
    """Functions that an engine calls once it has been constructed.

    `bagua_torch.DistributedDataParallel` gives its own; an engine alone needs none.
    """

    complete_step: Callable[[], None] = _nothing
    """End a step in which the optimizer did not step. Collective."""
    make_equal: Callable[[], None] | None = None
    """Replace the weights with their mean over all ranks, and the optimizers with rank 0's. Collective.

    It raises on all ranks if one of them cannot. None: the engine averages the weights in its storage."""
    wrote: Callable[[], None] = _nothing
    """Notice that exchanged weights, or what else the algorithm writes back, are in the buckets."""
    detach: Callable[[], None] = _nothing
    """Stop using the engine, without any communication, because it has been aborted."""


class Engine(Live, Closing):
    """Exchanges the buckets of a plan by an algorithm.

    Collective. All ranks give the same plan and algorithm; they are compared. On every rank and in every step,
    call `ready` when a tensor is complete, and `at` when training reaches a point (`FORWARD`, `BACKWARD`,
    `STEP`). Close the engine, or use it as a context manager.

    Args:
        comm: The ranks. The engine works on a duplicate of it.
        algorithm: What to exchange, when and how.
        plan: Which tensors travel together.
        storage: The memory of the buckets, of which the engine keeps views: gradients or weights, as the
            algorithm's `payload` says, one flat array each. {"grad": [...], "weight": [...]} if it exchanges both
            in turn; if gradients alone, weights are compared at the first step, and averaged by `resume`.
        tracer: Where spans go; the communicator's by default.
        callbacks: Functions of the program that trains by this engine.

    Raises:
        ArrayError: `storage` does not fit the plan or the algorithm, or the algorithm does not support this
            number of ranks.
        CommMismatch: The ranks' plans or algorithms differ.
        UnsupportedError: The algorithm cannot exchange the dtype of a tensor; the message names the tensor.
    """

    _alone = True
    """Whether it has no wrapper, which adds spans of its own, broadcasts weights, reports missing gradients."""

    @public_method("Engine")
    def __init__(
        self,
        comm: Communicator,
        algorithm: Algorithm,
        plan: Plan,
        storage: Storage,
        *,
        tracer: Tracer | None = None,
        callbacks: EngineCallbacks | None = None,
    ) -> None:
        check_algorithm_argument("Engine", "algorithm", algorithm)
        check_fit(algorithm, plan, comm.size)
        self.algorithm, self.plan = algorithm, plan
        self._buckets = buckets_over(plan, storage, algorithm)
        self._given = GivenArrays(storage, self._buckets)
        self._training = check_same_training(comm, plan, algorithm, storage)
        """A random token, the same on all ranks: states with the same token were saved together."""
        self._tracer = tracer or comm.tracer
        self._lane = comm.lane(lane_kind(comm, algorithm, self._buckets))
        self._lane.tracer = self._tracer
        self._comm: Communicator = self._lane.comm
        self._weights = EngineWeights(self._comm, storage, compare=self._alone)
        counters, on_device = ExchangeCounters(), isinstance(self._lane, StreamLane)
        comm.flight.exchanges[self._comm.group] = counters
        self.health = HealthMonitor(self._lane, _log)
        """The times of this rank's steps, which ranks compare."""
        self._exchanges = Exchanges(
            self._lane, self._tracer, self, warn=self._alone, counters=counters, health=self.health
        )
        self._replacements = self._exchanges.replacements
        order = PointOrder(algorithm) if self._alone else None
        ended = self.health.step_ended
        self._progress = Progress(
            self._tracer, _log, comm.rank, counters, on_device=on_device, order=order, ended=ended
        )
        self._closed = False
        prepare_codecs(algorithm, self._buckets)
        self._begin_phase(began=0)
        self._weights.note_copies(self._phase, plan, self._buckets)
        log_plan(_log, self._comm.rank, plan, algorithm, lane=type(self._lane).__name__)
        self._in_step = self._held = False
        self._callbacks = EngineCallbacks()
        if comm.engine_registry is not None:
            comm.engine_registry.register(self)
        if callbacks is not None:  # the caller may not be ready for calls before the engine exists
            self._callbacks, self._exchanges.wrote = callbacks, callbacks.wrote

    # A training step --------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of training steps that have ended."""
        return self._exchanges.step

    @property
    def phase(self) -> Algorithm:
        """The algorithm of this step; it changes at FORWARD."""
        return self._phase

    @property
    def payload(self) -> Payload:
        """The payload of this step: "grad" or "weight"."""
        return self._phase.payload

    @property
    def communicates(self) -> bool:
        """Whether ranks communicate in this step, and wait for each other; the same on all ranks."""
        return self._exchanges.communicates

    @property
    def weight(self) -> float | None:
        """The weight of this rank in the means of this step, as its number of tokens or samples; None if not set.

        Set it on all ranks, before the first tensor is `ready`. The mean is then the sum of weight g over the
        ranks, divided by the sum of the weights: with losses that are means over a rank's own tokens, the
        gradient of one process with all tokens. A rank with weight 0 adds nothing, not even a NaN. If all have
        0, gradients are zero, with a warning once. After the step it is None again, for plain means. The ranks
        exchange their weights on the lane, 8 bytes each, before the first bucket leaves: in steps with weights,
        and in all steps after the first of them. Addends that are held (`hold`) have a weight each.

        Algorithms that exchange weights of the model (DiLoCo, StreamingDiLoCo, SparseLoCo) average changes: each
        counts by the sum over its steps since the last exchange, of which all have a weight, or none. The sum is
        in checkpoints and in elastic snapshots. On another number of ranks each begins with the mean of the sums,
        as it begins with the mean of the weights of the model: the steps of a rank that is gone are in both.

        Raises:
            ArrayError: It is set after the backward pass has begun; the next exchange of weights raises it on all
                ranks, too. So it does if a rank has none and others have one, or one is not a finite number of at
                least 0.
            UnsupportedError: The algorithm has no mean over all ranks, as `Decentralized`. Nothing has changed.
        """
        return self.mean_weights.now

    @weight.setter
    def weight(self, weight: float | None) -> None:
        self.mean_weights.set(weight, self.algorithm.phases)

    @property
    def mean_weights(self) -> MeanWeights:
        """The weights of this rank in the means, of which `weight` is the present one."""
        return self._exchanges.mean_weights

    def begin_backward(self) -> None:
        """Report that the backward pass begins; the first tensor that is `ready` does so as well.

        Collective if ranks have weights, which they exchange on the lane meanwhile.
        """
        self._begin_backward()

    def _begin_backward(self) -> None:
        weights = self._exchanges.mean_weights
        if not weights.is_open:
            weights.open(exchanges=weights.are_due and self.communicates)

    def ready(self, name: str) -> None:
        """Report that the values of a tensor are complete in this step. Do not change them until `BACKWARD`.

        A bucket leaves as soon as all its tensors are complete and all buckets before it have left.

        Raises:
            ArrayError: There is no such tensor, or it was complete already.
        """
        if name not in self._names:
            close = difflib.get_close_matches(str(name), self._names)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ArrayError(f"ready: there is no tensor {name!r}{hint}")
        self._in_step = True
        self._begin_backward()
        self._schedule.ready(name)

    def ready_bucket(self, index: int) -> None:
        """Report that the values of all tensors of a bucket are complete in this step; see `ready`.

        Raises:
            ArrayError: There is no such bucket, or a tensor was complete already.
        """
        if not 0 <= index < len(self.buckets):
            raise ArrayError(f"ready_bucket: index is {index}, expected 0 to {len(self.buckets) - 1}")
        self._in_step = True
        self._begin_backward()
        self._schedule.ready_bucket(index)

    def at(self, point: Point) -> None:
        """Report that training has reached a point; a window that opens or closes there does so.

        Collective. At `BACKWARD`, tensors that did not become ready are sent as zeros, so that no rank waits for
        ever for a tensor that another rank does not use. If the algorithm exchanges in `Rounds`, ranks do not
        wait for each other here, except at the last `STEP` before another algorithm of `after` follows. If the
        weights differ between ranks then, and the next algorithm needs equal ones, they become their mean.

        Raises:
            ArrayError: A point was left out, on which the algorithm depends; or the storage has other arrays now.
            CommError: An exchange failed.
            CommMismatch: The weights in the storage differ between ranks, and the algorithm needs equal ones.
        """
        if not isinstance(point, Point):
            raise ArrayError(f"at: point is {point!r}, expected a Point")
        step, weights = self.step, self._exchanges.mean_weights
        began_ns = self._progress.begin(point, step)
        self._follow_weights()
        if point is Point.FORWARD:
            if not self.stopped and self.algorithm.phase(step) != self._phase:
                self._change_phase()
            due = not self.stopped and not self._in_step and self._weights.is_due(step)
            if due and self._weights.must_be_equal(self._phase, self._buckets):
                self._lane.wait()
                self._weights.check(self._phase, self.plan, self._buckets)
            self._replacements.look(step)
            self._comm.flight.steps[self._comm.group] = step + 1
            weights.is_open = False
            if self._alone:
                weights.forget_used()
        elif point is Point.BACKWARD:
            self._begin_backward()
        elif self._alone:
            weights.check_used()
            self._given.check()
        if point is Point.STEP:
            weights.end_step()
        self._in_step, self._held = point is Point.FORWARD, self._held and point is not Point.BACKWARD
        self._schedule.at(point)
        if point is Point.BACKWARD:
            weights.close()
        if point is Point.STEP:
            self._replacements.keep(stepped=True)
            self._exchanges.set_step(step + 1)
            if self._drifts or self.stopped:
                self._weights.differ = True
            if self._weights.differ and not self.stopped:
                self._make_equal()
        self._progress.reach(point, began_ns, step)

    def complete_step(self) -> None:
        """End a step whose end only the caller's program knows; call it before the state is read.

        Raises:
            ArrayError: A step is under way: its gradients are not averaged yet.
        """
        if self._in_step:
            raise ArrayError(
                f"a training step is under way (step {self.step} of {self.algorithm}): its forward pass has "
                "begun, and its gradients are not averaged yet; call it between two steps"
            )
        self._callbacks.complete_step()

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
            self._phase.hold(bucket, state)
        self.mean_weights.hold()

    def weights_replaced(self) -> None:
        """Report that the program has replaced the weights in the storage, as by a checkpoint without this state.

        Call it on all ranks between the same two steps, after writing the same weights on all of them. Training
        goes on as if it began with them: what the algorithm keeps of earlier weights becomes the new ones, its
        momenta and residuals become zero, and the results of exchanges under way are dropped. Steps are counted
        on. Nothing is sent: ranks compare what they have replaced at a later exchange, 16 or more steps after the
        comparison before, and in `stop` and `close`; `CommMismatch` is raised there if it differs. `close`
        leaves out what was replaced after the last step. It does nothing for algorithms that exchange gradients.
        """
        if self.payload == "weight":
            self._follow_weights(known=True)

    def expect_weights(self) -> None:
        """Report that the program is about to load weights: if they are others in the end, they were replaced."""
        self._replacements.expect()

    def _follow_weights(self, *, known: bool = False) -> None:
        if known or self._replacements.expected:
            self._follow(known)

    def _follow(self, known: bool) -> None:
        if self._replacements.note(self._exchanges.common_step, known=known):
            self._schedule.drop()
            for bucket, state in zip(self.buckets, self.states, strict=True):
                self._exchanges.algorithm.restart(bucket, state)

    def settle(self) -> None:
        """Write back exchanges before weights are read or saved; those that outlive further steps continue."""
        self._schedule.settle()

    def finish(self) -> None:
        """Wait for all exchanges between two steps, and write them back, also those that outlive steps.

        Collective.
        """
        self._follow_weights()
        self._schedule.finish()
        self._exchanges.compare_replacements()

    def flush(self) -> None:
        """Wait for all exchanges that were submitted, and raise the first error among them."""
        self._exchanges.wait()

    @public_method("Engine.stop")
    def stop(self) -> None:
        """Finish the exchanges under way, and start none until `resume`. Stopping twice does nothing.

        Collective: returns when all ranks have stopped. The last of `Rounds` leaves equal weights, rounded.

        Until `resume`, each rank trains as a single process does, and `at` is not collective: ranks may make
        different numbers of steps. Steps are counted, but the next phase of `after` begins only after `resume`.
        """
        if not self.stopped:
            self._follow_weights()
            self._schedule.stop()
            self._exchanges.compare_replacements()
            self._exchanges.stop()

    @public_method("Engine.resume")
    def resume(self) -> None:
        """Exchange again after `stop`, with the weights as they are now. Does nothing if not stopped.

        Collective. Ranks that made fewer steps since `stop` count as many as the one that made most, except in
        `Rounds`. Algorithms that exchange weights continue from the weights of each rank. All others need equal
        weights: if a rank made a step, the weights of all become their mean, and so does the state of the
        algorithm, such as QAdam's momentum. An engine alone reaches weights only in its storage; average others
        yourself. `bagua_torch.DistributedDataParallel` averages all parameters, and copies rank 0's buffers and
        optimizers.
        """
        if not self.stopped:
            return
        self._follow_weights()
        # The lane is idle, so that its communicator can be used here.
        table = self._comm.allgather(np.array([self.step, self._weights.differ, self._in_step]))
        self._exchanges.resume()
        self._weights.differ = bool(table[:, 1].any())
        self._weights.unchecked &= not table[:, 1:].any()
        if not runs_in_rounds(self._phase):
            self._exchanges.set_step(int(table[:, 0].max()))
        if self._weights.differ and not table[:, 2].any():  # else when the step ends
            self._make_equal()
        if self.mean_weights.is_open:  # of the buckets that were held back
            self.mean_weights.open(exchanges=self.mean_weights.are_due and self.communicates)
        self._schedule.resume()

    @property
    def stopped(self) -> bool:
        """Whether it exchanges nothing until `resume`."""
        return self._exchanges.stopped

    @property
    def counters(self) -> ExchangeCounters:
        """This rank's exchanges, and how long training waited for them; `.as_dict()` for other tools."""
        return self._exchanges.counters

    @property
    def counter(self) -> Counter:
        """This rank's exchanges: calls, payload bytes and wire bytes."""
        return self.counters.exchange

    @property
    def commits(self) -> int:
        """How many times the buckets were written back."""
        return self.counters.commits

    # Another plan -----------------------------------------------------------------------------------

    @public_method("Engine.replan")
    def replan(
        self, plan: Plan, storage: Storage | None = None, *, algorithm: Algorithm | None = None
    ) -> list[Array] | dict[Payload, list[Array]]:
        """Continue with another plan for the same tensors; their values and the algorithm's state move along.

        Collective. Call it between steps. Residuals of error feedback move along too: an average without error
        feedback adds them to the next array. If other settings of `after` lead to another phase, that one
        begins, as it does after the last step of the phase before.

        Args:
            plan: The new plan.
            storage: Memory for it; if None, new arrays of the library of the old ones.
            algorithm: The same algorithm with other settings, for example another average or codec; steps are
                counted on.

        Returns:
            The memory now used: one flat array per bucket, by payload if there are two of them.

        Raises:
            ArrayError: The plan has other tensors, the algorithm is another one, `storage` or the state does not
                fit, or a part of the state would be lost.
            CommMismatch: The ranks' plans or algorithms differ.
            UnsupportedError: The algorithm cannot exchange the dtype of a tensor; the message names the tensor.
        """
        algorithm = self.algorithm if algorithm is None else algorithm
        check_algorithm_argument("replan", "algorithm", algorithm)
        check_same_types(self.algorithm, algorithm)
        if self._held:
            raise ArrayError("replan: addends are held, and would be lost; call it between two steps")
        check_fit(algorithm, plan, self._comm.size)
        self.finish()
        if tensors_of(plan) != tensors_of(self.plan):
            raise ArrayError("replan: the new plan has other tensors than the old one")
        began, continues = phase_to_continue(algorithm, self._phase, began=self._exchanges.began, step=self.step)
        phase = algorithm.phase(began)
        if continues and algorithm != self.algorithm:
            for bucket, state in zip(self.buckets, self.states, strict=True):
                gather_residuals(bucket, state)
        saved = self._saved() if continues else {}
        check_movable(saved, plan.buckets)
        self._training = check_same_training(self._comm, plan, algorithm, storage)
        self._weights.use(storage)
        buckets = buckets_over(plan, allocate(plan, self._buckets) if storage is None else storage, algorithm)
        if not continues:
            self._weights.differ = bool(self._comm.allreduce(np.array(self._weights.differ, np.uint8), op="max"))
            self._make_equal(phase)
        for payload, new in buckets.items():
            copy_tensors(self._buckets[payload], new)
        states = make_states(phase, buckets[phase.payload], self._comm, saved if continues else None)
        self._buckets, self.plan, self.algorithm = buckets, plan, algorithm
        self._given = GivenArrays(storage, buckets)
        prepare_codecs(algorithm, self._buckets)
        self._begin_phase(began, states)
        if continues:
            self._load(saved)
        log_plan(_log, self._comm.rank, plan, algorithm, lane=type(self._lane).__name__)
        return memory_of(self._buckets)

    # Checkpoints ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A copy of the algorithm's state on this rank: arrays and numbers by tensor name.

        Call it between steps, and before the weights are copied: exchanges since the last step are written back
        to them first.
        """
        self._follow_weights()
        self._schedule.before_saving(phase_ends=self.algorithm.phase(self.step) != self._phase)
        steps = self.step, repr(self._phase), self._exchanges.began
        header = StateHeader(repr(self.algorithm), *steps, self._comm.rank, self._comm.size)
        return make_state_dict(header, self._training, self.algorithm, self._saved())

    @public_method("Engine.load_state_dict")
    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        """Continue from the result of `state_dict`, also under another plan.

        Collective. Load the weights that belong to it, too, before the next step. All ranks load what was saved
        together, in one step of one training. Some algorithms keep arrays that differ between ranks: replicas of
        neighbours' weights (LowPrecisionDecentralized, LowPrecisionOnePeer), residuals (ErrorFeedback), or sums
        of `weight` between exchanges (DiLoCo, StreamingDiLoCo, SparseLoCo). Then every rank loads what it saved
        itself, on the same number of ranks, and on the same nodes if it keeps parts of buckets (by_node,
        Hierarchical(ErrorFeedback)). All other algorithms keep nothing, or the same on all ranks, which loads on
        any rank of any number.

        Exchanges under way are finished, but not written back.

        Raises:
            ArrayError: On all ranks, and the engine stays as it was. A rank's state was saved with another
                algorithm, for other tensors, by an earlier version, or by another rank or on other nodes if that
                matters; it is damaged; or the ranks' states were not saved together.
        """
        self._schedule.before_loading()  # the lane must be idle before its communicator is used here
        names = [name for bucket in self.buckets for name in bucket.views]
        loaded = check_state_dict(self._comm, self.algorithm, self._buckets, names, saved)
        self._training = loaded.training
        self._exchanges.set_step(loaded.header.step)
        self._progress.restart()
        self.mean_weights.drop_step()
        self._begin_phase(loaded.header.phase_began, loaded.states)
        self._weights.load(differ=self._drifts and loaded.continues)
        self._replacements.belong()
        if loaded.continues:
            self._load(loaded.tensors)

    def begin_anew(self) -> None:
        """Begin the algorithm with a new state, and with the mean of the weights if it needs equal ones.

        Collective.
        """
        self._weights.differ = True
        self._make_equal(self._phase)
        self._begin_phase(self._exchanges.began)
        self._weights.differ = True  # those that the storage lacks are averaged when the next step ends

    def _saved(self) -> Saved:
        return save_states(self._comm, self.buckets, self.states)

    def _load(self, saved: Saved) -> None:
        load_states(self._comm, self.buckets, self.states, saved)

    # The end ----------------------------------------------------------------------------------------

    @public_method("Engine.close")
    def close(self) -> None:
        """Finish the exchanges under way, and free the lane and its communicator. Closing twice does nothing.

        Collective.
        """
        if self._closed:
            return
        self._closed = True
        differ = self._drifts and not self.stopped and self._comm.size > 1
        try:
            self._follow_weights()
            self._replacements.forget_since(self.step)
            self.stop()
            if differ:
                self._progress.report_alone(self.algorithm, self.step - self._exchanges.exchanged)
        finally:
            self._lane.close()
            self.health.close()
        self._progress.close()

    @property
    def closed(self) -> bool:
        """Whether it was closed or aborted."""
        return self._closed

    def abort(self) -> None:
        """Stop without waiting for other ranks, since the communicator is broken; the lane ends by itself."""
        if self._closed:
            return
        self._closed = True
        self._exchanges.stop()
        self._callbacks.detach()
        self._lane.abort()
        self.health.close()

    def _leave(self, error: BaseException) -> None:
        """Leave it open: what ends the program, or `abort`, ends it on all ranks."""

    # Phases -----------------------------------------------------------------------------------------

    def _change_phase(self) -> None:
        """Finish the algorithm of the steps so far, and begin that of this step. Collective."""
        if self._weights.differ or not self._drifts:  # else it was finished before weights became equal
            self._schedule.finish()
        self._exchanges.compare_replacements()
        self._make_equal()
        self._begin_phase(self.step)
        if not self._drifts:
            self._weights.compare_at(self.step + 1)
        log_on_root(_log, self._comm.rank, "from step %d on: %s", self.step, self._phase)

    def _make_equal(self, following: Algorithm | None = None) -> None:
        """Average the weights if they differ between ranks and the algorithm of the next step needs equal ones.

        Collective, unless they do not differ, which all ranks know.

        Args:
            following: The algorithm of the next step, if it begins then; by default that of the current step.
        """
        if not self._weights.differ:
            return
        begins = following is not None
        if following is None:
            following = self.algorithm.phase(self.step)
            begins = following != self._phase
        if (self._drifts and not begins) or not following.equal_start:
            return
        self._schedule.finish()
        if not begins:
            average_in_place(self._comm, [array for state in self.states for array in replicated_arrays(state)])
        self._weights.average(self._buckets, self._callbacks.make_equal)

    def _begin_phase(self, began: int, states: list[State] | None = None) -> None:
        """Set up the algorithm of step `began`, with new states unless some are given."""
        self._phase = self.algorithm.phase(began)
        self._drifts = self._phase.drifts
        self.buckets = self._buckets[self._phase.payload]
        self._names = {name for bucket in self.buckets for name in bucket.views}
        self.states = make_states(self._phase, self.buckets, self._comm, None) if states is None else states
        self._exchanges.begin_phase(self._phase, self.buckets, self.states, began)
        self._schedule: ExchangeSchedule = schedule_of(self._exchanges)
