"""The contract of a transport, and every collective derived from its one primitive.

A transport must have `exchange`, `moves` and `split`; it overrides whatever the library below does better. Arrays
that arrive here are checked, C-contiguous and aligned. Unless a method says otherwise, `out` and `x` do not
overlap. A transport is used by one thread at a time.

A call on host arrays returns when the result is there. Device arrays are read and written in the order of CuPy's
current stream, and the result is there for what is enqueued on it after the call.

The derived collectives move each byte as few times as possible, by direct exchange between all pairs
of ranks, and reduce in rank order, in float32 where the dtype is narrower: each chunk has one owner,
who sends the same bytes to everybody, so that all ranks hold bit-identical results. Over a network they go in
pieces, so that receiving, adding and sending overlap.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from numbers import Real
from typing import ClassVar, TypeAlias

import numpy as np

from .. import arrays, kernels
from ..arrays import REDUCED_PRECISION, Array, OpOrder
from ..cuda import SharedScratch
from ..errors import BaguaError, BootstrapError, CommAborted, CommError, UnsupportedError
from ..pickling import Live
from .pipeline import Encoding, Exact, Rows, Wait, reduce_through, trade
from .pipeline import Message as Message

Move: TypeAlias = Callable[[Array, Array], object]
"""Moves the bytes of a call: takes the array of this rank, and the array that is filled."""

POINT_TO_POINT, COLLECTIVE, OBJECT, DESCRIPTION = range(4)
"""Tags: a message never matches one of another tag. In this order: arrays of `send` and `recv`, arrays of
collectives, pickled objects, and the descriptions that `agreement` sends ahead of messages."""


class Transport(Live, ABC):
    """Moves contiguous arrays between `size` ranks, of which this is `rank`."""

    name: ClassVar[str]
    rank: int
    size: int
    sent_bytes: int = 0
    """Bytes sent to other ranks so far. Where the library below chooses the algorithm, these are the bytes that a
    bandwidth-optimal algorithm sends."""
    concurrent: bool = True
    """Whether another transport over the same ranks may be used by another thread meanwhile."""
    piece_bytes: int | None = None
    """Bytes that a collective sends to a peer at a time, so that one piece is worked on while others are on their
    way; None to send all at once, where pieces gain nothing."""
    quantize_bytes: int = 0
    """The size in bytes from which an array takes less time through a codec than exactly."""
    enqueues: bool = False
    """Whether calls on device arrays return once their work is enqueued, without waiting for device or peers."""

    _limit_s: float | None = None

    adds_in_rank_order: bool = True
    """Whether sums and products of floats have the bytes of `kernels.host.reduce_rows`, as in the derived
    collectives; False if the library below adds in an order of its own, even if only above some size."""

    def __init__(self) -> None:
        self._scratch = SharedScratch()
        self._call: str | None = None
        self._describe: Callable[[], str] | None = None
        self._in_collective = False
        self._deadline_s: float | None = None
        self._broken: str | None = None
        """Why no call can be made any more; None as long as calls can."""

    def begin_call(self, name: str, *, collective: bool, describe: Callable[[], str] | None = None) -> None:
        """A call of the user begins: from its first wait on, all its waits together may take `timeout_s`.

        Args:
            name: The name of the call.
            collective: Whether all ranks make it, in the same order.
            describe: Says what must be the same on all ranks in a collective call: dtype, op and root, for
                example.
        """
        self._call, self._in_collective, self._deadline_s = name, collective, None
        self._describe = describe

    def end_call(self) -> None:
        """The call has ended. Outside of calls, each wait may take `timeout_s`."""
        self._call, self._in_collective = None, False

    def cancel_call(self) -> None:
        """The call that has begun ends before it has moved anything: it does not count as made."""
        self._in_collective = False
        self.end_call()

    def interrupted(self, error: BaseException, arrays: object) -> None:
        """The call in progress ends by an exception that is no error of this library, such as KeyboardInterrupt.

        The other ranks go on with the call, which this one leaves in the middle. This default refuses all later
        calls of this rank. `arrays` are what the others may read or write.
        """
        if self.size > 1:
            self._break(f"a call was interrupted by {type(error).__name__}")

    def set_timeout(self, timeout_s: float) -> None:
        """Let calls wait for as long as this, in seconds, from the next one on."""
        self.timeout_s = timeout_s

    def limit_call(self, timeout_s: float | None) -> None:
        """Let the call that has begun wait for `timeout_s`; None for as long as the transport's calls do."""
        self._limit_s = timeout_s

    def set_order(self, order: OpOrder) -> None:
        """Reduce in this order from now on; the same on all ranks.

        This default ignores it. It may change `adds_in_rank_order`.
        """

    @property
    def limit_s(self) -> float:
        """How long the call in progress may wait."""
        return self._timeout_s if self._limit_s is None else self._limit_s

    def signature(self) -> str:
        """What all ranks must have in common in the collective call in progress; empty outside of one."""
        if not self._in_collective or self._describe is None:
            return ""
        return self._describe()

    def deadline_s(self) -> float:
        """When a wait that begins now must end, by `time.monotonic`."""
        if self._call is None:
            return time.monotonic() + self.timeout_s
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + self.limit_s
        return self._deadline_s

    @property
    def timeout_s(self) -> float:
        """How long a call may wait for a peer before it raises `CommTimeout`."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self._timeout_s = check_timeout(self.name, value)

    @abstractmethod
    def moves(self, x: Array) -> bool:
        """Whether this transport takes arrays like `x` as they are."""

    @abstractmethod
    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], *, tag: int = POINT_TO_POINT) -> None:
        """Send and receive all messages at once; host arrays in `recvs` are filled when it returns.

        Between two ranks, messages of one tag match in order. Messages to oneself match as well.

        Raises:
            CommMismatch: A message has another size than the array it should fill.
            CommTimeout: A peer did not answer within `timeout_s`.
        """

    def shortcut(self, name: str, x: Array, op: str = "", root: int | None = None) -> Move | None:
        """A faster way to make this collective on arrays that have the dtype and the shape of `x`.

        It takes the array of this rank and the array that is filled, which are contiguous and have been checked.
        This default has none.

        Args:
            name: The collective.
            x: An array of this rank.
            op: The reduction, if it is one.
            root: The root, if there is one.
        """
        return None

    def coded_piece_bytes(self, nbytes: int) -> int | None:
        """`piece_bytes` for encoded elements of an array of `nbytes`; when a call begins, alike on all ranks."""
        return None

    def agree_on_call(self, call: str, x: Array) -> Flow:
        """Raise `CommMismatch` on all ranks unless all make this call on arrays of one dtype and size.

        `call` names everything that must be the same: the operation, its op and its root. The result makes the
        exchanges of the call, which may rely on the agreement. This default compares nothing: its messages carry
        their own sizes.

        Collective.
        """
        return Flow(self, self.piece_bytes)

    @abstractmethod
    def split(self, color: int, key: int) -> Transport:
        """Group the ranks that give the same `color`, ordered by (`key`, rank).

        Collective.
        """

    def dup(self) -> Transport:
        """Another transport over the same ranks, whose messages never match this one's.

        Collective.
        """
        return self.split(0, self.rank)

    # Collectives, derived ---------------------------------------------------------------------------

    def allreduce(self, x: Array, out: Array, op: str) -> None:
        """Reduce `x` over all ranks into `out` on all ranks. `out` may be `x`.

        Collective.
        """
        if self.size == 1:
            if not arrays.same_memory(x, out):
                out[...] = x
            return
        self.allreduce_over(self.agree_on_call(f"allreduce {op}", x), x, out, op)

    def allreduce_encoded(self, code: Encoding, out: Array) -> None:
        """Add what all ranks encode, and decode the sum, into `out` on all ranks.

        Collective. `out` is flat.
        """
        total = self._scratch.take("encoded", out.shape, code.dtype, like=out)
        everything = slice(0, out.size)
        code.encode(everything, total)
        self.allreduce(total, total, "sum")
        code.decode(total, everything, out)

    def reduce_scatter(self, x: Array, out: Array, op: str) -> None:
        """Reduce `x`, (p, m), over all ranks and keep chunk `rank` in `out`, which may lie in `x`.

        Collective.
        """
        flow = self.agree_on_call(f"reduce_scatter {op}", x)
        self.reduce_scatter_over(flow, list(arrays.rows(x, self.size)), out, op)

    def reduce_scatterv(self, x: Array, out: Array, counts: Sequence[int], op: str) -> None:
        """Reduce `x` over all ranks and keep part `rank`, of counts[rank] elements, in `out`.

        Collective. `out` may be that part of `x`.
        """
        flow = self.agree_on_call(f"reduce_scatter {op} by {list(counts)}", x)
        self.reduce_scatter_over(flow, arrays.parts(x, counts), out, op)

    def scan(self, x: Array, out: Array, op: str, *, exclusive: bool = False) -> None:
        """Reduce `x` of all ranks up to this one, or before it if `exclusive`, into `out`, which may be `x`.

        Collective. Every rank reduces one chunk of the array for all ranks. If `exclusive`, rank 0 leaves `out`
        as it is, since no rank comes before it.
        """
        # (p, m) each: chunk r of this rank's array, and this rank's chunk of rank r's.
        chunks, mine = self._scratch.take("scan", (2, self.size, -(-x.size // self.size)), x.dtype, like=x)
        chunks.reshape(-1)[: x.size] = x.reshape(-1)
        self.alltoall(chunks, mine)
        _accumulate(mine, op)
        if exclusive:
            chunks[1:] = mine[:-1]
            mine, chunks = chunks, mine
        self.alltoall(mine, chunks)
        if self.rank > 0 or not exclusive:
            out.reshape(-1)[...] = chunks.reshape(-1)[: x.size]

    def reduce(self, x: Array, out: Array | None, root: int, op: str) -> None:
        """Reduce `x` over all ranks into `out` of `root`, which may be `x`; on other ranks, `out` is None.

        Collective.
        """
        self.reduce_over(self.agree_on_call(f"reduce {op} to {root}", x), x, out, root, op)

    def broadcast(self, x: Array, root: int) -> None:
        """Copy `x` of `root` to `x` of all ranks, along a binomial tree.

        Collective.
        """
        position = (self.rank - root) % self.size
        reach = 1
        while reach < self.size:  # ranks at positions below `reach` have it
            if position < reach <= self.size - 1 and position + reach < self.size:
                self.exchange([((self.rank + reach) % self.size, x)], [], tag=COLLECTIVE)
            elif reach <= position < 2 * reach:
                self.exchange([], [((self.rank - reach) % self.size, x)], tag=COLLECTIVE)
            reach *= 2

    def allgather(self, x: Array, out: Array) -> None:
        """Collect `x` of every rank as row `rank` of `out`, (p, m). `x` may be that row.

        Collective.
        """
        self.allgather_over(self.agree_on_call("allgather", x), x, out)

    def alltoall(self, x: Array, out: Array) -> None:
        """Send row j of `x`, (p, m), to rank j; row i of `out` comes from rank i. `out` may be `x`.

        Collective.
        """
        self.alltoall_over(self.agree_on_call("alltoall", x), x, out)

    def barrier(self) -> None:
        """Return when every rank has called. A dissemination barrier: log2(p) rounds.

        Collective.
        """
        token, hop = np.zeros(1, np.uint8), 1
        answer = np.zeros(1, np.uint8)
        while hop < self.size:
            ahead, behind = (self.rank + hop) % self.size, (self.rank - hop) % self.size
            self.exchange([(ahead, token)], [(behind, answer)], tag=COLLECTIVE)
            hop *= 2

    def agree(self, flag: bool) -> bool:
        """Whether every rank gave True.

        Collective.
        """
        flags = np.array([flag], np.uint8)
        self.allreduce(flags, flags, "min")
        return bool(flags[0])

    # What they are derived from: the same, once the ranks have agreed -----------------------------------

    def allreduce_over(self, flow: Flow, x: Array, out: Array, op: str) -> None:
        """`allreduce` by direct exchange: each rank reduces a chunk for all. Collective."""
        x, out = x.reshape(-1), out.reshape(-1)
        bounds = chunk_bounds(x.size, self.size)
        results = [out[chunk] for chunk in bounds]
        chunks, mine = [x[chunk] for chunk in bounds], results[self.rank]
        reduce_through(flow, Exact(flow, chunks, mine, op, self._scratch, results))

    def reduce_scatter_over(self, flow: Flow, chunks: Sequence[Array], out: Array, op: str) -> None:
        """`reduce_scatter` of chunks, one for each rank, by direct exchange. Collective."""
        reduce_through(flow, Exact(flow, chunks, out.reshape(-1), op, self._scratch), gather=False)

    def reduce_over(self, flow: Flow, x: Array, out: Array | None, root: int, op: str) -> None:
        """`reduce`: each rank reduces a chunk, and sends it to `root`. Collective."""
        x = x.reshape(-1)
        bounds = chunk_bounds(x.size, self.size)
        mine = self._scratch.take("mine", x[bounds[self.rank]].shape, x.dtype, like=x)
        self.reduce_scatter_over(flow, [x[chunk] for chunk in bounds], mine, op)
        if out is None:
            self.exchange([(root, mine)], [], tag=COLLECTIVE)
        else:
            out = out.reshape(-1)
            out[bounds[root]] = mine
            self.exchange([], [(p, out[bounds[p]]) for p in self.others()], tag=COLLECTIVE)

    def allgather_over(self, flow: Flow, x: Array, out: Array) -> None:
        """`allgather` by direct exchange. Collective."""
        mine, table = x.reshape(-1), arrays.rows(out, self.size)
        trade(flow, [mine] * self.size, table)

    def alltoall_over(self, flow: Flow, x: Array, out: Array) -> None:
        """`alltoall` by direct exchange. Collective."""
        source, target = arrays.rows(self._apart(x, out), self.size), arrays.rows(out, self.size)
        trade(flow, source, target)

    # Failure and end --------------------------------------------------------------------------------

    def shrink(self, host: Transport | None = None) -> Transport:
        """A transport over the ranks that are still alive.

        Collective among the survivors.

        Args:
            host: A transport over the survivors, for a transport that has to be set up again with its help.

        Raises:
            UnsupportedError: The library below cannot go on after a rank has died.
        """
        raise UnsupportedError(f"{self.name}: cannot go on without the ranks that died")

    @abstractmethod
    def abort(self, exit_code: int = 1) -> None:
        """Give up: calls of this transport fail on all ranks, where they can still be told."""

    def leave(self, reason: str | None = None) -> bool:
        """Say that this rank makes no more calls but `close`, so that no rank waits for it in vain.

        Collective, unless this rank alone leaves in the middle, for a `reason`: then it does not wait. Otherwise
        it returns when all ranks have left, at the latest after `timeout_s`.

        Returns:
            Whether all ranks have left in order.
        """
        return True

    def tell(self, group: str, error: CommError) -> None:
        """Tell the other ranks that this one gives up a group of ranks that belongs to no transport.

        Any thread may call this and `heard`, also while another one is in a call. Neither waits.
        """

    def heard(self, groups: Collection[str]) -> CommError | None:
        """The error to raise if a rank has given up one of these groups by `tell`, or has died; else None."""
        return None

    def close(self) -> None:
        """Free what is held.

        Collective.
        """
        self._scratch.clear()

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise CommAborted(f"rank {self.rank}: this communicator cannot be used: {self._broken}")

    def _break(self, reason: str) -> None:
        """Refuse all calls from now on; the first reason stays."""
        self._broken = self._broken or reason

    def _members(self, color: int, key: int) -> list[int]:
        """The ranks that give the same `color`, ordered by (`key`, rank); what `split` groups. Collective."""
        table = np.empty((self.size, 2), np.int64)
        self.allgather(np.array([color, key], np.int64), table)
        alike = [rank for rank in range(self.size) if table[rank, 0] == color]
        return sorted(alike, key=lambda rank: (table[rank, 1], rank))

    def _apart(self, x: Array, out: Array) -> Array:
        """`x`, or a copy if it overlaps `out`."""
        if not arrays.overlap(x, out):
            return x
        copy = self._scratch.take("apart", x.shape, x.dtype, like=x)
        copy[...] = x
        return copy

    def others(self) -> list[int]:
        """The other ranks, each rank starting behind itself so that not all send to rank 0 first."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]


