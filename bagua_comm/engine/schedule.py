"""When exchanges begin and end.

    StepSchedule       in every step, in a window of it
    DelayedSchedule    in steps that the algorithm chooses; they outlive a number of steps
    RoundSchedule      in rounds beside training, for which no step waits

The engine reports to its schedule which tensors are ready and which points training has reached. The schedule
decides when buckets leave and when they are written back; `Exchanges` does both.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from ..algorithms.base import (
    Algorithm,
    Pending,
    Point,
    Rounds,
    State,
    Window,
    WithDefaults,
    name_of,
    with_defaults,
)
from ..bucket import Bucket
from ..comm import Communicator
from ..errors import ArrayError
from ..futures import abandon
from ..lane import Lane
from ..trace import ExchangeCounters, Tracer


class Exchanges:
    """Sends buckets on the lane, waits for them, and writes back the results.

    Args:
        lane: The lane on which exchanges run, with the communicator that they use.
        tracer: Where their spans go.
        owner: The engine. Once it is gone, nobody can ask for exchanges under way. None if it stays.
        warn: Whether to warn of tensors that never became ready.
    """

    def __init__(
        self, lane: Lane[Communicator], tracer: Tracer, owner: object | None = None, *, warn: bool = False
    ) -> None:
        self.lane, self.tracer = lane, tracer
        if owner is not None:
            weakref.finalize(owner, abandon, lane, lane.comm.flight.unasked).atexit = False
        self._warn, self._warned = warn, set[str]()
        self.counters = ExchangeCounters()
        """All exchanges of this rank, and how long training waited for them."""
        self.step = self.began = 0
        """Numbers of training steps that have ended: now, and when the current phase began."""
        self.exchanged = 0
        """The number of steps that had ended when ranks communicated last, with the step of that exchange."""
        self._named: dict[str, str] = {}
        """What spans of exchanges name: the algorithm, and its payload."""
        self.stopped = False
        """Whether `send` holds buckets back."""
        self.sent: list[Bucket] = []
        """Buckets that have left in the open window or in the current round."""
        self.held: list[Bucket] = []
        """Buckets that `send` held back in the open window."""

    def begin_phase(
        self, algorithm: Algorithm, buckets: Sequence[Bucket], states: Sequence[State], began: int
    ) -> None:
        """Exchange these buckets by this algorithm from now on; `states` has one state for each bucket."""
        self.algorithm: WithDefaults = with_defaults(algorithm)
        self._named = {"algorithm": name_of(algorithm), "payload": self.algorithm.payload}
        self.buckets, self.states, self.began = list(buckets), list(states), began
        self.sent, self.held = [], []

    def set_step(self, step: int) -> None:
        """Set the number of steps that have ended."""
        self.step = step

    def stop(self) -> None:
        """Hold buckets back from now on."""
        self.stopped = True

    def resume(self) -> None:
        """Send buckets again."""
        self.stopped = False

    def begin_round(self) -> None:
        """Forget the buckets of the last round."""
        self.sent = []

    def pop_held(self) -> list[Bucket]:
        """Return the buckets that were held back, and forget them."""
        held, self.held = self.held, []
        return held

    def send(self, bucket: Bucket) -> Future[Any]:
        """Prepare the exchange of a bucket and submit it to the lane, or hold it back if stopped."""
        self._enter_step(bucket)
        if self.stopped:
            self.held.append(bucket)
            return Future()
        self.sent.append(bucket)
        return self._submit(bucket)

    def send_if_due(self, bucket: Bucket, delay: int) -> Future[Any] | None:
        """Prepare a step of a bucket. If it communicates, submit an exchange that outlives `delay` steps."""
        state = self.states[bucket.index]
        self._enter_step(bucket)
        if self.stopped:
            self.algorithm.skip(bucket, state)
        elif self.algorithm.communicates(bucket.step, state):
            self.pending(bucket).begin(delay)
            return self._submit(bucket)
        else:
            self.algorithm.begin(bucket, state)
        return None

    def pending(self, bucket: Bucket) -> Pending:
        """Whether an exchange of this bucket outlives steps; for an algorithm whose window has a delay."""
        found = self.algorithm.pending(self.states[bucket.index])
        if found is None:
            raise ArrayError(
                f"the window of {self.algorithm.algorithm} has a delay, but its state has no Pending; expected "
                "one as its field `pending`"
            )
        return found

    def _enter_step(self, bucket: Bucket) -> None:
        bucket.step = self.step - self.began
        bucket.padding[...] = 0  # a NaN in the last block may have spread to the padding

    def _submit(self, bucket: Bucket) -> Future[Any]:
        state = self.states[bucket.index]
        self.algorithm.begin(bucket, state)
        began = time.perf_counter_ns()
        future = self.lane.submit(self._exchange, self.algorithm, bucket, state, step=self.began + bucket.step)
        self.counters.wait.time_ns += time.perf_counter_ns() - began  # a lane without a thread runs it here
        return future

    def warn_of_zeros(self, names: Sequence[str]) -> None:
        """Warn that zeros take the place of the gradients `names`, once for each of them."""
        new = [name for name in names if name not in self._warned] if self._warn else []
        if not new:
            return
        self._warned.update(new)
        missing = f"{new[0]!r} was" if len(new) == 1 else f"{new[0]!r} and {len(new) - 1} more were"
        gradient = "its gradient" if len(new) == 1 else "their gradients"
        warnings.warn(
            f"in step {self.step}, {missing} not ready on rank {self.lane.comm.rank}: zeros are averaged in "
            f"place of {gradient}; call engine.ready({new[0]!r}) when it is complete",
            stacklevel=5,  # the line that calls at()
        )

    def _exchange(self, algorithm: WithDefaults, bucket: Bucket, state: State, step: int) -> None:
        """Run an exchange, on the lane; `step` is the training step in which the bucket left. Collective."""
        comm = self.lane.comm
        before, began = comm.counters.total(), time.perf_counter_ns()
        detail = {"bucket": bucket.index, "bytes": bucket.nbytes, "step": step}
        self.lane.note(**detail)
        context = comm.context
        try:
            context.bucket, context.bucket_step = bucket, (bucket.index, step)
            with self.tracer.span("exchange", **detail, **self._named):
                algorithm.exchange(bucket, comm, state)
        finally:  # no call before these assignments: a signal handler could raise there
            context.bucket = context.bucket_step = None
        after = comm.counters.total()
        if after.calls > before.calls:
            spent_ns = time.perf_counter_ns() - began
            self.counters.exchange.add(bucket.nbytes, after.wire_bytes - before.wire_bytes, spent_ns)
            self.exchanged = step + 1

    @property
    def communicates(self) -> bool:
        """Whether ranks communicate in this step, and wait for each other; the same on all ranks."""
        if self.stopped or isinstance(self.algorithm.window, Rounds):
            return False
        return any(self.algorithm.communicates(self.step - self.began, state) for state in self.states)

    def wait(self) -> None:
        """Wait for all tasks on the lane, and raise the first error among them."""
        with self._waiting():
            self.lane.wait()

    def wait_for(self, futures: Sequence[Future[Any]]) -> None:
        """Wait for these tasks on the lane, and raise the first error among them."""
        with self._waiting():
            for future in futures:
                self.lane.result(future)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count what happens in it as a wait."""
        began = time.perf_counter_ns()
        try:
            with self.tracer.span("wait for exchanges"):
                yield
        finally:
            self.counters.wait.add(0, 0, time.perf_counter_ns() - began)

    def write_back(self, buckets: Sequence[Bucket]) -> None:
        """Write back the results of these buckets."""
        if buckets and self.algorithm.commits:
            for bucket in buckets:
                self.algorithm.commit(bucket, self.states[bucket.index])
            self.counters.commits += 1

    def commit(self) -> None:
        """Write back the results of the buckets that were sent. Buckets that were held back stay local."""
        self.write_back(self.sent)
        for bucket in self.held:
            self.algorithm.skip(bucket, self.states[bucket.index])
        self.sent, self.held = [], []


