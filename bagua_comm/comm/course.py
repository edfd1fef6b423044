"""The course of a call: guard, comparison, hooks, transport, counters.

All calls run through `Course.execute`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import get_ident
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from .. import arrays, trace
from ..arrays import Array, DType
from ..errors import ArrayError, BaguaError, CommError, CommMismatch
from ..flight import recorder as flight
from ..flight.batches import fewer_batches
from ..flight.entries import numbered
from ..hooks import CallView, Ranks
from ..transports.base import Move, Transport, check_timeout
from . import guard as guards
from .agreement import compare_calls
from .arguments import EMPTY
from .base import CommBase
from .public_methods import current_method


def describe(head: flight.Head) -> str:
    """Return a call with its arguments, as errors and comparisons between ranks show it."""
    _, _, name, dtype, shape, detail, _ = head
    parts = [] if dtype is None else [f"{dtype.name}{list(shape)}"]
    parts += [f"{key}={value}" for key, value in detail.items()]
    return f"{name}({', '.join(parts)})"


class _Progress(NamedTuple):
    """A call that has failed, and how far it had come."""

    comm: CommBase
    x: Array
    target: Array
    record: flight.Record
    sent_bytes: int
    """Bytes that its transport had sent before."""
    start_ns: int
    moving: bool | None
    """Whether it may have sent anything."""
    ranges: trace.Ranges | None


class Course:
    """A call whose arguments are checked; the base of `Call` and of `PreparedCall`."""

    __slots__ = (
        "_span_arguments", "_wire_bytes", "checked", "dtype", "head", "name", "payload", "source", "transport",
    )  # fmt: skip

    name: str
    """The method, as all messages show it."""
    head: flight.Head
    """The description of the call for the flight recorder."""
    transport: Transport
    signature: Callable[[], str]
    """Returns the text that is equal on all ranks if they all make this call."""
    dtype: DType
    """The dtype of `x`."""
    payload: int
    """Bytes to count for the call."""
    source: Array | None
    """The array that hooks see as sent if it is not `x`; `EMPTY` for none."""
    checked: bool
    """Whether `connect(check=True)` compares the call here; else its method compares."""
    _span_arguments: dict[str, Any]
    """Arguments of the latest span, shared by spans of calls that sent as many bytes."""
    _wire_bytes: int
    """Bytes that the latest call sent; -1 before the first."""

    def execute(self, comm: CommBase, move: Move, x: Array, target: Array, timeout_s: float | None = None) -> Any:
        """Run the call on its communicator. `move` sends and receives; it takes `x` and `target`.

        Returns:
            The result of `move`.

        Raises:
            ArrayError: `timeout_s` is not a positive number.
            CommError: Another thread is in a call, the communicator is closed, or it belongs to a parent process;
                or the call failed.
        """
        name, head, transport, guard = self.name, self.head, self.transport, comm.guard
        if timeout_s is not None:
            check_timeout(name, timeout_s, ArrayError)
        observed = comm.hooks.all or comm.check or trace.wanted()
        if guard.closed or guard.forks != guards.forks:
            guard.check(name)
        me = get_ident()
        moving = ranges = None
        sent, start = transport.sent_bytes, time.perf_counter_ns()
        record = [head, 0, comm.context.bucket_step, start, None, None]
        if guard.owner[0] != me:
            raise guard.refusal(name)
        outermost, guard.is_free = guard.is_free, False
        try:
            if outermost:
                guard.enter(name, self.signature, timeout_s)
            record[flight.NUMBER] = guard.count(head[1])
            comm.flight.ring.append(record)
            if observed:
                if comm.hooks.all:
                    comm.hooks.call("before", self._view(comm, record, x))
                if comm.check and self.checked:
                    moving = True
                    compare_calls(comm.host, describe(head))
                start = time.perf_counter_ns()
                if trace.wanted():
                    ranges = trace.show(name, head[5], x.nbytes)
            moving = True
            result = move(x, target)
            record[flight.END] = end = time.perf_counter_ns()
            if outermost:
                guard.leave()
        except BaseException as exc:
            self._fail(_Progress(comm, x, target, record, sent, start, moving, ranges), exc, outermost)
            raise
        finally:
            if outermost:
                guard.is_free = True
                del guard.owner[0]
        wire = transport.sent_bytes - sent
        if wire != self._wire_bytes:
            self._span_arguments = {
                **head[5],
                "bytes": self.payload,
                "wire_bytes": wire,
                "dtype": arrays.dtype_name(self.dtype),
            }
            self._wire_bytes = wire
        comm.tracer.add(name, start, end, self._span_arguments)
        comm.counters.by_operation[name].add(self.payload, wire, end - start)
        if observed:
            if comm.hooks.all:
                filled, seconds = None if target is EMPTY else target, (end - start) / 1e9
                comm.hooks.call("after", self._view(comm, record, x, result=filled, seconds=seconds))
            if ranges is not None:
                ranges.close()
        return result

    def _view(self, comm: CommBase, record: flight.Record, x: Array, **outcome: Any) -> CallView:
        """Return the call as hooks see it."""
        source = x if self.source is None else self.source
        bucket, bucket_step = comm.context.bucket, comm.context.bucket_step
        return CallView(
            cast(Ranks, comm),
            self.name,
            record[flight.NUMBER],
            self.head[1],
            comm.group,
            MappingProxyType(self.head[5]),
            None if source is EMPTY else source,
            bucket,
            None if bucket_step is None else bucket_step[1],
            **outcome,
        )

    # Failure ----------------------------------------------------------------------------------------

    def _fail(self, progress: _Progress, error: BaseException, outermost: bool) -> None:
        """End a failed call: release the transports, name the call in the error, write the flight record."""
        comm, x, target, record, sent, start, moving, ranges = progress
        if moving and record[flight.END] is None and not isinstance(error, BaguaError):
            self.transport.interrupted(error, (x, target))
        if outermost:
            comm.guard.leave(made=bool(moving))
        record[flight.END] = end = time.perf_counter_ns()
        if moving:
            counts = {"bytes": self.payload, "wire_bytes": self.transport.sent_bytes - sent}
            reason = {"dtype": arrays.dtype_name(self.dtype), "error": type(error).__name__}
            comm.tracer.add(self.name, start, end, {**self.head[5], **counts, **reason})
        record[flight.ERROR] = f"{type(error).__name__}: {error}"
        record.append(current_method())
        if isinstance(error, CommError) and error.args:
            self._explain(comm, record, error)
        if comm.hooks.all:
            seconds = (end - start) / 1e9
            comm.hooks.call("failed", self._view(comm, record, x, error=error, seconds=seconds))
        if ranges is not None:
            ranges.close()

    def _explain(self, comm: CommBase, record: flight.Record, error: CommError) -> None:
        """Add the call, the call before it and the folder of the flight records to the message of an error.

        The public method that the user called comes before the call inside of it. All numbers are those of the
        flight recorder.
        """
        call, method = numbered(describe(self.head), record[flight.NUMBER], comm.group), current_method()
        text = _of_fewer_batches(comm, error) or error.args[0]
        before = comm.flight.call_before(record)
        text += f"; before it: {before}" if before else ""
        error.args = (f"{f'{method} ({call})' if method else call}: {text}",)
        folder = comm.flight.failed(error)
        if folder is not None:
            error.args = (f"{error.args[0]}; for what all ranks did: python -m bagua_comm diagnose {folder}",)


def _of_fewer_batches(comm: CommBase, error: CommError) -> str:
    """The message if a rank has left after all exchanges of earlier steps: it had fewer batches. Else ""."""
    if not isinstance(error, CommMismatch) or error.left is None or comm.context.bucket_step is None:
        return ""
    bucket, step = comm.context.bucket_step
    if bucket > 0:
        return ""
    members = comm.flight.groups[comm.group]
    return fewer_batches(members[error.left], step, "left", [members[comm.rank]], step + 1)
