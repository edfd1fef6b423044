"""Calls whose arguments are checked: guard, comparison, hooks, transport, counters.

All calls run through `PreparedCall.run`, once or, on other arrays of the same dtype and shape, many times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from threading import get_ident
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
from numpy import ndarray

from .. import arrays, trace
from ..arrays import Array
from ..errors import ArrayError, BaguaError, CommError, CommMismatch
from ..flight import recorder as flight
from ..flight.batches import fewer_batches
from ..flight.entries import COMPARED, numbered
from ..flight.recorder import END, NUMBER
from ..hooks import CallView, Ranks
from ..transports.base import Transport
from ..transports.call_state import check_timeout
from .agreement import compare_calls
from .arguments import EMPTY
from .base import CommBase
from .public_methods import current_method

Fills: TypeAlias = Literal["out", "x", "nothing"]
"""The argument that a call fills on this rank."""

READY, _OWN, WRITABLE = 0x101, 0x4, 0x400
"""Bits of NumPy's `flags.num`: the array is contiguous and aligned; owns its memory; can be written to."""


def describe(head: flight.Head) -> str:
    """Return a call with its arguments, as errors and comparisons between ranks show it."""
    _, _, name, dtype, shape, detail, _ = head
    parts = [] if dtype is None else [f"{dtype.name}{list(shape)}"]
    parts += [f"{key}={value}" for key, value in detail.items()]
    return f"{name}({', '.join(parts)})"


def signature(head: flight.Head) -> str:
    """Return the text that is equal on all ranks if they all make this call."""
    _, _, name, dtype, shape, detail, _ = head
    parts = ["" if dtype is None else arrays.dtype_name(dtype)]
    # Encoded arrays of other sizes may have as many bytes.
    is_encoded = "codec" in detail or "average" in detail
    parts += [f"{np.prod(shape, dtype=int)} elements"] if is_encoded and "counts" not in detail else []
    parts += [f"{key}={detail[key]}" for key in COMPARED if key in detail]
    parts += ["with counts"] if "counts" in detail and "root" not in detail else []
    return f"{name}({', '.join(parts)})"


def run_if_known(
    comm: CommBase, name: str, arguments: Hashable, x: Any, out: Any, timeout_s: float | None
) -> Any:
    """Run a call on contiguous host arrays if the communicator has a prepared one.

    Returns:
        The array that was filled. None, and nothing was done, if there is no prepared call or these arrays need
        more checks or copies.
    """
    if type(x) is not ndarray:
        return None
    try:
        call: PreparedCall | None = comm.call_cache.get((name, arguments, x.dtype, x.shape))
    except TypeError:  # an argument of a wrong type, which cannot be hashed
        return None
    if call is None:
        return None
    target = call.output(x, out)
    if target is None:
        return None
    call.run(comm, x, target, timeout_s)
    return target


def begin_if_known(comm: CommBase, x: Array, op: str) -> bool:
    """Begin an allreduce of `x` in place ahead of its call, which another thread makes; return whether it has.

    See `Transport.begin_allreduce`. No call begins that hooks see, or ranks compare, before it moves a byte.
    """
    if type(x) is not np.ndarray or comm.hooks.all or comm.check:
        return False
    call: PreparedCall | None = comm.call_cache.get(("allreduce", (op,), x.dtype, x.shape))
    return call is not None and call.begin(x, op)


class _Attempt(NamedTuple):
    """A call that has failed, and how far it had come."""

    x: Array
    target: Array
    record: flight.Record
    sent_bytes: int
    """Bytes that its transport had sent before."""
    start_ns: int
    moving: bool
    """Whether it may have sent anything."""
    ranges: trace.Ranges | None


