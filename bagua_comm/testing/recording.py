"""A transport that records its calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ..arrays import Array, OpOrder
from ..errors import CommError
from ..transports import Transport
from ..transports.flow import POINT_TO_POINT, Message


class Call(NamedTuple):
    """A call recorded by `Recording`."""

    name: str
    nbytes: int


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

    def interrupted(self, error: BaseException, arrays: object) -> None:
        """See `Transport.interrupted`."""
        self.inner.interrupted(error, arrays)

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        """The count of the recorded transport."""
        return self.inner.sent_bytes

    def begin_call(self, name: str, *, collective: bool, describe: Callable[[], str] | None = None) -> None:
        """See `Transport.begin_call`; the recorded transport is the one that waits."""
        self.inner.begin_call(name, collective=collective, describe=describe)

    def end_call(self) -> None:
        """See `Transport.end_call`."""
        self.inner.end_call()

    def cancel_call(self) -> None:
        """See `Transport.cancel_call`."""
        self.inner.cancel_call()

    def limit_call(self, timeout_s: float | None) -> None:
        """See `Transport.limit_call`."""
        self.inner.limit_call(timeout_s)

    def moves(self, x: Array) -> bool:
        """Whether the recorded transport moves `x`."""
        return self.inner.moves(x)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], *, tag: int = POINT_TO_POINT) -> None:
        """See `Transport.exchange`."""
        self._note("exchange", *[x for _, x in sends])
        self.inner.exchange(sends, recvs, tag=tag)

    def allreduce(self, x: Array, out: Array, op: str) -> None:
        """See `Transport.allreduce`."""
        self._note("allreduce", x)
        self.inner.allreduce(x, out, op)

    def reduce_scatter(self, x: Array, out: Array, op: str) -> None:
        """See `Transport.reduce_scatter`."""
        self._note("reduce_scatter", x)
        self.inner.reduce_scatter(x, out, op)

    def reduce(self, x: Array, out: Array | None, root: int, op: str) -> None:
        """See `Transport.reduce`."""
        self._note("reduce", x)
        self.inner.reduce(x, out, root, op)

    def broadcast(self, x: Array, root: int) -> None:
        """See `Transport.broadcast`."""
        self._note("broadcast", x)
        self.inner.broadcast(x, root)

    def allgather(self, x: Array, out: Array) -> None:
        """See `Transport.allgather`."""
        self._note("allgather", x)
        self.inner.allgather(x, out)

    def alltoall(self, x: Array, out: Array) -> None:
        """See `Transport.alltoall`."""
        self._note("alltoall", x)
        self.inner.alltoall(x, out)

    def barrier(self) -> None:
        """See `Transport.barrier`."""
        self._note("barrier")
        self.inner.barrier()

    def split(self, color: int, key: int) -> Transport:
        """See `Transport.split`."""
        return Recording(self.inner.split(color, key))

    def dup(self) -> Transport:
        """See `Transport.dup`."""
        return Recording(self.inner.dup())

    def shrink(self, host: Transport | None = None) -> Transport:
        """See `Transport.shrink`."""
        return Recording(self.inner.shrink(host))

    def abort(self, exit_code: int = 1) -> None:
        """See `Transport.abort`."""
        self.inner.abort(exit_code)

    def leave(self, reason: str | None = None) -> bool:
        """See `Transport.leave`."""
        return self.inner.leave(reason)

    def notify_failure(self, group: str, error: CommError) -> None:
        """See `Transport.notify_failure`."""
        self.inner.notify_failure(group, error)

    def poll_failures(self, groups: Collection[str]) -> CommError | None:
        """See `Transport.poll_failures`."""
        return self.inner.poll_failures(groups)

    def close(self) -> None:
        """See `Transport.close`."""
        self.inner.close()

    def _note(self, name: str, *values: Array) -> None:
        self.calls.append(Call(name, sum(x.nbytes for x in values)))