_LEFT_OUT = "; was engine.at(Point.BACKWARD) left out?"


class StepSchedule:
    """Exchanges in every step, in the window of the algorithm. Training waits for them when it closes."""

    def __init__(self, window: Window, exchanges: Exchanges) -> None:
        self._window, self._exchanges = window, exchanges
        self._left = 0
        """Number of buckets that have left in the open window or were held back."""
        self._waiting: list[set[str]] = [set() for _ in exchanges.buckets]
        self._waiting_for = {
            name: self._waiting[bucket.index] for bucket in exchanges.buckets for name in bucket.views
        }
        self._expect_all()

    def ready(self, name: str) -> None:
        """Report that a tensor is complete. Buckets leave in order, each when all its tensors are complete.

        Raises:
            ArrayError: The tensor was complete already.
        """
        if self._window.opens is not Point.GRADIENT:
            return
        waiting = self._waiting_for[name]
        if name not in waiting:
            raise ArrayError(f"ready: {name!r} was complete already in this step{_LEFT_OUT}")
        waiting.remove(name)
        if not waiting:
            self._send_complete()

    def ready_bucket(self, index: int) -> None:
        """Report that all tensors of a bucket are complete.

        Raises:
            ArrayError: A tensor was complete already.
        """
        if self._window.opens is not Point.GRADIENT:
            return
        waiting, bucket = self._waiting[index], self._exchanges.buckets[index]
        if len(waiting) != len(bucket.views):
            name = next(name for name in bucket.views if name not in waiting)
            raise ArrayError(f"ready_bucket: {name!r} was complete already in this step{_LEFT_OUT}")
        waiting.clear()
        self._send_complete()

    def at(self, point: Point) -> None:
        """Open or close the window if it does so at this point. Collective."""
        opens, closes = self._window.opens, self._window.closes
        if point is Point.BACKWARD and opens is Point.GRADIENT:
            self._complete_with_zeros()
        if point is closes:
            self._close()
        if point is opens and point is not Point.GRADIENT and not self._left:
            for bucket in self._exchanges.buckets:
                self._send(bucket)

    def settle(self) -> None:
        """Close the window if it is open between steps."""
        if self._window.closes is Point.FORWARD:
            self._close()

    def before_saving(self, *, phase_ends: bool) -> None:
        """Wait until no exchange changes the states."""
        self.settle()
        self._exchanges.wait()

    def before_loading(self) -> None:
        """Wait until the lane is idle. The window stays open, in case the state is refused."""
        self._exchanges.wait()

    def finish(self) -> None:
        """Close the window, if it is open."""
        self._close()

    def stop(self) -> None:
        """Finish the exchanges under way. The window stays open: later buckets of it stay local."""
        self._end()

    def resume(self) -> None:
        """Send the buckets that were held back in the open window.

        If it opens at STEP, they wait for the next window: ranks may have made different numbers of steps, and
        the next exchange includes the changes of this one.
        """
        held = self._exchanges.pop_held()
        for bucket in held if self._window.opens is not Point.STEP else ():
            self._exchanges.send(bucket)

    def _expect_all(self) -> None:
        """Expect all tensors again."""
        for bucket in self._exchanges.buckets:
            self._waiting[bucket.index].update(bucket.views)

    def _send_complete(self) -> None:
        """Send the next buckets in the order of the plan, up to the first one that waits for a tensor."""
        for bucket in self._exchanges.buckets[self._left :]:
            if self._waiting[bucket.index]:
                return
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        self._left += 1
        self._exchanges.send(bucket)

    def _complete_with_zeros(self) -> None:
        missing = []
        for bucket, waiting in zip(self._exchanges.buckets, self._waiting, strict=True):
            missing += [name for name in bucket.views if name in waiting] if waiting else []
            for name in waiting:
                bucket.views[name][...] = 0
            waiting.clear()
        if missing:
            self._exchanges.warn_of_zeros(missing)
        self._send_complete()

    def _close(self) -> None:
        if self._left:
            self._end()
            self._left = 0
            self._expect_all()

    def _end(self) -> None:
        """Wait for the buckets that have left and write them back."""
        if self._exchanges.sent:
            self._exchanges.wait()
        self._exchanges.commit()


