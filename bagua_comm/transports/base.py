"""The contract of a transport. It has one primitive, `exchange`, from which every collective is derived.

A transport must have `moves`, `exchange`, `split` and `abort`; it may override all other methods, where the
library below does better. Arrays that arrive here are checked, C-contiguous and aligned. Unless a method says
otherwise, `out` and `x` do not overlap. A transport is used by one thread at a time.

A call on host arrays returns when the result is there. Device arrays are read and written in the order of CuPy's
current stream, and the result is there for work enqueued on it after the call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

import numpy as np

from .. import arrays
from ..arrays import Array, OpOrder
from ..errors import CommError, UnsupportedError
from ..execution.cuda import SharedScratch
from ..objects.pickling import Live
from . import derived
from .call_state import CallState
from .flow import COLLECTIVE, FEW_RANKS, POINT_TO_POINT, Flow, Message, Move, TransportFlow
from .labels import Ended, Labelled, Receive, finish, tag_of
from .pipeline import Encoding
from .plan import Plan


class Transport(CallState, Live, ABC):
    """Moves contiguous arrays between `size` ranks, of which this is `rank`."""

    concurrent: bool = True
    """Whether another transport over the same ranks may be used by another thread meanwhile."""
    piece_bytes: int | None = None
    """Bytes that a collective sends to a peer at a time, so that one piece is processed while others are on their
    way; None to send all at once, where pieces gain nothing."""
    quantize_bytes: int = 0
    """The size in bytes from which an array takes less time through a codec than exactly."""
    enqueues: bool = False
    """Whether calls on device arrays return once their work is enqueued, without waiting for device or peers."""
    is_recorded: bool = False
    """Whether alltoall and allgather of device arrays add their steps to the recording in progress; see
    `recording`."""
    adds_in_rank_order: bool = True
    """Whether sums and products of floats have the bytes of `kernels.host.reduce_rows`, as in the derived
    collectives; False if the library below adds in another order, even if only above some size."""

    needs_polling: bool = False
    """Whether what was begun by `begin_labelled` goes on only while some thread asks whether it has ended."""
    is_checked: bool = False
    """Whether the ranks compare what they do otherwise not; see `connect(check=True)`."""
    plan: Plan | None = None
    """The calls that all ranks have agreed to make; None if every call is compared, or none is."""
    few_ranks: int = FEW_RANKS
    """See `flow.FEW_RANKS`."""
    at_once_bytes: int = 0
    """If each rank then receives no more than this, an allreduce sends whole arrays to all ranks, in a round."""
    on_slow_leave: Callable[[], object] | None = None
    """Called, if it is set, when this rank leaves in good order and others do not: in `leave` after a while, or
    in `close`. It writes the flight record, since this rank may be ended before they fail."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = SharedScratch()

    # Required ---------------------------------------------------------------------------------------

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

    @abstractmethod
    def split(self, color: int, key: int) -> Transport:
        """Group the ranks that give the same `color`, ordered by (`key`, rank).

        Collective.
        """

    @abstractmethod
    def abort(self, exit_code: int = 1) -> None:
        """Make calls of this transport fail on all ranks that can still be notified."""

    # Messages with labels ---------------------------------------------------------------------------

    def exchange_labelled(self, sends: Sequence[Labelled], receives: Sequence[Receive]) -> None:
        """Send and receive messages at once, as `exchange` does; a receive takes the first message of its tag.

        In this default, labels precede the messages, if a `label_carrier` exists. Between two ranks, messages of
        one call match in the order of their tags, and those of several calls in the order of the calls.

        Raises:
            CommMismatch: A message has another dtype or size than the array it should fill.
            CommTimeout: A message did not come within `timeout_s`.
            UnsupportedError: A receive has several sources, and this transport cannot choose among them.
        """
        if any(len(each.sources) > 1 for each in receives):
            raise UnsupportedError(
                f"{self.name}: recv_any cannot find out which of several ranks has sent; name one by recv, or "
                "send a host array first, and receive that by recv_any"
            )
        sends = sorted(sends, key=lambda send: tag_of(send[2]))
        receives = sorted(receives, key=lambda receive: tag_of(receive.expected))
        heads = [np.frombuffer(each.expected, np.uint8).copy() for each in receives]
        if (carrier := self.label_carrier()) is not None:
            rows = [(peer, np.frombuffer(of, np.uint8)) for peer, _, of in sends]
            carrier.exchange(rows, [(each.sources[0], head) for each, head in zip(receives, heads, strict=True)])
        for receive, head in zip(receives, heads, strict=True):
            receive.deliver(receive.sources[0], head.tobytes(), receive.target(head.tobytes()))
        self.exchange([(peer, x) for peer, x, _ in sends], [(each.source, each.message) for each in receives])
        finish(receives, self.rank)

    def label_carrier(self) -> Transport | None:
        """What carries the labels of messages in the default of `exchange_labelled`; None if nothing does."""
        return self

    def begin_labelled(self, sends: Sequence[Labelled], receives: Sequence[Receive]) -> Ended:
        """Begin what `exchange_labelled` does, and return at once; several threads may ask whether it has ended.

        Until then, nobody may modify the arrays. Receives take messages in the order in which they have begun.

        Raises:
            UnsupportedError: This transport has no messages beside its calls.
        """
        raise UnsupportedError(f"{self.name}: no isend and irecv; submit sendrecv or exchange to a lane")

    # Calls that begin ahead -------------------------------------------------------------------------

    def begin_allreduce(self, signature: str, x: Array, op: str) -> bool:
        """Begin an allreduce of `x` in place ahead of its `allreduce`, which then waits for it, if it can be.

        Another thread may be within calls, if all of them were begun ahead, and makes this one after them.

        Args:
            signature: See `CallState.signature`.
            x: The array.
            op: The reduction.

        Returns:
            Whether it has begun.
        """
        return False

    # Collectives, derived unless overridden ---------------------------------------------------------

    def allreduce(self, x: Array, out: Array, op: str) -> None:
        """Reduce `x` over all ranks into `out` on all ranks. `out` may be `x`.

        Collective.
        """
        if self.size == 1:
            if not arrays.same_memory(x, out):
                out[...] = x
            return
        derived.allreduce(self.agree_on_call(f"allreduce {op}", x), x, out, op, self._scratch)

    def allreduce_encoded(self, code: Encoding, out: Array) -> None:
        """Sum the encoded elements of all ranks, and decode the sum into `out` on all ranks.

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
        derived.reduce_scatter(flow, list(arrays.rows(x, self.size)), out, op, self._scratch)

    def reduce_scatterv(self, x: Array, out: Array, counts: Sequence[int], op: str) -> None:
        """Reduce `x` over all ranks and keep part `rank`, of counts[rank] elements, in `out`.

        Collective. `out` may be that part of `x`.
        """
        flow = self.agree_on_call(f"reduce_scatter {op} by {list(counts)}", x)
        derived.reduce_scatter(flow, arrays.parts(x, counts), out, op, self._scratch)

    def scan(self, x: Array, out: Array, op: str, *, exclusive: bool = False) -> None:
        """Reduce `x` of all ranks up to this one, or before it if `exclusive`, into `out`, which may be `x`.

        Collective. If `exclusive`, rank 0 leaves `out` as it is, since no rank comes before it.
        """
        derived.scan(self, x, out, op, self._scratch, exclusive=exclusive)

    def reduce(self, x: Array, out: Array | None, root: int, op: str) -> None:
        """Reduce `x` over all ranks into `out` of `root`, which may be `x`; on other ranks, `out` is None.

        Collective.
        """
        derived.reduce(self.agree_on_call(f"reduce {op} to {root}", x), x, out, root, op, self._scratch)

    def broadcast(self, x: Array, root: int) -> None:
        """Copy `x` of `root` to `x` of all ranks.

        Collective.
        """
        derived.broadcast(self, x, root)

    def allgather(self, x: Array, out: Array) -> None:
        """Collect `x` of every rank as row `rank` of `out`, (p, m). `x` may be that row.

        Collective.
        """
        derived.allgather(self.agree_on_call("allgather", x), x, out)

    def alltoall(self, x: Array, out: Array) -> None:
        """Send row j of `x`, (p, m), to rank j; row i of `out` comes from rank i. `out` may be `x`.

        Collective.
        """
        derived.alltoall(self.agree_on_call("alltoall", x), x, out, self._scratch)

    def alltoall_parts(self, x: Array, out: Array, counts: Sequence[int], out_counts: Sequence[int]) -> None:
        """Send the next counts[j] elements of `x` to rank j; the next out_counts[i] of `out` come from rank i.

        Collective. Ranks compare these numbers as they do those of any exchange.
        """
        sources, targets = arrays.parts(x, counts), arrays.parts(out, out_counts)
        targets[self.rank][...] = sources[self.rank]
        sends, recvs = ([(peer, each[peer]) for peer in self.others()] for each in (sources, targets))
        self.exchange(sends, recvs, tag=COLLECTIVE)

    def barrier(self) -> None:
        """Return when every rank has called.

        Collective.
        """
        derived.barrier(self)

    def agree(self, flag: bool) -> bool:
        """Whether every rank gave True.

        Collective.
        """
        flags = np.array([flag], np.uint8)
        self.allreduce(flags, flags, "min")
        return bool(flags[0])

    def dup(self) -> Transport:
        """Another transport over the same ranks, whose messages never match this one's.

        Collective.
        """
        return self.split(0, self.rank)

    def subgroup(self, ranks: Sequence[int], name: str, host: Transport | None = None) -> Transport:
        """A transport over these ranks, in this order.

        Collective among `ranks`, which include this one: the others need not call. Another thread may be in a
        call of this transport meanwhile.

        Args:
            ranks: The ranks.
            name: A name for them, the same on all, and no other group's.
            host: A transport over them, for a transport that is set up with its help.

        Raises:
            UnsupportedError: This transport has no such call.
        """
        raise UnsupportedError(f"{self.name}: cannot make a group of some ranks without the others; use split")

    def agree_on_call(self, call: str, x: Array, *, by_messages: bool = False) -> Flow:
        """Raise `CommMismatch` on all ranks unless all make this call on arrays of one dtype and size.

        `call` names everything that must be the same: the operation, its op and its root. The returned `Flow`
        makes the exchanges of the call, which may rely on the agreement. This default compares nothing: its
        messages carry their own sizes.

        Collective.

        Args:
            call: The call.
            x: An array of this rank.
            by_messages: Whether all exchanges of the call go by the `Flow`, and no rank ends it without a message
                of each other one. Then the ranks need not compare it before, if it follows a plan.
        """
        return TransportFlow(self, self.piece_bytes)

    def fast_path(self, name: str, x: Array, op: str = "", root: int | None = None) -> Move | None:
        """A faster way to make this collective on arrays that have the dtype and the shape of `x`.

        It takes the array of this rank and the array to fill, which are contiguous and have been checked. This
        default has none.

        Args:
            name: The collective.
            x: An array of this rank.
            op: The reduction, if it is one.
            root: The root, if there is one.
        """
        return None

    def coded_piece_bytes(self, nbytes: int) -> int | None:
        """`piece_bytes` for encoded elements of an array of `nbytes`.

        At the start of a call it is the same on all ranks.
        """
        return None

    def set_order(self, order: OpOrder) -> None:
        """Reduce in this order from now on; the same on all ranks.

        This default ignores it. It may change `adds_in_rank_order`.
        """

    # Hooks: failure and end -------------------------------------------------------------------------

    def interrupted(self, error: BaseException, arrays: object) -> None:
        """End the call in progress after an exception that is not of this library, such as KeyboardInterrupt.

        The other ranks are still in the call, which this one leaves. This default refuses all later calls of this
        rank. The others may read or write `arrays`.
        """
        if self.size > 1:
            self.refuse_calls(f"a call was interrupted by {type(error).__name__}")

    def shrink(self, host: Transport | None = None) -> Transport:
        """A transport over the ranks that are still alive.

        Collective among the survivors.

        Args:
            host: A transport over the survivors, for a transport that has to be set up again with its help.

        Raises:
            UnsupportedError: The library below cannot continue after a rank has died.
        """
        raise UnsupportedError(f"{self.name}: cannot go on without the ranks that died")

    def leave(self, reason: str | None = None) -> bool:
        """Announce that this rank makes no more calls but `close`, so that no rank waits for it.

        Collective, unless this rank alone leaves early, for a `reason`: then it does not wait. Otherwise it
        returns when all ranks have left, at the latest after `timeout_s`.

        Returns:
            Whether all ranks have left in order.
        """
        return True

    def notify_failure(self, group: str, error: CommError) -> None:
        """Notify the other ranks that this one has aborted a group of ranks that belongs to no transport.

        Any thread may call this and `poll_failures`, also while another one is in a call. Neither waits.
        """

    def poll_failures(self, groups: Collection[str]) -> CommError | None:
        """The error to raise if a rank has aborted one of these groups (`notify_failure`) or died; else None."""
        return None

    def close(self) -> None:
        """Free all resources.

        Collective.
        """
        self._scratch.clear()

    # For subclasses ---------------------------------------------------------------------------------

    def _members(self, color: int, key: int) -> list[int]:
        """The ranks that give the same `color`, ordered by (`key`, rank), as `split` groups them. Collective."""
        return derived.members(self, color, key)

    def _without_overlap(self, x: Array, out: Array) -> Array:
        """`x`, or a copy if it overlaps `out`."""
        return derived.without_overlap(x, out, self._scratch)