class PreparedCall:
    """A call that can be run on arrays of one dtype and shape.

    Args:
        head: Its description for the flight recorder.
        transport: The transport that moves the arrays.
        move: Sends and receives; takes `x` and the array to fill.
        payload: Bytes to count for the call.
        source: The array that hooks see as sent if it is not `x`; `EMPTY` for none.
        is_compared: Whether `connect(check=True)` compares the call here; else its method compares.
        fills: The argument that it fills.
        shape: The shape of `out`.
    """

    __slots__ = (
        "_fills", "_is_compared", "_move", "_payload", "_shape", "_source", "_span_arguments", "_transport",
        "_wire_bytes", "distance", "dtype", "head", "name",
    )  # fmt: skip

    def __init__(
        self,
        head: flight.Head,
        transport: Transport,
        move: Callable[..., object],
        payload: int,
        source: Array | None,
        *,
        is_compared: bool,
        fills: Fills = "nothing",
        shape: tuple[int, ...] = (),
    ) -> None:
        self.head, self.name = head, head[2]
        self.dtype = EMPTY.dtype if head[3] is None else head[3]
        self._transport, self._move, self._payload = transport, move, payload
        self._source, self._is_compared = source, is_compared
        self._fills, self._shape = fills, shape
        self.distance: int | None = None
        """The bytes from `x` to `out`, where they may overlap."""
        self._wire_bytes = -1
        """Bytes that the latest run sent; -1 before the first."""
        self._span_arguments: dict[str, Any] = {}
        """Arguments of the latest span, shared by spans of runs that sent as many bytes."""

    def output(self, x: Array, out: Any) -> Any:
        """Return the array that a call on these arrays fills; None if they need more checks or copies."""
        numbers = x.flags.num
        if numbers & READY != READY:
            return None
        if self._fills == "nothing":
            return EMPTY
        if self._fills == "x":
            return x if numbers & WRITABLE else None
        if out is x:
            return x if numbers & WRITABLE and self._shape == x.shape else None
        if out is None:
            return np.empty(self._shape, self.dtype)
        if type(out) is not ndarray or out.shape != self._shape:
            return None
        if out.dtype is not self.dtype and out.dtype != self.dtype:
            return None
        others = out.flags.num
        if others & (READY | WRITABLE) != READY | WRITABLE:
            return None
        apart = numbers & others & _OWN or not np.may_share_memory(x, out)
        return out if apart or self.distance == arrays.address(out) - arrays.address(x) else None

    def signature(self) -> str:
        """See `signature`."""
        return signature(self.head)

    def begin(self, x: Array, op: str) -> bool:
        """See `begin_if_known`."""
        return self.output(x, x) is x and self._transport.begin_allreduce(self.signature(), x, op)

    def run(self, comm: CommBase, x: Array, target: Array, timeout_s: float | None = None, *more: object) -> Any:
        """Run the call on its communicator; `move` also takes `more`.

        Returns:
            The result of `move`.

        Raises:
            ArrayError: `timeout_s` is not a positive number.
            CommError: Another thread is in a call, the communicator is closed, or it belongs to a parent process;
                or the call failed.
        """
        name, head, transport, guard = self.name, self.head, self._transport, comm.guard
        if timeout_s is not None:
            timeout_s = check_timeout(name, timeout_s, ArrayError)
        observed = comm.hooks.all or comm.check or (trace.listeners and trace.wanted())
        moving, ranges = False, None
        with guard.lock(name) as outermost:
            sent, collective, start = transport.sent_bytes, head[1], time.perf_counter_ns()
            record = [head, 0, comm.context.bucket_step, start, None, None]
            try:
                if outermost:
                    guard.begin(name, collective, self.signature, timeout_s)
                numbers = guard.calls
                numbers[collective] = record[NUMBER] = numbers[collective] + 1
                comm.flight.ring.append(record)
                if observed:
                    if comm.hooks.all:
                        comm.hooks.call("before", self._view(comm, record, x))
                    if comm.check and self._is_compared:
                        moving = True
                        compare_calls(comm.host, describe(head))
                    start = time.perf_counter_ns()
                    if trace.wanted():
                        ranges = trace.show(name, head[5], x.nbytes)
                moving = True
                result = self._move(x, target, *more)
                record[END] = end = time.perf_counter_ns()
                if outermost:
                    guard.end()
            except BaseException as exc:
                attempt = _Attempt(x, target, record, sent, start, moving, ranges)
                self._fail(comm, attempt, exc, outermost=outermost)
                raise
        wire = transport.sent_bytes - sent
        if wire != self._wire_bytes:
            self._span_arguments = {
                **head[5],
                "bytes": self._payload,
                "wire_bytes": wire,
                "dtype": arrays.dtype_name(self.dtype),
            }
            self._wire_bytes = wire
        comm.tracer.add(name, start, end, self._span_arguments)
        comm.counters.by_operation[name].add(self._payload, wire, end - start)
        if observed:
            if comm.hooks.all:
                filled, seconds = None if target is EMPTY else target, (end - start) / 1e9
                comm.hooks.call("after", self._view(comm, record, x, result=filled, seconds=seconds))
            if ranges is not None:
                ranges.close()
        return result

    def _view(self, comm: CommBase, record: flight.Record, x: Array, **outcome: Any) -> CallView:
        """Return the call as hooks see it."""
        source = x if self._source is None else self._source
        bucket, bucket_step = comm.context.bucket, comm.context.bucket_step
        return CallView(
            cast(Ranks, comm),
            self.name,
            record[NUMBER],
            self.head[1],
            comm.group,
            MappingProxyType(self.head[5]),
            None if source is EMPTY else source,
            bucket,
            None if bucket_step is None else bucket_step[1],
            **outcome,
        )

    # Failure ----------------------------------------------------------------------------------------

    def _fail(self, comm: CommBase, attempt: _Attempt, error: BaseException, *, outermost: bool) -> None:
        """End a failed call: release the transports, name the call in the error, write the flight record."""
        x, target, record, sent, start, moving, ranges = attempt
        if moving and record[END] is None and not isinstance(error, BaguaError):
            self._transport.interrupted(error, (x, target))
        if outermost:
            comm.guard.end(made=moving)
            comm.guard.thread = get_ident()  # the lock is held: hooks may make calls
        record[END] = end = time.perf_counter_ns()
        if moving:
            counts = {"bytes": self._payload, "wire_bytes": self._transport.sent_bytes - sent}
            reason = {"dtype": arrays.dtype_name(self.dtype), "error": type(error).__name__}
            comm.tracer.add(self.name, start, end, {**self.head[5], **counts, **reason})
        self._note_error(comm, record, error)
        if comm.hooks.all:
            comm.hooks.call("failed", self._view(comm, record, x, error=error, seconds=(end - start) / 1e9))
        if outermost:
            comm.guard.thread = 0
        if ranges is not None:
            ranges.close()

    def later_failure(self, comm: CommBase) -> Callable[[BaseException], None]:
        """A function that records and explains an error of what this run begins; to be called within `move`."""
        record = comm.flight.record_of(self.head)

        def note(error: BaseException) -> None:
            record[END] = time.perf_counter_ns()
            self._note_error(comm, record, error)

        return note

    def _note_error(self, comm: CommBase, record: flight.Record, error: BaseException) -> None:
        record[flight.ERROR] = f"{type(error).__name__}: {error}"
        record.append(current_method())
        if isinstance(error, CommError) and error.args:
            self._explain(comm, record, error)

    def _explain(self, comm: CommBase, record: flight.Record, error: CommError) -> None:
        """Add the call, the call before it and the folder of the flight records to the message of an error.

        The public method that the user called comes before the call inside of it. All numbers are those of the
        flight recorder.
        """
        call, method = numbered(describe(self.head), record[NUMBER], comm.group), current_method()
        text = _of_fewer_batches(comm, error) or error.args[0]
        for transport in comm.transports:
            transport.name_failure(f"{call} on rank {comm.rank}: {type(error).__name__}: {text}")
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