class DelayedSchedule:
    """Exchanges that outlive steps: each begins after an optimizer step, and ends a number of steps later.

    Training waits for an exchange in the step in which it ends, which is the same on all ranks, and in no step
    before. Buckets leave in the order of the plan; several may be under way.
    """

    def __init__(self, window: Window, exchanges: Exchanges) -> None:
        self._delay, self._exchanges = window.delay, exchanges
        self._under_way: dict[int, Future[Any]] = {}
        """The exchanges that this rank has submitted and not written back, by the index of their bucket."""

    def ready(self, name: str) -> None:
        """Nothing: exchanges begin after the optimizer has stepped."""

    def ready_bucket(self, index: int) -> None:
        """Nothing: exchanges begin after the optimizer has stepped."""

    def at(self, point: Point) -> None:
        """At STEP, begin the exchanges that are due; at FORWARD, end those whose steps are over. Collective."""
        if point is Point.FORWARD:
            self.settle()
        elif point is Point.STEP:
            self.settle()
            for bucket in self._exchanges.buckets:
                self._step(bucket)

    def settle(self) -> None:
        """End the exchanges whose steps are over; the others continue while weights are read or saved."""
        self._end(most=1)

    def before_saving(self, *, phase_ends: bool) -> None:
        """Wait until no exchange changes the states. What is under way continues with the same steps to go.

        It ends if the phase does: a state of the next phase has no place for it.
        """
        if phase_ends:
            self.finish()
        self.settle()
        self._exchanges.wait()

    def before_loading(self) -> None:
        """Wait until the lane is idle. Nothing is written back, in case the state is refused."""
        self._exchanges.wait()

    def finish(self) -> None:
        """End all exchanges now. Collective."""
        self._end(most=self._delay + 1)

    def stop(self) -> None:
        """End all exchanges now. Collective."""
        self.finish()

    def resume(self) -> None:
        """Nothing: the next exchange begins at STEP."""

    def _step(self, bucket: Bucket) -> None:
        self._exchanges.pending(bucket).count()
        future = self._exchanges.send_if_due(bucket, self._delay)
        if future is not None:
            self._under_way[bucket.index] = future

    def _end(self, *, most: int) -> None:
        """Wait for the exchanges with at most `most` steps to go, see `Pending`, and write them back."""
        ending = [b for b in self._exchanges.buckets if 0 < self._exchanges.pending(b).steps <= most]
        if not ending:
            return
        # There is no future for what was received before a checkpoint.
        futures = [self._under_way[b.index] for b in ending if b.index in self._under_way]
        self._exchanges.wait_for(futures)
        self._exchanges.write_back(ending)
        for bucket in ending:
            self._exchanges.pending(bucket).end()
            self._under_way.pop(bucket.index, None)


