"""One call of a communicator: its arguments, and how it is run.

A method of a communicator makes a call like this:

    call = Call(comm, "allreduce", x, op=op)       # `x` as an array, and the transport that moves it
    call.writes_to(out, call.x.shape)              # the output; `out` and `x` may be one array
    move = call.transport.allreduce
    call.run(lambda x, target: move(x, target, op))     # guarded, compared, timed, counted
    return call.result                             # `out`, filled; or a new array of the library of `x`

`run` makes a `PreparedCall` of it, and runs that. `run_and_cache` in place of `run` keeps the prepared call, so
that `run_if_known` runs the next one like it without these steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from .. import arrays
from ..arrays import Array, as_real, check_reduction, returned
from ..errors import ArrayError, UnsupportedError
from ..flight import recorder as flight
from ..transports.base import Transport
from ..transports.call_state import check_timeout
from ..transports.flow import Move
from .agreement import compare_calls
from .arguments import (
    EMPTY,
    NO_OUTPUT,
    as_argument,
    check_mutable,
    check_writable,
    resolve_output,
    transport_for,
)
from .base import CommBase
from .guard import POINT_TO_POINT
from .prepared import Fills, PreparedCall, describe, signature


class Call:
    """The arguments of one call of a communicator, while they are checked.

    Args:
        comm: The communicator.
        name: The method, as all messages show it.
        x: The array that the call sends; by default none, and the call goes over the transport of host arrays.
        argument: The name of `x`.
        timeout_s: How long it may wait for peers; the limit of the communicator if None.
        payload: Bytes to count for this call; those of `x` if None.
        transport: The transport that moves `x`, if it is known and `x` an array of its library.
        detail: Further arguments, which ranks compare and the span of the call shows.

    Raises:
        ArrayError: `timeout_s` is not a positive number.
        UnsupportedError: `x` is not an array that a transport of `comm` moves.
    """

    def __init__(
        self,
        comm: CommBase,
        name: str,
        x: object = EMPTY,
        argument: str = "x",
        *,
        timeout_s: float | None = None,
        payload: int | None = None,
        transport: Transport | None = None,
        **detail: Any,
    ) -> None:
        if timeout_s is not None:
            timeout_s = check_timeout(name, timeout_s, ArrayError)
        self.comm, self.name, self.detail, self.timeout_s = comm, name, detail, timeout_s
        self.payload = -1 if payload is None else payload  # -1: the bytes of `x` when it is run
        self.original = x
        """`x` as the caller gave it; a new result belongs to the same library."""
        self.x: Array = x
        if transport is None:
            if type(x) is not np.ndarray:
                self.x = as_argument(name, argument, x)
            transport = transport_for(comm.transports, name, argument, self.x, comm.device)
        self.transport = transport
        self.output = NO_OUTPUT
        self.target: Array = EMPTY
        """The array that the transport fills."""
        self._distance: int | None = None
        """The bytes from `x` to `target`, if they overlap."""
        self._source: Array | None = None
        self._is_compared = True

    # Arguments --------------------------------------------------------------------------------------

    def check_reduction(self, op: str) -> None:
        """Raise unless `op` reduces arrays such as `x`; see `arrays.check_reduction`."""
        check_reduction(self.name, op, self.x.dtype)
        if op == "prod" and self.x.dtype.kind == "c" and not isinstance(self.x, np.ndarray):
            raise UnsupportedError(
                f"{self.name}: there is no op='prod' for {self.x.dtype} on a device; reduce a copy on the host, "
                "x.get()"
            )

    def writes_to(self, out: object | None, shape: tuple[int, ...], *, any_shape: bool = False) -> None:
        """Set the output: `out`, or a new array of `shape` if it is None."""
        self.output = resolve_output(self.name, "out", out, shape, self.x, any_shape=any_shape)
        self.target = self.output.target

    def reduces_to(self, out: object | None, op: str) -> None:
        """Set the output of a reduction by `op`: `out`, or a new array if it is None; it may be `x`."""
        self.check_reduction(op)
        self.writes_to(out, self.x.shape)
        self.in_place()

    def broadcasts(self, root: int) -> None:
        """Raise unless `x` can be sent by `root`, and received into by the others."""
        check = check_mutable if self.comm.rank == root else check_writable
        check(self.name, "x", self.original, self.x)

    def in_place(self) -> None:
        """Allow `out` to be `x`; raise if they overlap in any other way."""
        x, target = self.x, self.target
        if x is target or not arrays.overlap(x, target):
            return
        if not arrays.is_contiguous(x) or not arrays.same_memory(x, target):
            raise ArrayError(f"{self.name}: out overlaps x; pass out=x, or memory that does not overlap x")
        self.x = target

    def contiguous(self) -> None:
        """Copy `x` if it is not contiguous."""
        self.x = arrays.contiguous(self.x)

    def check_overlap(self, own: Array) -> None:
        """Raise if `x` and `target` overlap, unless one of them is `own`, this rank's part of the other one."""
        x, target = self.x, self.target
        if not arrays.overlap(x, target):
            return
        if not (arrays.same_memory(x, own) or arrays.same_memory(target, own)):
            raise ArrayError(f"{self.name}: out overlaps x outside of this rank's own chunk")
        self._distance = arrays.address(target) - arrays.address(x)

    def sends(self, x: Array | None) -> None:
        """Set the array that hooks see as sent, if it is not `x` of the start of the call; None for none."""
        self._source = EMPTY if x is None else x

    def unchecked(self) -> Call:
        """Leave the comparison with other ranks to the method; returns this call."""
        self._is_compared = False
        return self

    @property
    def result(self) -> Any:
        """`out`, filled; without an `out`, a new array of the library of the caller's `x`."""
        out, value, target = self.output
        if value is not target:
            value[...] = target
        if out is not None:
            return out
        return target if type(target) is type(self.original) else returned(self.original, target)

    # The call ---------------------------------------------------------------------------------------

    def run(self, move: Move) -> Any:
        """Run the call once. `move` sends and receives; it takes `x` and `target`. Returns its result."""
        if self.payload < 0:
            self.payload = self.x.nbytes
        call = PreparedCall(
            self._head(), self.transport, move, self.payload, self._source, is_compared=self._is_compared
        )
        return call.run(self.comm, self.x, self.target, self.timeout_s)

    def once(self, move: Move) -> PreparedCall:
        """The call as `run` runs it, by `move`, which may ask it."""
        nbytes = self.x.nbytes if self.payload < 0 else self.payload
        head, compares = self._head(), self._is_compared
        return PreparedCall(head, self.transport, move, nbytes, self._source, is_compared=compares)

    def run_and_cache(self, move: Move, *arguments: Hashable, fills: Fills = "out") -> None:
        """Run the call by `move`, or by a faster one of the transport, and keep it; see `cache`."""
        op, root = self.detail.get("op", ""), self.detail.get("root")
        if not op or as_real(self.x, op) is self.x:  # else `move` reduces another view
            move = self.transport.fast_path(self.name, self.x, op, root) or move
        self.run(move)
        self.cache(move, *arguments, fills=fills)

    def cache(self, move: Move, *arguments: Hashable, fills: Fills) -> None:
        """Keep a call that was run for `run_if_known`, under its name and `arguments`, if `x` is a host array.

        Calls like it run by `move`.
        """
        x = self.original
        if type(x) is np.ndarray:
            self.comm.call_cache[self.name, arguments, x.dtype, x.shape] = self.prepared(move, fills)

    def prepared(self, move: Callable[..., object], fills: Fills = "out") -> PreparedCall:
        """Return a call that was run for other arrays, to be run by `move`; it keeps none of this one's."""
        source = EMPTY if self._source is EMPTY else None  # else `x`
        call = PreparedCall(
            self._head(),
            self.transport,
            move,
            self.payload,
            source,
            is_compared=self._is_compared,
            fills=fills,
            shape=self.output.value.shape,
        )
        call.distance = self._distance
        return call

    def _head(self) -> flight.Head:
        """Return the description of the call for the flight recorder."""
        dtype = None if self.x is EMPTY else self.x.dtype
        collective, enqueues = self.name not in POINT_TO_POINT, self.transport.enqueues
        return self.comm.group, collective, self.name, dtype, self.x.shape, self.detail, enqueues

    def compare(self) -> None:
        """Raise `CommMismatch` on all ranks unless all are about to make this call. Collective."""
        compare_calls(self.comm.host, describe(self._head()))

    def signature(self) -> str:
        """See `prepared.signature`."""
        return signature(self._head())
