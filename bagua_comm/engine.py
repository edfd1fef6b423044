"""The engine: runs an algorithm over buckets, on a lane, in step with training.

Buckets leave in plan order on every rank, whatever order they became ready in, so that the ranks' calls
always match. The engine owns a duplicate of the communicator and the lane that uses it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from . import arrays
from .algorithms.base import Algorithm, Point
from .arrays import Array
from .bucket import Bucket, Plan, make_buckets
from .comm import Communicator
from .errors import ArrayError, CommMismatch
from .lane import Lane, ThreadLane
from .trace import Counter, Tracer

__all__ = ["Engine", "Lane", "ThreadLane"]


class Engine:
    """Exchanges the buckets of a plan by an algorithm.

    Collective. All ranks give the same plan and algorithm; they are compared. Call `ready` when a tensor
    is complete, and `at` when training reaches a point, on every rank in every step. Close it, or use it
    as a context manager.

    Args:
        comm: The ranks. The engine works on a duplicate of it.
        algorithm: What to exchange, when and how.
        plan: Which tensors travel together.
        storage: The memory of the buckets: one flat array each. The engine keeps views of it.
        tracer: Where spans go; the communicator's by default.

    Raises:
        ArrayError: `storage` does not fit the plan.
        CommMismatch: The ranks' plans or algorithms differ.
        UnsupportedError: The algorithm cannot exchange the dtype of a tensor; it is named.
    """

    def __init__(
        self,
        comm: Communicator,
        algorithm: Algorithm,
        plan: Plan,
        storage: Sequence[Array],
        *,
        tracer: Tracer | None = None,
    ) -> None:
        if isinstance(algorithm, type) or not hasattr(algorithm, "exchange"):
            raise ArrayError(f"algorithm is {algorithm!r}, expected an algorithm such as ByteGrad()")
        for bucket in plan.buckets if hasattr(algorithm, "check") else ():
            try:
                algorithm.check(bucket.dtype)
            except TypeError as exc:
                names = ", ".join(repr(tensor.name) for tensor in bucket.tensors[:3])
                raise type(exc)(f"tensor {names}: {exc}") from exc
        self.algorithm, self.plan = algorithm, plan
        self.buckets = make_buckets(plan, storage)
        self._bucket_of = {name: bucket for bucket in self.buckets for name in bucket.views}
        self._compare(comm)
        self._tracer = tracer or comm.tracer
        self._lane = comm.lane()
        self._comm: Communicator = self._lane.comm
        self._states = [algorithm.init(bucket, self._comm) for bucket in self.buckets]
        self.counter = Counter()
        """What was exchanged so far: payload and wire bytes of this rank."""
        self._start_step()

    def ready(self, name: str) -> None:
        """Say that a tensor's values are complete in this step.

        A bucket whose tensors all are complete leaves as soon as all buckets before it have left.

        Raises:
            ArrayError: There is no such tensor, or it was complete already.
        """
        waiting = self._waiting_for.get(name)
        if waiting is None:
            close = difflib.get_close_matches(name, self._bucket_of)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ArrayError(f"ready: there is no tensor {name!r}{hint}")
        if self.algorithm.window.opens is not Point.GRADIENT:
            return
        if name not in waiting:
            raise ArrayError(f"ready: {name!r} was complete already in this step")
        waiting.discard(name)
        self._submit_complete()

    def at(self, point: Point) -> None:
        """Say that training has reached a point: open and close what opens and closes there.

        Collective. At `BACKWARD`, tensors that did not become ready are sent as zeros: no rank waits
        for ever for one that another rank does not use.

        Raises:
            CommError: An exchange failed.
        """
        if not isinstance(point, Point):
            raise ArrayError(f"at: point is {point!r}, expected a Point")
        window = self.algorithm.window
        if point is Point.BACKWARD and window.opens is Point.GRADIENT:
            self._complete_with_zeros()
        if point is window.closes and self._submitted:
            self.flush()
            for bucket in self._submitted:
                if hasattr(self.algorithm, "commit"):
                    self.algorithm.commit(bucket, self._states[bucket.index])
            self._start_step()
        if point is window.opens and point is not Point.GRADIENT and not self._submitted:
            for bucket in self.buckets:
                self._submit(bucket)

    def flush(self) -> None:
        """Wait for everything that was submitted; raises the first error among it."""
        with self._tracer.span("wait for exchanges"):
            self._lane.wait()

    def replan(self, plan: Plan, storage: Sequence[Array] | None = None) -> list[Array]:
        """Go on with another plan for the same tensors; their values move along.

        Collective. Call it between steps. Algorithm state starts anew.

        Args:
            plan: The new plan.
            storage: Memory for it; if None, new arrays of the library of the old ones.

        Returns:
            The memory now used, one flat array per bucket.

        Raises:
            ArrayError: The plan has other tensors, or `storage` does not fit.
            CommMismatch: The ranks' plans differ.
        """
        self.flush()
        specs = {tensor for bucket in self.plan.buckets for tensor in bucket.tensors}
        if specs != {tensor for bucket in plan.buckets for tensor in bucket.tensors}:
            raise ArrayError("replan: the new plan has other tensors than the old one")
        if storage is None:
            like = self.buckets[0].flat
            storage = [
                arrays.namespace(like).zeros(spec.size, arrays.dtype_named(spec.dtype)) for spec in plan.buckets
            ]
        buckets = make_buckets(plan, storage)
        for bucket in buckets:
            for name, view in bucket.views.items():
                view[...] = self._bucket_of[name].views[name]
        self.plan, self.buckets = plan, buckets
        self._bucket_of = {name: bucket for bucket in buckets for name in bucket.views}
        self._compare(self._comm)
        self._states = [self.algorithm.init(bucket, self._comm) for bucket in buckets]
        self._start_step()
        return list(storage)

    def state_dict(self) -> dict[str, Any]:
        """What the algorithm keeps between steps, on this rank: plain arrays and numbers, copied."""
        self.flush()
        return {
            "plan": self.plan.to_json(),
            "steps": [bucket.step for bucket in self.buckets],
            "states": [
                {name: value.copy() for name, value in _arrays_of(state).items()} for state in self._states
            ],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave on this rank.

        Raises:
            ArrayError: It was saved under another plan.
        """
        if Plan.from_json(saved["plan"]) != self.plan:
            raise ArrayError("load_state_dict: saved under another plan; replan first")
        self.flush()
        for bucket, step in zip(self.buckets, saved["steps"], strict=True):
            bucket.step = step
        for state, values in zip(self._states, saved["states"], strict=True):
            for name, value in _arrays_of(state).items():
                value[...] = values[name]

    def close(self) -> None:
        """Finish what was submitted, and free the lane and its communicator.

        Collective.
        """
        self._lane.close()

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

    def _compare(self, comm: Communicator) -> None:
        mine = (self.plan.digest(), repr(self.algorithm))
        for rank, other in enumerate(comm.allgather_object(mine)):
            if other != mine:
                what = "plan" if other[0] != mine[0] else "algorithm"
                raise CommMismatch(
                    f"rank {comm.rank} and rank {rank} have different {what}s: "
                    + (f"{mine[1]} and {other[1]}" if what == "algorithm" else "the tensors differ")
                )

    def _start_step(self) -> None:
        self._waiting = [set(bucket.views) for bucket in self.buckets]
        self._waiting_for = {name: names for names in self._waiting for name in names}
        self._submitted: list[Bucket] = []

    def _submit_complete(self) -> None:
        for bucket in self.buckets[len(self._submitted) :]:
            if self._waiting[bucket.index]:
                return
            self._submit(bucket)

    def _complete_with_zeros(self) -> None:
        for bucket, waiting in zip(self.buckets, self._waiting, strict=True):
            for name in waiting:
                bucket.views[name][...] = 0
            waiting.clear()
        self._submit_complete()

    def _submit(self, bucket: Bucket) -> None:
        self._submitted.append(bucket)
        self._lane.submit(self._exchange, bucket, self._states[bucket.index])

    def _exchange(self, bucket: Bucket, state: Any) -> None:
        before = self._comm.counters.total().wire_bytes
        with self._tracer.span("exchange", bucket=bucket.index, bytes=bucket.nbytes, step=bucket.step):
            self.algorithm.exchange(bucket, self._comm, state)
        bucket.step += 1
        self.counter.add(bucket.nbytes, self._comm.counters.total().wire_bytes - before)


def _arrays_of(state: Any) -> dict[str, Array]:
    """The arrays among the fields of a dataclass, by name."""
    if not dataclasses.is_dataclass(state):
        return {}
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {name: value for name, value in fields.items() if hasattr(value, "dtype")}
