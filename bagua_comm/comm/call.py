"""The plumbing of one call: its arguments as a transport takes them, and the call while it runs.

A method of the communicator makes a call like this:

    call = Call(comm, "allreduce", x, op=op)      # `x` as an array, and the transport that moves it
    call.into(out, call.x.shape)                  # where the result goes; `out` and `x` may be one array
    move = call.transport.allreduce
    call.run(lambda: move(call.x, call.target, op))     # one thread at a time, compared, timed, counted
    return call.result                            # `out`, filled; or a new array of the library of `x`

What it worked out for one call it keeps for others that are alike, in `Kinds`: then `Kinds.repeat` looks at no
more than the arrays themselves.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Hashable, Sequence
from threading import get_ident
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from .. import arrays, refusals, trace
from ..arrays import Array, as_array, as_real, check_reduction, returned
from ..bucket import Bucket
from ..errors import ArrayError, BaguaError, CommError, UnsupportedError
from ..flight import recorder as flight
from ..hooks import CallView
from ..transports.base import Move, Transport, check_timeout
from . import guard as turns
from .agreement import compare_calls

if TYPE_CHECKING:
    from .communicator import Communicator

R = TypeVar("R")

NOTHING: Array = np.empty(0, np.uint8)
"""The array of calls that have none."""

_KINDS = 256
"""The largest number of kinds of calls that a communicator remembers."""

_READY, _OWN, _WRITABLE = 0x101, 0x4, 0x400
"""Bits of NumPy's `flags.num`: an array is contiguous and aligned; it owns its memory; it can be written to."""


class Landing(NamedTuple):
    """Where the result of a call goes."""

    out: Any
    """What the caller gave for it; None if nothing."""
    value: Array
    """The same as an array; a new one if nothing was given."""
    target: Array
    """What the call fills: `value` itself if that is contiguous."""


_NOWHERE = Landing(None, NOTHING, NOTHING)