class Flow:
    """The exchanges of one collective call on which the ranks have agreed; `Transport.agree_on_call` makes it.

    Exchanges match in the order in which they are begun, and are waited for in that order. The arrays on either
    side may not be touched until the returned `Wait` has been called. Messages are as long as their receivers
    expect.
    """

    def __init__(self, transport: Transport, piece_bytes: int | None) -> None:
        self.transport = transport
        self.rank, self.size, self.others = transport.rank, transport.size, transport.others()
        self.piece_bytes = piece_bytes
        """How much to send to a peer at a time; None to send all at once."""

    def begin(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Wait:
        """Begin an exchange. This default blocks: the exchange has ended when it returns."""
        self.transport.exchange(sends, recvs, tag=COLLECTIVE)
        return ended

    def alltoall(self, rows: Rows, into: Rows) -> Wait:
        """Send rows[r] to rank r, and receive into[r] from rank r.

        Where rows[rank] and into[rank] are one object, this rank's own row stays where it is.
        """
        if not isinstance(rows, list):
            self.alltoall_at_once(rows, into)
            return ended
        wait = self.begin(self.messages(rows), self.messages(into))
        mine, own = rows[self.rank], into[self.rank]
        if mine is not own:
            own[...] = mine
        return wait

    def allgather(self, mine: Array, into: Rows) -> Wait:
        """Send `mine`, which is into[rank], to all ranks; receive into[r] from rank r."""
        if not isinstance(into, list):
            self.allgather_at_once(mine, into)
            return ended
        return self.begin(self.messages([mine] * self.size), self.messages(into))

    def alltoall_at_once(self, table: Array, into: Array) -> None:
        """`alltoall` of a contiguous table, (p, m), by the call of the transport."""
        self.transport.alltoall(table, into)

    def allgather_at_once(self, mine: Array, into: Array) -> None:
        """`allgather` into a contiguous table, (p, m), by the call of the transport."""
        self.transport.allgather(mine, into)

    def messages(self, rows: Rows) -> list[Message]:
        """A message for each of the other ranks, the next rank's first, so that not all send to rank 0 first."""
        return [*zip(self.others, map(rows.__getitem__, self.others), strict=True)]


def ended() -> None:
    """The `Wait` of an exchange that has ended; it does nothing."""


MAX_TIMEOUT_S = 1e9
"""The longest wait, about 30 years: more than this overflows the clocks of the libraries below."""


def check_timeout(call: str, timeout_s: object, error: type[BaguaError] = BootstrapError) -> float:
    """`timeout_s`, if it is a positive number of seconds; raises an `error` that names `call` if not."""
    # NaN fails every comparison, so it is refused as well.
    is_number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < float(timeout_s) <= MAX_TIMEOUT_S:  # type: ignore[arg-type]
        raise error(
            f"{call}: timeout_s is {timeout_s!r}, expected seconds, above 0 and at most {MAX_TIMEOUT_S:g}"
        )
    return float(timeout_s)  # type: ignore[arg-type]


def _accumulate(table: Array, op: str) -> None:
    """Reduce in place, so that row r becomes the reduction of rows 0 to r."""
    reduce_rows = kernels.of(table).reduce_rows
    if op == "avg" or arrays.dtype_name(table.dtype) in REDUCED_PRECISION:
        for r in reversed(range(1, len(table))):  # each from the rows themselves, so that it is rounded once
            reduce_rows(table[: r + 1], table[r], op)
    else:
        for r in range(1, len(table)):
            reduce_rows(table[r - 1 : r + 1], table[r], op)


def chunk_bounds(count: int, chunks: int) -> list[slice]:
    """Cut `count` elements into chunks of ceil(count / chunks); the last may be short or empty.

    >>> chunk_bounds(5, 3)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    length = -(-count // chunks)
    return [slice(min(i * length, count), min((i + 1) * length, count)) for i in range(chunks)]