class RoundSchedule:
    """Exchanges in rounds, which begin and end after optimizer steps. No step waits for them."""

    def __init__(self, rounds: Rounds, exchanges: Exchanges) -> None:
        self._interval_s, self._exchanges = rounds.interval_s, exchanges
        self._under_way: list[Future[Any]] = []
        """Futures of the current round: whether all ranks are stopping, then the exchanges of the buckets."""
        self._began_s = float("-inf")

    def ready(self, name: str) -> None:
        """Nothing: rounds wait for no tensor."""

    def ready_bucket(self, index: int) -> None:
        """Nothing: rounds wait for no tensor."""

    def at(self, point: Point) -> None:
        """At STEP, end the round if its exchanges are done, and begin the next if it is due."""
        if point is not Point.STEP:
            return
        if self._under_way:
            if not all(future.done() for future in self._under_way):
                return
            self._end()
        if not self._exchanges.stopped and time.monotonic() - self._began_s >= self._interval_s:
            self._begin(stopping=False)

    def settle(self) -> None:
        """Nothing: a round continues while weights are read or saved."""

    def before_saving(self, *, phase_ends: bool) -> None:
        """Nothing: a round changes no state that checkpoints hold."""

    def before_loading(self) -> None:
        """Finish the rounds on all ranks, without writing back. Collective."""
        self.finish(commit=False)

    def stop(self) -> None:
        """Run rounds until all ranks stop. Collective."""
        self.finish()

    def resume(self) -> None:
        """Nothing: the next round begins at STEP."""

    def finish(self, *, commit: bool = True) -> None:
        """Run rounds until all ranks finish. Collective."""
        if self._exchanges.stopped:
            return
        agreed = self._end(commit=commit) if self._under_way else False
        while not agreed:
            self._begin(stopping=True)
            agreed = self._end(commit=commit)

    def _begin(self, *, stopping: bool) -> None:
        self._began_s = time.monotonic()
        self._exchanges.begin_round()
        self._under_way = [self._exchanges.lane.submit(self._agree, stopping)]
        self._under_way += [self._exchanges.send(bucket) for bucket in self._exchanges.buckets]

    def _agree(self, stopping: bool) -> bool:
        """Whether all ranks are stopping. Collective."""
        return bool(self._exchanges.lane.comm.allreduce(np.array(stopping, np.uint8), op="min"))

    def _end(self, *, commit: bool = True) -> bool:
        """Wait for the round and write it back; return whether all ranks were stopping when it began."""
        self._exchanges.wait()
        if commit:
            self._exchanges.commit()
        agreed, self._under_way = self._under_way[0].result(), []
        return bool(agreed)


ExchangeSchedule: TypeAlias = "StepSchedule | DelayedSchedule | RoundSchedule"


def schedule_of(exchanges: Exchanges) -> ExchangeSchedule:
    """Return the schedule for the algorithm of the current phase."""
    window = exchanges.algorithm.window
    if isinstance(window, Rounds):
        return RoundSchedule(window, exchanges)
    return DelayedSchedule(window, exchanges) if window.delay else StepSchedule(window, exchanges)
