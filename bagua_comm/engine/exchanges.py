"""Exchanges of buckets: sent on the lane, waited for, and written back."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from ..algorithms.base import (
    Algorithm,
    Pending,
    Point,
    Rounds,
    State,
    Window,
    keeps_weights,
    name_of,
)
from ..bucket import Bucket
from ..comm import Communicator
from ..comm.weights import Weigh
from ..errors import ArrayError, warn
from ..execution.futures import abandon
from ..execution.lane import Lane
from ..trace import ExchangeCounters, Tracer
from .mean_weights import MeanWeights
from .monitor import HealthMonitor
from .replaced import History, Replacements, compare

COMPARE_STEPS = 16
"""Number of steps after which ranks compare again which weights they have replaced, at the next exchange."""


class Exchanges:
    """Sends buckets on the lane, waits for them, and writes back the results.

    Args:
        lane: The lane on which exchanges run, with the communicator that they use.
        tracer: Where their spans go.
        owner: The engine. Once it is gone, nobody can ask for exchanges under way. None if it stays.
        warn: Whether to warn of tensors that never became ready.
        counters: Counters of all exchanges of this rank, and of how long training waits for them.
        health: Gathers rows of step times; None if nothing does.
    """

    def __init__(
        self,
        lane: Lane[Communicator],
        tracer: Tracer,
        owner: object | None = None,
        *,
        warn: bool = False,
        counters: ExchangeCounters | None = None,
        health: HealthMonitor | None = None,
    ) -> None:
        self.lane, self.tracer = lane, tracer
        if owner is not None:
            weakref.finalize(owner, abandon, lane, lane.comm.flight.unretrieved).atexit = False
        self._warn, self._warned = warn, set[str]()
        self.replacements = Replacements(lane.comm.rank)
        """The weights that the program has replaced."""
        self._compares = False
        """Whether ranks compare those; in rounds, where ranks step at their own pace, `RoundSchedule` does."""
        self.mean_weights = MeanWeights(lane, tracer)
        """The weights of this rank in the means."""
        self._health = health
        self._gathers_rows = False
        """Whether rows of step times are gathered before the first bucket; never in rounds."""
        self._compared_at = self._stopped_at = 0
        self.counters = ExchangeCounters() if counters is None else counters
        """All exchanges of this rank, and how long training waited for them."""
        self.step = self.began = 0
        """Numbers of training steps that have ended: now, and when the current phase began."""
        self.wrote: Callable[[], object] = lambda: None
        """Called after results were written back."""
        self.exchanged = 0
        """The number of steps that had ended when ranks communicated last, with the step of that exchange."""
        self._named: dict[str, str] = {}
        """Arguments of the spans of exchanges: the algorithm, and its payload."""
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
        self.algorithm = algorithm
        self.mean_weights.begin_phase(algorithm, states)
        self._named = {"algorithm": name_of(algorithm), "payload": self.algorithm.payload}
        self.buckets, self.states, self.began = list(buckets), list(states), began
        self.sent, self.held = [], []
        window, self._compared_at = self.algorithm.window, began
        self.overwrites = isinstance(window, Window) and not window.delay and window.closes is Point.FORWARD
        """Whether results replace weights that nobody may change meanwhile."""
        name, copies = self._named["algorithm"], keeps_weights(algorithm)
        self.replacements.begin(name if self.algorithm.payload == "weight" else "", self.buckets, copies=copies)
        self._compares = copies and not isinstance(window, Rounds)
        if self._health is not None:
            self._gathers_rows = self._health.is_on and not isinstance(window, Rounds)
            if not self._gathers_rows:
                self._health.end()

    def set_step(self, step: int) -> None:
        """Set the number of steps that have ended."""
        self.step = step

    def stop(self) -> None:
        """Hold buckets back from now on."""
        self.stopped, self._stopped_at = True, self.step

    def resume(self) -> None:
        """Send buckets again."""
        self.stopped = False

    @property
    def common_step(self) -> int:
        """The number of steps that ranks have made together, except in rounds: while stopped, that of `stop`."""
        return self._stopped_at if self.stopped else self.step

    def begin_round(self) -> None:
        """Forget the buckets of the last round."""
        self.sent = []

    def pop_held(self) -> list[Bucket]:
        """Return the buckets that were held back, and forget them."""
        held, self.held = self.held, []
        return held

    def send(self, bucket: Bucket) -> Future[object]:
        """Prepare the exchange of a bucket and submit it to the lane, or hold it back if stopped."""
        self._enter_step(bucket)
        if self.stopped:
            self.held.append(bucket)
            return Future()
        self.sent.append(bucket)
        return self._submit(bucket)

    def send_if_due(self, bucket: Bucket, delay: int) -> Future[object] | None:
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
                f"the window of {self.algorithm} has a delay, but its state has no Pending; expected "
                "one as its field `pending`"
            )
        return found

    def _enter_step(self, bucket: Bucket) -> None:
        bucket.step = self.step - self.began
        bucket.padding[...] = 0  # a NaN in the last block may have spread to the padding

    def _submit(self, bucket: Bucket) -> Future[object]:
        state = self.states[bucket.index]
        communicates = self.algorithm.communicates(bucket.step, state)
        history, weigh = self._history_to_compare() if communicates else None, self.mean_weights.of_pass
        if self.algorithm.payload == "weight":
            weighs = self.algorithm.weighs and communicates
            weigh = self.mean_weights.since_exchange(bucket) if weighs else None
        self.algorithm.begin(bucket, state)
        began = time.perf_counter_ns()
        step = self.began + bucket.step
        if self._gathers_rows and bucket.index == 0 and communicates and self._health is not None:
            self._health.gather_rows(weighed=self.mean_weights.fit_any_share)
        future: Future[object] = self.lane.submit(
            self._exchange, self.algorithm, bucket, state, step=step, history=history, weigh=weigh
        )
        self.counters.wait.time_ns += time.perf_counter_ns() - began  # a lane without a thread runs it here
        return future

    def _history_to_compare(self) -> History | None:
        """The replacements of weights that ranks compare before this exchange; None in most exchanges."""
        if not self._compares or self.step - self._compared_at < COMPARE_STEPS:
            return None
        self._compared_at = self.step
        return self.replacements.take_history()

    def compare_replacements(self) -> None:
        """Raise on all ranks unless they have replaced their weights alike; see `replaced.compare`.

        Collective. The lane is idle.
        """
        if self._compares and not self.stopped:
            compare(self.lane.comm, self.replacements.take_history())

    def warn_of_zeros(self, names: Sequence[str]) -> None:
        """Warn that zeros take the place of the gradients `names`, once for each of them."""
        new = [name for name in names if name not in self._warned] if self._warn else []
        if not new:
            return
        self._warned.update(new)
        missing = f"{new[0]!r} was" if len(new) == 1 else f"{new[0]!r} and {len(new) - 1} more were"
        gradient = "its gradient" if len(new) == 1 else "their gradients"
        warn(
            f"in step {self.step}, {missing} not ready on rank {self.lane.comm.rank}: zeros are averaged in "
            f"place of {gradient}; call engine.ready({new[0]!r}) when it is complete"
        )

    def _exchange(
        self,
        algorithm: Algorithm,
        bucket: Bucket,
        state: State,
        step: int,
        history: History | None = None,
        weigh: Weigh | None = None,
    ) -> None:
        """Run an exchange, on the lane. Collective.

        Args:
            algorithm: The algorithm.
            bucket: The bucket.
            state: Its state.
            step: The training step in which the bucket left.
            history: What `replaced.compare` compares before.
            weigh: The weights of the ranks in the mean; None if it is plain.
        """
        comm = self.lane.comm
        if history is not None:
            compare(comm, history)
        before, began, nbytes = comm.counters.total(), time.perf_counter_ns(), bucket.nbytes
        detail = {"bucket": bucket.index, "bytes": nbytes, "step": step}
        self.lane.note(**detail)
        context = comm.context
        try:
            context.weighting = None if weigh is None else weigh()
            context.bucket, context.bucket_step = bucket, (bucket.index, step)
            with self.tracer.span("exchange", **detail, **self._named):
                algorithm.exchange(bucket, comm, state)
        finally:  # no call before these assignments: a signal handler could raise there
            context.bucket = context.bucket_step = context.weighting = None
        after = comm.counters.total()
        if after.calls > before.calls:
            spent_ns = time.perf_counter_ns() - began
            self.counters.exchange.add(nbytes, after.wire_bytes - before.wire_bytes, spent_ns)
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

    def wait_for(self, futures: Sequence[Future[object]]) -> None:
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
        if buckets and self.algorithm.defines("commit"):
            before = self.replacements.before_writing() if self.overwrites else []
            for bucket in buckets:
                self.algorithm.commit(bucket, self.states[bucket.index])
            self.replacements.written(before)
            self.counters.commits += 1
            self.wrote()

    def drop(self) -> None:
        """Wait for the buckets that were sent, and write nothing back."""
        if self.sent:
            self.wait()
        self.sent, self.held = [], []

    def commit(self) -> None:
        """Write back the results of the buckets that were sent. Buckets that were held back stay local."""
        self.write_back(self.sent)
        for bucket in self.held:
            self.algorithm.skip(bucket, self.states[bucket.index])
        self.sent, self.held = [], []
