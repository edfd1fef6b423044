"""A transport that records its calls."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from ..arrays import OpOrder
from ..transports import Transport


class Call(NamedTuple):
    """A call recorded by `Recording`."""

    name: str
    nbytes: int


def _forwarded(name: str, *, recorded: bool = False, wrapped: bool = False) -> Any:
    """A method that calls that of the recorded transport.

    Args:
        name: The name of the method.
        recorded: Whether the call is recorded.
        wrapped: Whether the result is another transport, whose calls are recorded as well.
    """

    def call(self: Recording, *args: Any, **options: Any) -> Any:
        if recorded:
            sent = [x for _, x, *_ in args[0]] if name.startswith("exchange") else args[:1]
            self.calls.append(Call(name.removesuffix("_labelled"), sum(x.nbytes for x in sent)))
        found = getattr(self.inner, name)(*args, **options)
        return Recording(found) if wrapped else found

    return call


_recorded = partial(_forwarded, recorded=True)
_wrapped = partial(_forwarded, wrapped=True)


class Recording(Transport):
    """A transport that forwards calls to another one, and records them in `calls`.

    >>> import numpy as np
    >>> from bagua_comm.testing import run_ranks
    >>> def body(comm):
    ...     comm.allreduce(np.ones(4))
    ...     return comm.transports[0].calls
    >>> run_ranks(2, body, wrap=Recording)[0]
    [Call(name='allreduce', nbytes=32)]
    """

    name = "recording"

    def __init__(self, inner: Transport) -> None:
        super().__init__()
        self.inner, self.calls = inner, list[Call]()
        self.rank, self.size, self.timeout_s = inner.rank, inner.size, inner.timeout_s
        self.concurrent, self.enqueues = inner.concurrent, inner.enqueues
        self.adds_in_rank_order = inner.adds_in_rank_order

    moves = _forwarded("moves")
    begin_call, end_call = _forwarded("begin_call"), _forwarded("end_call")
    cancel_call, limit_call = _forwarded("cancel_call"), _forwarded("limit_call")
    interrupted, abort, leave = _forwarded("interrupted"), _forwarded("abort"), _forwarded("leave")
    notify_failure, poll_failures = _forwarded("notify_failure"), _forwarded("poll_failures")
    close = _forwarded("close")
    exchange, exchange_labelled = _recorded("exchange"), _recorded("exchange_labelled")
    begin_labelled = _forwarded("begin_labelled")
    barrier, broadcast = _recorded("barrier"), _recorded("broadcast")
    allreduce, reduce, reduce_scatter = _recorded("allreduce"), _recorded("reduce"), _recorded("reduce_scatter")
    allgather, alltoall = _recorded("allgather"), _recorded("alltoall")
    split, dup, shrink = _wrapped("split"), _wrapped("dup"), _wrapped("shrink")

    def set_order(self, order: OpOrder) -> None:
        """See `Transport.set_order`."""
        before = self.inner.adds_in_rank_order
        self.inner.set_order(order)
        if self.inner.adds_in_rank_order != before:
            self.adds_in_rank_order = self.inner.adds_in_rank_order

    def set_timeout(self, timeout_s: float) -> None:
        """See `Transport.set_timeout`."""
        self.timeout_s = timeout_s
        self.inner.set_timeout(timeout_s)

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        """The count of the recorded transport."""
        return self.inner.sent_bytes