class Call:
    """One call of a communicator.

    Args:
        comm: The communicator.
        name: The method that was called; it stands in every message.
        x: The array that the call sends.
        argument: The name of `x`.
        timeout_s: How long it may wait for peers; as long as the communicator says if None.
        detail: Further arguments: what ranks compare, and what the span of the call shows.

    Raises:
        ArrayError: `timeout_s` is not a positive number.
        UnsupportedError: `x` is not an array that a transport of `comm` moves.
    """

    __slots__ = (
        "_compared",
        "_moving",
        "_record",
        "_sent",
        "_shown",
        "_source",
        "_start",
        "comm",
        "detail",
        "given",
        "kind",
        "landing",
        "name",
        "payload",
        "target",
        "timeout_s",
        "transport",
        "x",
    )

    def __init__(
        self,
        comm: Communicator,
        name: str,
        x: Any,
        argument: str = "x",
        *,
        timeout_s: float | None = None,
        **detail: Any,
    ) -> None:
        if timeout_s is not None:
            check_timeout(name, timeout_s, ArrayError)
        self.comm, self.name, self.detail, self.timeout_s = comm, name, detail, timeout_s
        self.given = x
        """`x` as the caller gave it: what the result is like."""
        self.x: Array = x if type(x) is np.ndarray else as_argument(name, argument, x)
        self.transport = carrier(comm.transports, name, argument, self.x)
        self.payload: int | None = None
        """Bytes to count for this call; those of `x` if None."""
        self._compared = True
        self._source: Array | None = None
        self.landing = _NOWHERE
        self.target: Array = NOTHING
        self.kind: Kind | None = None
        """What it has in common with calls before it, if that is known."""

    @classmethod
    def on_host(cls, comm: Communicator, name: str, *, payload: int | None = None, **detail: Any) -> Call:
        """A call without an array, over the transport of host arrays."""
        call = cls(comm, name, NOTHING, **detail)
        call.payload = payload
        return call

    @classmethod
    def of(cls, comm: Communicator, name: str, x: Array, transport: Transport, **detail: Any) -> Call:
        """A call on an array that `transport` is known to move."""
        call = cls.__new__(cls)
        call.comm, call.name, call.detail, call.transport = comm, name, detail, transport
        call.given = call.x = x
        call.payload, call._compared, call.landing, call.target = None, True, _NOWHERE, NOTHING
        call.timeout_s = call._source = call.kind = None
        return call

    @classmethod
    def again(cls, comm: Communicator, kind: Kind, x: Array, target: Array, timeout_s: float | None) -> Call:
        """A call of a known kind; `target` is what it fills."""
        call = cls.of(comm, kind.name, x, kind.transport, **kind.detail)
        call.kind, call.target, call.timeout_s, call._source = kind, target, timeout_s, kind.source
        call.payload = kind.payload
        return call

    # Arguments --------------------------------------------------------------------------------------

    def check_reduction(self, op: str) -> None:
        """Raise unless `op` reduces arrays such as `x`; see `arrays.check_reduction`."""
        check_reduction(self.name, op, self.x.dtype)
        if op == "prod" and self.x.dtype.kind == "c" and not isinstance(self.x, np.ndarray):
            raise UnsupportedError(
                f"{self.name}: there is no op='prod' for {self.x.dtype} on a device; reduce a copy on the host, "
                "x.get()"
            )

    def into(self, out: Any | None, shape: tuple[int, ...], *, any_shape: bool = False) -> None:
        """Have the result go to `out`; to a new array of `shape` if None. `target` is contiguous."""
        self.landing = landing(self.name, "out", out, shape, self.x, any_shape=any_shape)
        self.target = self.landing.target

    def in_place(self) -> None:
        """Let `x` be `target` if both are the same memory; raise if they overlap in any other way."""
        x, target = self.x, self.target
        if x is target or not arrays.overlap(x, target):
            return
        if not arrays.is_contiguous(x) or not arrays.same_memory(x, target):
            raise ArrayError(f"{self.name}: out overlaps x; pass out=x, or memory apart from x")
        self.x = target

    def contiguous(self) -> None:
        """Copy `x` if it is not contiguous."""
        self.x = arrays.contiguous(self.x)

    def check_overlap(self, own: Array) -> None:
        """Raise if `x` and `target` overlap, unless one of them is `own`, its part of the other."""
        x, target = self.x, self.target
        if arrays.overlap(x, target) and not (arrays.same_memory(x, own) or arrays.same_memory(target, own)):
            raise ArrayError(f"{self.name}: out overlaps x outside of this rank's own chunk")

    @property
    def result(self) -> Any:
        """`out`, with the result in it; if there is none, a new array of the library that `x` belonged to."""
        out, value, target = self.landing
        if value is not target:
            value[...] = target
        if out is not None:
            return out
        return target if type(target) is type(self.given) else returned(self.given, target)

    # The call while it runs -------------------------------------------------------------------------

    def uncompared(self) -> Call:
        """This call, not compared when it begins: its method compares what is needed."""
        self._compared = False
        return self

    def run(self, move: Callable[[], R]) -> R:
        """Make the call: `move` is all that sends and receives. Returns what it returns."""
        comm, turn = self.comm, self.comm.turn
        self._sent, self._moving = self.transport.sent_bytes, False
        self._shown: trace.Ranges | None = None
        self._start = start = time.perf_counter_ns()
        head = self._head() if self.kind is None else self.kind.head
        self._record: flight.Record = [head, 0, comm.work.place, start, None, None]
        record = self._record
        if turn.closed or turn.forks != turns.forks:
            turn.check(self.name)
        me = get_ident()
        if turn.owner[0] != me:
            raise turn.refusal(self.name)
        outermost, turn.is_free = turn.is_free, False
        try:
            if outermost:
                turn.begin(self.name, self.signature, self.timeout_s)
            record[flight.NUMBER] = turn.count(head[1])
            comm.flight.ring.append(record)
            if comm.hooks.all:
                comm.hooks.call("before", self._view())
                self._start = time.perf_counter_ns()
            if comm.check and self._compared:
                self._moving = True
                self.compare()
                self._start = time.perf_counter_ns()
            if trace.wanted():
                self._shown = trace.show(self.name, self.detail, self.x.nbytes)
            self._moving = True
            result = move()
            record[flight.END] = time.perf_counter_ns()
            if outermost:
                turn.end()
        except BaseException as exc:
            self._fail(exc, outermost)
            raise
        finally:
            if outermost:
                turn.is_free = True
                del turn.owner[0]
        self._count(record[flight.END])
        turn.last_call = self.name
        if comm.hooks.all:
            filled = None if self.target is NOTHING else self.target
            comm.hooks.call("after", self._view(result=filled, seconds=(record[flight.END] - self._start) / 1e9))
        if self._shown is not None:
            self._shown.close()
        return result

    def _count(self, end: int, **more: Any) -> None:
        """Add a span and, unless the call has failed, count it."""
        comm = self.comm
        wire = self.transport.sent_bytes - self._sent
        payload = self.x.nbytes if self.payload is None else self.payload
        arguments = {"bytes": payload, "wire_bytes": wire, "dtype": arrays.dtype_name(self.x.dtype), **more}
        comm.tracer.add(self.name, self._start, end, self.detail | arguments)
        if not more:
            comm.counters.by_operation[self.name].add(payload, wire, end - self._start)

    def _head(self) -> flight.Head:
        """What the flight recorder keeps of the call that is the same for others like it."""
        dtype = None if self.x is NOTHING else self.x.dtype
        collective, enqueues = self.name not in turns.POINT_TO_POINT, self.transport.enqueues
        return self.comm.group, collective, self.name, dtype, self.x.shape, self.detail, enqueues

    def _fail(self, error: BaseException, outermost: bool) -> None:
        """The call ends with an error: have its message name the call, and write down what this rank did last."""
        comm = self.comm
        if self._moving and self._record[flight.END] is None and not isinstance(error, BaguaError):
            self.transport.interrupted(error, (self.x, self.target))
        if outermost:
            comm.turn.end(made=self._moving)
        self._record[flight.END] = end = time.perf_counter_ns()
        if self._moving:
            self._count(end, error=type(error).__name__)
        self._record[flight.ERROR] = f"{type(error).__name__}: {error}"
        if isinstance(error, CommError) and error.args:
            self._explain(error)
        if comm.hooks.all:
            seconds = (self._record[flight.END] - self._start) / 1e9
            comm.hooks.call("failed", self._view(error=error, seconds=seconds))
        if self._shown is not None:
            self._shown.close()

    def _explain(self, error: CommError) -> None:
        """Have the message of an error name the call, and the place of the records of all ranks."""
        comm, turn = self.comm, self.comm.turn
        before = f"{turn.last_call} #{turn.calls - 1}" if turn.calls > 1 else "nothing"
        error.args = (f"{self} #{turn.calls}: {error.args[0]}; before it: {before}",)
        folder = comm.flight.failed(error)
        if folder is not None:
            error.args = (f"{error.args[0]}; for what all ranks did: python -m bagua_comm diagnose {folder}",)

    def sends(self, x: Array | None) -> None:
        """Say what this rank sends, if that is not `x` as it is when the call begins; None for nothing."""
        self._source = NOTHING if x is None else x

    def _view(self, **outcome: Any) -> CallView:
        """The call, as hooks see it."""
        comm, record = self.comm, self._record
        source = self.x if self._source is None else self._source
        bucket, place = comm.work.bucket, comm.work.place
        return CallView(
            comm,
            self.name,
            record[flight.NUMBER],
            record[flight.HEAD][1],
            comm.group,
            MappingProxyType(self.detail),
            None if source is NOTHING else source,
            bucket,
            None if place is None else place[1],
            **outcome,
        )

    def compare(self) -> None:
        """Raise `CommMismatch` on all ranks unless all are about to make this call. Collective."""
        compare_calls(self.comm.host, str(self))

    def signature(self) -> str:
        """What must be the same on all ranks if they all make this call."""
        parts = [arrays.dtype_name(self.x.dtype)] if self.x is not NOTHING else [""]
        parts += [f"{key}={self.detail[key]}" for key in ("codec", "op", "root") if key in self.detail]
        return f"{self.name}({', '.join(parts)})"

    def __str__(self) -> str:
        parts = [f"{self.x.dtype.name}{list(self.x.shape)}"] if self.x is not NOTHING else []
        parts += [f"{key}={value}" for key, value in self.detail.items()]
        return f"{self.name}({', '.join(parts)})"

    def make(self, move: Move, *arguments: Hashable, into: Into = "out") -> None:
        """Make the call by `move`, or shorter, and remember it for `Kinds.repeat`, by its further `arguments`."""
        op, root = self.detail.get("op", ""), self.detail.get("root")
        if not op or as_real(self.x, op) is self.x:  # else `move` reduces another view
            move = self.transport.fast_path(self.name, self.x, op, root) or move
        self.run(lambda: move(self.x, self.target))
        self.comm.kinds.add(arguments, Kind(self, move, into), self.given)


