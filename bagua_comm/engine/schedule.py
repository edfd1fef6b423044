"""When exchanges begin and end: in every step (`StepSchedule`), or in rounds beside training (`RoundSchedule`).

The engine reports to its schedule which tensors are ready and which points training has reached. The schedule
decides when buckets leave and when they are written back; `Exchanges` does both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import numpy as np

from ..algorithms.base import Algorithm, Point, Rounds, State, Window, WithDefaults, with_defaults
from ..bucket import Bucket
from ..comm import Communicator
from ..errors import ArrayError
from ..lane import Lane
from ..trace import ExchangeCounters, Tracer


class Exchanges:
    """Sends buckets on the lane, waits for them, and writes back the results.

    Args:
        lane: Where exchanges run, and the communicator that they use.
        tracer: Where their spans go.
    """

    def __init__(self, lane: Lane[Communicator], tracer: Tracer) -> None:
        self.lane, self.tracer = lane, tracer
        self.counters = ExchangeCounters()
        """What was exchanged so far, and how long training waited."""
        self.step = self.began = 0
        """How many training steps have ended, and how many had when the algorithm of this phase began."""
        self.stopped = False
        """While it is stopped, buckets that are sent are held back."""
        self.sent: list[Bucket] = []
        """The buckets that have left in the open window, or in the round under way."""
        self.held: list[Bucket] = []
        """The buckets that would have left in the open window, had it not been stopped."""

    def begin_phase(
        self, algorithm: Algorithm, buckets: Sequence[Bucket], states: Sequence[State], began: int
    ) -> None:
        """From now on exchange these buckets, by this algorithm; `states` has one state for each."""
        self.algorithm: WithDefaults = with_defaults(algorithm)
        self.buckets, self.states, self.began = list(buckets), list(states), began
        self.sent, self.held = [], []

    def send(self, bucket: Bucket) -> Future[Any]:
        """Prepare the exchange of a bucket, and submit it to the lane; or hold it back, while stopped."""
        state, bucket.step = self.states[bucket.index], self.step - self.began
        bucket.padding[...] = 0  # a NaN in the last block may have spread to the padding
        if self.stopped:
            self.held.append(bucket)
            return Future()
        self.sent.append(bucket)
        self.algorithm.begin(bucket, state)
        began = time.perf_counter_ns()
        future = self.lane.submit(self._exchange, self.algorithm, bucket, state)
        self.counters.wait.time_ns += time.perf_counter_ns() - began  # much, on a lane without a thread
        return future

    def _exchange(self, algorithm: WithDefaults, bucket: Bucket, state: State) -> None:
        """Runs on the lane. Collective."""
        comm = self.lane.comm
        before, began = comm.counters.total(), time.perf_counter_ns()
        detail = {"bucket": bucket.index, "bytes": bucket.nbytes, "step": bucket.step}
        self.lane.note(**detail)
        context = comm.context
        try:
            context.bucket, context.bucket_step = bucket, (bucket.index, self.began + bucket.step)
            with self.tracer.span("exchange", **detail):
                algorithm.exchange(bucket, comm, state)
        finally:  # nothing is called before it is done, as at the end of a turn
            context.bucket = context.bucket_step = None
        after = comm.counters.total()
        if after.calls > before.calls:
            spent_ns = time.perf_counter_ns() - began
            self.counters.exchange.add(bucket.nbytes, after.wire_bytes - before.wire_bytes, spent_ns)

    @property
    def communicates(self) -> bool:
        """Whether ranks exchange something in this step, and wait for each other; the same on all ranks."""
        if self.stopped or isinstance(self.algorithm.window, Rounds):
            return False
        return any(self.algorithm.communicates(self.step - self.began, state) for state in self.states)

    def wait(self) -> None:
        """Wait for all tasks on the lane; raises the first error among them."""
        began = time.perf_counter_ns()
        try:
            with self.tracer.span("wait for exchanges"):
                self.lane.wait()
        finally:
            self.counters.wait.add(0, 0, time.perf_counter_ns() - began)

    def commit(self) -> None:
        """Write back the results of the buckets that were sent, and leave those that were held back local."""
        if self.sent and self.algorithm.commits:
            for bucket in self.sent:
                self.algorithm.commit(bucket, self.states[bucket.index])
            self.counters.commits += 1
        for bucket in self.held:
            self.algorithm.skip(bucket, self.states[bucket.index])
        self.sent, self.held = [], []


class StepSchedule:
    """A window that opens and closes in every step: training waits for the exchanges where it closes."""

    def __init__(self, window: Window, exchanges: Exchanges) -> None:
        self._window, self._exchanges = window, exchanges
        self._left = 0
        """How many buckets have left in the open window, or were held back."""
        self._waiting: list[set[str]] = [set() for _ in exchanges.buckets]
        self._waiting_for = {
            name: self._waiting[bucket.index] for bucket in exchanges.buckets for name in bucket.views
        }
        self._expect_all()

    def ready(self, name: str) -> None:
        """Say that a tensor is complete; buckets leave, in order, as soon as all of their tensors are complete.

        Raises:
            ArrayError: The tensor was complete already.
        """
        if self._window.opens is not Point.GRADIENT:
            return
        waiting = self._waiting_for[name]
        if name not in waiting:
            raise ArrayError(f"ready: {name!r} was complete already in this step")
        waiting.remove(name)
        if not waiting:
            self._send_complete()

    def ready_bucket(self, index: int) -> None:
        """Say that all tensors of a bucket are complete.

        Raises:
            ArrayError: A tensor was complete already.
        """
        if self._window.opens is not Point.GRADIENT:
            return
        waiting, bucket = self._waiting[index], self._exchanges.buckets[index]
        if len(waiting) != len(bucket.views):
            name = next(name for name in bucket.views if name not in waiting)
            raise ArrayError(f"ready_bucket: {name!r} was complete already in this step")
        waiting.clear()
        self._send_complete()

    def at(self, point: Point) -> None:
        """Open or close the window, if it opens or closes at this point. Collective."""
        opens, closes = self._window.opens, self._window.closes
        if point is Point.BACKWARD and opens is Point.GRADIENT:
            self._complete_with_zeros()
        if point is closes:
            self._close()
        if point is opens and point is not Point.GRADIENT and not self._left:
            for bucket in self._exchanges.buckets:
                self._send(bucket)

    def settle(self) -> None:
        """Close a window that is open between two steps."""
        if self._window.closes is Point.FORWARD:
            self._close()

    def before_saving(self) -> None:
        """Wait until no exchange changes the states any more."""
        self.settle()
        self._exchanges.wait()

    def before_loading(self) -> None:
        """Let the lane become idle. If nothing is loaded after all, the window closes at its point."""
        self._exchanges.wait()

    def finish(self) -> None:
        """Close the window, if it is open."""
        self._close()

    def stop(self) -> None:
        """Finish the exchanges under way. The window stays open: what is complete later in it stays local."""
        self._end()

    def resume(self) -> None:
        """Let the buckets leave that were held back in the open window.

        Where it opens at STEP, they wait for the next one: ranks may have made different numbers of steps, and
        what training has changed goes with the next exchange as well.
        """
        held, self._exchanges.held = self._exchanges.held, []
        for bucket in held if self._window.opens is not Point.STEP else ():
            self._exchanges.send(bucket)

    def _expect_all(self) -> None:
        """Wait for all tensors again."""
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
        for bucket, waiting in zip(self._exchanges.buckets, self._waiting, strict=True):
            for name in waiting:
                bucket.views[name][...] = 0
            waiting.clear()
        self._send_complete()

    def _close(self) -> None:
        if self._left:
            self._end()
            self._left = 0
            self._expect_all()

    def _end(self) -> None:
        """Wait for the buckets that have left, and write them back."""
        if self._exchanges.sent:
            self._exchanges.wait()
        self._exchanges.commit()


class RoundSchedule:
    """Rounds that begin and end when the optimizer has stepped: no step waits for them."""

    def __init__(self, rounds: Rounds, exchanges: Exchanges) -> None:
        self._interval_s, self._exchanges = rounds.interval_s, exchanges
        self._under_way: list[Future[Any]] = []
        """The future of whether all ranks are stopping, then those of the buckets' exchanges."""
        self._began_s = float("-inf")

    def ready(self, name: str) -> None:
        """Rounds wait for no tensor."""

    def ready_bucket(self, index: int) -> None:
        """Rounds wait for no tensor."""

    def at(self, point: Point) -> None:
        """At STEP, end the round if its exchanges are done, and begin the next one if it is due."""
        if point is not Point.STEP:
            return
        if self._under_way:
            if not all(future.done() for future in self._under_way):
                return
            self._end()
        if not self._exchanges.stopped and time.monotonic() - self._began_s >= self._interval_s:
            self._begin(stopping=False)

    def settle(self) -> None:
        """A round goes on, whatever is read or saved meanwhile."""

    def before_saving(self) -> None:
        """A round goes on: what it changes is in no checkpoint."""

    def before_loading(self) -> None:
        """Finish the rounds on all ranks, without writing back. Collective."""
        self.finish(commit=False)

    def stop(self) -> None:
        """Make rounds until all ranks stop. Collective."""
        self.finish()

    def resume(self) -> None:
        """The next round begins at STEP."""

    def finish(self, *, commit: bool = True) -> None:
        """Make rounds until all ranks finish. Collective."""
        if self._exchanges.stopped:
            return
        agreed = self._end(commit=commit) if self._under_way else False
        while not agreed:
            self._begin(stopping=True)
            agreed = self._end(commit=commit)

    def _begin(self, *, stopping: bool) -> None:
        self._began_s = time.monotonic()
        self._exchanges.sent = []
        self._under_way = [self._exchanges.lane.submit(self._agree, stopping)]
        self._under_way += [self._exchanges.send(bucket) for bucket in self._exchanges.buckets]

    def _agree(self, stopping: bool) -> bool:
        """Whether all ranks are stopping. Collective."""
        return bool(self._exchanges.lane.comm.allreduce(np.array(stopping, np.uint8), op="min"))

    def _end(self, *, commit: bool = True) -> bool:
        """Wait for the round, and write it back; returns whether all ranks were stopping when it began."""
        self._exchanges.wait()
        if commit:
            self._exchanges.commit()
        agreed, self._under_way = self._under_way[0].result(), []
        return bool(agreed)


ExchangeSchedule: TypeAlias = "StepSchedule | RoundSchedule"


def schedule_of(exchanges: Exchanges) -> ExchangeSchedule:
    """The pace of the algorithm whose phase has begun."""
    window = exchanges.algorithm.window
    return RoundSchedule(window, exchanges) if isinstance(window, Rounds) else StepSchedule(window, exchanges)