Into: TypeAlias = Literal["out", "x", "nothing"]
"""What a call fills on this rank: `out`, `x` itself, or nothing at all."""


class Kind:
    """What calls of one kind have in common: the first works it out, and later ones use it.

    Args:
        call: The first call.
        move: Moves the bytes.
        into: What a call fills.
    """

    __slots__ = (
        "detail", "dtype", "head", "into", "move", "name", "payload", "shape", "signature", "source",
        "told", "transport", "wire_bytes",
    )  # fmt: skip

    def __init__(self, call: Call, move: Move, into: Into) -> None:
        self.name, self.detail, self.transport = call.name, call.detail, call.transport
        self.move, self.into = move, into
        self.dtype, self.shape = call.x.dtype, call.landing.value.shape
        self.payload = call.x.nbytes if call.payload is None else call.payload
        self.head, self.signature = call._head(), functools.partial(str, call.signature())
        self.source = NOTHING if call._source is NOTHING else None
        """See `Call.sends`."""
        self.told: dict[str, Any] = {}
        """The arguments of the latest span; spans of calls that sent as many bytes share them."""
        self.wire_bytes = -1

    def target(self, x: Array, out: Any) -> Any:
        """What a call on these arrays fills, which need no copy; None if there is more to be checked."""
        numbers = x.flags.num
        if numbers & _READY != _READY:
            return None
        if self.into == "nothing":
            return NOTHING
        if self.into == "x":
            return x if numbers & _WRITABLE else None
        if out is x:
            return x if numbers & _WRITABLE and self.shape == x.shape else None
        if out is None:
            return np.empty(self.shape, self.dtype)
        if type(out) is not np.ndarray or out.dtype != self.dtype or out.shape != self.shape:
            return None
        others = out.flags.num
        ready = others & (_READY | _WRITABLE) == _READY | _WRITABLE
        return out if ready and (numbers & others & _OWN or not np.may_share_memory(x, out)) else None

    def make(self, comm: Communicator, x: Array, target: Array, timeout_s: float | None) -> None:
        """Make a call of this kind on the communicator that made the first.

        What `Call.again(...).run(...)` does, in half the time, where nobody looks on.
        """
        move, turn = self.move, comm.turn
        if timeout_s is not None:
            check_timeout(self.name, timeout_s, ArrayError)
        if comm.hooks.all or comm.check or trace.wanted():
            Call.again(comm, self, x, target, timeout_s).run(lambda: move(x, target))
            return
        if turn.closed or turn.forks != turns.forks:
            turn.check(self.name)
        transport, head, me = self.transport, self.head, get_ident()
        sent, start = transport.sent_bytes, time.perf_counter_ns()
        record = [head, 0, comm.work.place, start, None, None]
        if turn.owner[0] != me:
            raise turn.refusal(self.name)
        outermost, turn.is_free = turn.is_free, False
        try:
            if outermost:
                turn.begin(self.name, self.signature, timeout_s)
            record[flight.NUMBER] = turn.count(head[1])
            comm.flight.ring.append(record)
            move(x, target)
            record[flight.END] = end = time.perf_counter_ns()
            if outermost:
                turn.end()
        except BaseException as exc:
            call = Call.again(comm, self, x, target, timeout_s)
            call._sent, call._record, call._start, call._shown = sent, record, start, None
            call._moving = record[flight.NUMBER] != 0
            call._fail(exc, outermost)
            raise
        finally:
            if outermost:
                turn.is_free = True
                del turn.owner[0]
        turn.last_call = name = self.name
        wire = transport.sent_bytes - sent
        if wire != self.wire_bytes:
            arguments = {"bytes": self.payload, "wire_bytes": wire, "dtype": arrays.dtype_name(self.dtype)}
            self.told, self.wire_bytes = self.detail | arguments, wire
        comm.tracer.add(name, start, end, self.told)
        comm.counters.by_operation[name].add(self.payload, wire, end - start)


class Kinds:
    """The kinds of calls on contiguous host arrays that a communicator has made.

    A kind is the name of a method, its further arguments, and the dtype and the shape of `x`.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Kind] = {}

    def add(self, arguments: Hashable, kind: Kind, x: Array) -> None:
        """Keep a kind."""
        if type(x) is np.ndarray:
            if len(self._known) >= _KINDS:
                self._known.clear()
            self._known[kind.name, arguments, x.dtype, x.shape] = kind

    def repeat(
        self, comm: Communicator, name: str, arguments: Hashable, x: Any, out: Any, timeout_s: float | None
    ) -> Any:
        """Make a call on `comm`, whose kinds these are, if it is of a known one.

        Returns:
            What it has filled; None, and nothing was done, if there is more to be checked than `x` and `out`.
        """
        if type(x) is not np.ndarray:
            return None
        try:
            kind = self._known.get((name, arguments, x.dtype, x.shape))
        except TypeError:  # an argument is not what it should be
            return None
        if kind is None:
            return None
        target = kind.target(x, out)
        if target is None:
            return None
        kind.make(comm, x, target, timeout_s)
        return target

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()


class Work:
    """What the calls of a communicator are made for now, if an engine makes them."""

    __slots__ = ("bucket", "place")

    def __init__(self) -> None:
        self.bucket: Bucket | None = None
        self.place: tuple[int, int] | None = None
        """The number of the bucket, and the training step."""


# ---------------------------------------------------------------------------------------------------
# Arrays
# ---------------------------------------------------------------------------------------------------


def as_argument(call: str, name: str, x: Any) -> Array:
    """View argument `name` of `call` as an array."""
    try:
        return as_array(x)
    except UnsupportedError as exc:
        raise UnsupportedError(f"{call}: {name}: {exc}") from exc


def carrier(transports: Sequence[Transport], call: str, name: str, x: Array) -> Transport:
    """The first transport that moves `x`, argument `name` of `call`."""
    if not arrays.is_movable(x.dtype):
        raise UnsupportedError(
            f"{call}: {name} has dtype {x.dtype}, expected integers, floats, bool or complex in native byte "
            f"order; {refusals.of_dtype(x.dtype)}"
        )
    for transport in transports:
        if transport.moves(x):
            return transport
    names = ", ".join(transport.name for transport in transports)
    raise UnsupportedError(
        f"{call}: {name} is a {arrays.library(x)} array, but this communicator's transports ({names}) do not "
        "move such arrays"
    )


def landing(
    call: str, name: str, out: Any | None, shape: tuple[int, ...], like: Array, *, any_shape: bool = False
) -> Landing:
    """Where the result of `call` goes: to `out`, or to a new array of `shape` if that is None.

    Raises:
        ArrayError: `out` does not fit the shape, or `like` in dtype and library, or cannot be written to.
        UnsupportedError: `out` is not an array.
    """
    if out is None:
        target = arrays.empty(shape, like.dtype, like=like)
        return Landing(None, target, target)
    value = out if type(out) is type(like) else as_argument(call, name, out)
    fits = value.size == math.prod(shape) if any_shape else value.shape == shape
    if not fits:
        wanted = f"{math.prod(shape)} elements" if any_shape else f"{shape}"
        raise ArrayError(f"{call}: {name} has shape {value.shape}, expected {wanted}")
    if value.dtype != like.dtype:
        raise ArrayError(f"{call}: {name} has dtype {value.dtype}, expected {like.dtype}")
    if type(value) is not type(like) and arrays.library(value) != arrays.library(like):
        raise ArrayError(f"{call}: {name} is a {arrays.library(value)} array, expected {arrays.library(like)}")
    check_writable(call, name, out, value)
    target = value if arrays.is_contiguous(value) else arrays.empty(value.shape, value.dtype, like=value)
    return Landing(out, value, target)


def check_writable(call: str, name: str, x: object, value: Array) -> None:
    """Raise `ArrayError` unless `value`, the array of argument `x`, can be written to."""
    if isinstance(x, np.generic) or (isinstance(value, np.ndarray) and not value.flags.writeable):
        raise ArrayError(f"{call}: {name} {refusals.of_target(x)}")
    if 0 in value.strides and arrays.repeats(value):
        raise ArrayError(f"{call}: {name} has several elements in one place of memory; pass a copy of it")


def check_mutable(call: str, name: str, x: object, value: Array) -> None:
    """Raise `ArrayError` if arrays of the type of `x` are never written to: then no rank can receive into one."""
    read_only = isinstance(value, np.ndarray) and not value.flags.writeable
    if isinstance(x, np.generic) or (read_only and not isinstance(x, np.ndarray)):
        raise ArrayError(f"{call}: {name} {refusals.of_target(x)}")


def check_apart(call: str, written: Sequence[Array], read: Sequence[Array]) -> None:
    """Raise `ArrayError` if an array that is written to overlaps another array."""
    extents = [(*arrays.extent(x), True) for x in written if x.size]
    extents += [(*arrays.extent(x), False) for x in read if x.size]
    end_of_all = end_of_written = 0
    for start, end, is_written in sorted(extents):
        if start < (end_of_all if is_written else end_of_written):
            raise ArrayError(f"{call}: an array that is written to overlaps another array")
        end_of_all = max(end_of_all, end)
        end_of_written = max(end_of_written, end) if is_written else end_of_written


def is_same(a: Array, b: Array) -> bool:
    """Whether two arrays are the same elements."""
    return a is b or (arrays.extent(a) == arrays.extent(b) and a.strides == b.strides)


def alike(calls: Sequence[Call]) -> list[list[int]]:
    """Group arrays that go in one message: the indices of those of one library and dtype."""
    groups: dict[Hashable, list[int]] = {}
    for i, call in enumerate(calls):
        groups.setdefault((id(call.transport), arrays.library(call.x), call.x.dtype), []).append(i)
    return list(groups.values())


def run_as_one(calls: Sequence[Call], move: Callable[[Transport, Array], None], outs: Sequence[Array]) -> None:
    """Make one call in place of several: their arrays, of one dtype, are copied into one, and that to `outs`."""
    call, xs = calls[0], [call.x for call in calls]
    comm, sizes = call.comm, [x.size for x in xs]

    def move_one() -> None:
        move(call.transport, call.x)
        for out, part in zip(outs, arrays.parts(call.x, sizes) if outs else (), strict=True):
            out[...] = part.reshape(out.shape)

    def copy_and_move() -> None:  # in the turn of this thread, since scratch is in use
        call.x = comm.scratch.take("many", (sum(sizes),), xs[0].dtype, like=xs[0])
        call.detail["shapes"] = [list(x.shape) for x in xs]
        for x, part in zip(xs, arrays.parts(call.x, sizes), strict=True):
            part.reshape(x.shape)[...] = x
        call.target = call.x
        call.run(move_one)

    comm.turn.run(call.name, call.signature, copy_and_move, call.timeout_s)
