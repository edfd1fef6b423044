"""Point-to-point messages: send, recv, sendrecv and exchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import NoneType
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from .. import arrays
from ..arrays import A, AnyArray, Array
from ..errors import ArrayError, UnsupportedError, shown, shown_as
from ..execution.requests import Buffer, Request
from ..objects.caching import BoundedCache
from ..transports.labels import COMPARED, UNLABELLED, Labelled, Receive, Tag, check_tag, label
from .arguments import EMPTY, Output, check_writable, is_same
from .base import CACHED_CALLS, CommBase
from .call import Call
from .prepared import READY, WRITABLE, Fills, PreparedCall, run_if_known

MaybeMessage: TypeAlias = tuple[int | None, AnyArray] | tuple[int | None, AnyArray, Tag]
"""A message: peer, array and tag, which is 0 if not given. Nothing is sent or received if the peer is None."""

_Given: TypeAlias = Sequence[tuple[object, AnyArray] | tuple[object, AnyArray, Tag]]
"""Messages before their peers are checked; the peers of `recv_any` are a tuple."""

_Kind: TypeAlias = tuple[object, ...] | None
"""All that the checks of an exchange depend on but whether its arrays overlap; see `_plain`."""

_PEERS, _TAGS = (int, NoneType), (int, str)
"""The types of peers and tags of calls that are kept: 1.0 equals 1, and is neither."""

_ARGUMENTS = {"sends": ("x", "dest"), "recvs": ("out", "source")}
"""The names of an array and its peer in calls of one message each way."""


@shown_as("Communicator")
class PointToPoint(CommBase):
    """Messages between two ranks.

    A message has a tag: an integer from 0 to 32767, or a text of at most 24 characters of ASCII. A receive takes
    the first message of its tag from its peer. `recv`, `irecv` and `recv_any` take what `send` and `isend` send.
    """

    def send(self, x: AnyArray, *, dest: int, tag: Tag = 0, timeout_s: float | None = None) -> None:
        """Send `x` to `dest`, which calls `recv` with the same tag.

        Returns when `x` may be modified, which can be before or after it is received: a long array waits for its
        receive. If two ranks send to each other, call `sendrecv`, `exchange`, or `isend` and `irecv`.

        Raises:
            ArrayError: `dest` is not a rank, or `tag` is no tag.
            UnsupportedError: No transport takes such an array.

        >>> import numpy as np
        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     x = np.arange(2) if comm.rank == 0 else np.zeros(2, int)
        ...     comm.send(x, dest=1) if comm.rank == 0 else comm.recv(x, source=0)
        ...     return x
        >>> run_ranks(2, body)
        [array([0, 1]), array([0, 1])]
        """
        if not self._run_if_known("send", (dest, tag), x, None, timeout_s):
            self._exchange("send", [(dest, x, tag)], [], timeout_s, dest=dest)

    def recv(self, out: A, *, source: int, tag: Tag = 0, timeout_s: float | None = None) -> A:
        """Receive the next array that `source` sends to this rank with this tag into `out`, and return it.

        Raises:
            ArrayError: `source` is not a rank, `tag` is no tag, or `out` cannot be written to.
            CommMismatch: The dtypes or the sizes of the message and of `out` differ.
            CommTimeout: No message came with this tag; names the tags of those that did.
            UnsupportedError: No transport takes such an array.

        >>> import numpy as np
        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     if comm.rank == 0:
        ...         comm.send(np.array(1), dest=1, tag="loss")
        ...         comm.send(np.array(2), dest=1, tag="steps")
        ...         return []
        ...     return [int(comm.recv(np.array(0), source=0, tag=tag)) for tag in ("steps", "loss")]
        >>> run_ranks(2, body)
        [[], [2, 1]]
        """
        if not self._run_if_known("recv", (source, tag), out, None, timeout_s):
            self._exchange("recv", [], [(source, out, tag)], timeout_s, source=source)
        return out

    def sendrecv(
        self,
        x: AnyArray,
        out: A,
        *,
        dest: int | None,
        source: int | None,
        tag: Tag = 0,
        timeout_s: float | None = None,
    ) -> A:
        """Send `x` to `dest` while receiving `out` from `source`, with one tag; return `out`.

        Nothing is sent if `dest` is None, and `out` is unchanged if `source` is None (MPI's PROC_NULL), as at the
        ends of a row of ranks.

        Raises:
            ArrayError: `dest` or `source` is not a rank, `tag` is no tag, or `out` cannot be written to or
                overlaps `x`.
            CommMismatch: The dtypes or the sizes of the message and of `out` differ.
            UnsupportedError: No transport takes such an array.

        >>> import numpy as np
        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):   # the left neighbour of each rank
        ...     right = comm.rank + 1 if comm.rank + 1 < comm.size else None
        ...     left = comm.rank - 1 if comm.rank > 0 else None
        ...     return comm.sendrecv(np.array(comm.rank), np.array(-1), dest=right, source=left)
        >>> run_ranks(3, body)
        [array(-1), array(0), array(1)]
        """
        if out is None or not self._run_if_known("sendrecv", (dest, source, tag), x, out, timeout_s):
            sends, recvs = [(dest, x, tag)], [(source, out, tag)]
            self._exchange("sendrecv", sends, recvs, timeout_s, dest=dest, source=source)
        return out

    def exchange(
        self, sends: Sequence[MaybeMessage], recvs: Sequence[MaybeMessage], *, timeout_s: float | None = None
    ) -> None:
        """Send and receive several messages, given as lists of (peer, array) or (peer, array, tag), concurrently.

        Between two ranks, messages of one tag match in the order of the lists; they also match `send` and `recv`.
        A message whose peer is None is left out.

        Two arrays of one size and one tag to a rank and two from it are refused, unless the two to it are the
        same array: only their order tells them apart, and it is easily wrong on a ring of one or two ranks, where
        both neighbours are one rank. Give each direction a tag, as below, and each field.

        Raises:
            ArrayError: A peer or a tag is none; or an array to receive into cannot be written to or overlaps
                another one; or only the order of messages tells them apart. Raised on the ranks that pass them.
            CommMismatch: The dtypes or the sizes of a message and of the array that receives it differ.
            CommTimeout: A message did not come; names its tag, and the tags of those that did.
            UnsupportedError: No transport takes such arrays.

        >>> import numpy as np
        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):   # the halo of each rank of a ring, of any size
        ...     up, down = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        ...     column = np.array([-1, 10 * comm.rank, 10 * comm.rank + 1, -1])
        ...     top, bottom = column[1:2], column[2:3]
        ...     comm.exchange(
        ...         sends=[(up, top, "up"), (down, bottom, "down")],
        ...         recvs=[(up, column[:1], "down"), (down, column[3:], "up")],
        ...     )
        ...     return column.tolist()
        >>> run_ranks(2, body)
        [[11, 0, 1, 10], [1, 10, 11, 0]]
        """
        kind, read, written = (None, [], []) if self.check else _plain(sends, recvs)
        calls: BoundedCache[_Kind, PreparedCall] | None = self.call_cache.get("exchange")
        call = None if calls is None else calls.get(kind)
        if call is not None and not _overlap(read, written):
            call.run(self, (read or written)[0], written[0] if written else EMPTY, timeout_s, read, written)
            return
        found = self._exchange("exchange", sends, recvs, timeout_s)
        labels = {(peer, of) for peer, _, of in found.sends}
        if kind is not None and found.calls and len(labels) == len(found.sends):  # else see `_check_told_apart`
            if calls is None:  # of their own, since exchanges of ever other sizes must not displace other calls
                calls = self.call_cache["exchange"] = BoundedCache(CACHED_CALLS)
            calls[kind] = found.calls[0].prepared(found.exchange_of_others())

    # Messages that go on beside the program ---------------------------------------------------------

    def isend(self, x: AnyArray, *, dest: int, tag: Tag = 0, timeout_s: float | None = None) -> Future[None]:
        """Begin to send `x` to `dest`, which calls `recv` or `irecv` with the same tag; return a future.

        `x` may be modified when the future is done: after its `result()`, or `wait_all`.

        Raises:
            ArrayError: `dest` is not a rank, `tag` is no tag, or an `irecv` that has not ended writes to `x`.
            UnsupportedError: The transport has no messages beside its calls, as NCCL, and MPI with less than
                MPI_THREAD_MULTIPLE: submit `sendrecv` to a lane.

        >>> import numpy as np
        >>> from bagua_comm import wait_all
        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     other, out = 1 - comm.rank, np.zeros(1)
        ...     requests = [comm.irecv(out, source=other), comm.isend(np.full(1, comm.rank + 1.0), dest=other)]
        ...     wait_all(requests)   # compute before it
        ...     return out
        >>> run_ranks(2, body)
        [array([2.]), array([1.])]
        """
        return self._begin("isend", [(dest, x, tag)], [], timeout_s, dest=dest)

    def irecv(self, out: A, *, source: int, tag: Tag = 0, timeout_s: float | None = None) -> Future[A]:
        """Begin to receive the next array that `source` sends with this tag into `out`; return a future of `out`.

        Receives of one tag get their messages in the order in which they begin. Errors are those of `recv`; the
        future raises those that come later.

        Raises:
            ArrayError: `source` is not a rank, `tag` is no tag, `out` cannot be written to, or a request that has
                not ended uses it.
            UnsupportedError: See `isend`.
        """
        return self._begin("irecv", [], [(source, out, tag)], timeout_s, source=source)

    def recv_any(
        self, out: AnyArray, *, sources: Sequence[int] | None = None, tag: Tag = 0, timeout_s: float | None = None
    ) -> int:
        """Receive the next array of this tag that one of `sources` sends into `out`; return its rank.

        `sources` are all other ranks if None.

        Raises:
            ArrayError: `sources` are not ranks, `tag` is no tag, or `out` cannot be written to.
            CommMismatch: See `recv`.
            CommTimeout: See `recv`.
            UnsupportedError: The transport cannot find out which rank has sent, as NCCL.

        >>> import numpy as np
        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     if comm.rank > 0:
        ...         comm.send(np.array(comm.rank * 10), dest=0)
        ...         return {}
        ...     out = np.array(0)
        ...     return {comm.recv_any(out): int(out) for _ in range(1, comm.size)}
        >>> sorted(run_ranks(3, body)[0].items())
        [(1, 10), (2, 20)]
        """
        ranks = self._check_sources("recv_any", sources)
        return self._exchange("recv_any", [], [(ranks, out, tag)], timeout_s, sources=ranks).receives[0].source

    def _arguments(
        self, name: str, sends: _Given, recvs: _Given, timeout_s: float | None, **peers: Any
    ) -> _Arguments:
        """Check the arguments of a call of this class, which has no `calls` if it sends and receives nothing.

        `peers` are the arguments of a call of one message each way.
        """
        found = _Arguments([], [], [], [], [])

        def message(peer: object, x: AnyArray, tag: Tag = 0) -> tuple[object, AnyArray, Tag]:
            return peer, x, tag

        try:
            messages = [("sends", *message(*each)) for each in sends]
            messages += [("recvs", *message(*each)) for each in recvs]
        except (TypeError, ValueError):
            raise ArrayError(
                f"{name}: sends and recvs are {shown(sends)} and {shown(recvs)}, expected lists of (peer, array) "
                "or (peer, array, tag)"
            ) from None
        for side, peer, x, tag in messages:
            array, peer_of = _ARGUMENTS[side] if peers else (side, f"a peer in {side}")
            tag = COMPARED if tag is UNLABELLED and self.check else check_tag(name, tag)
            detail = {**peers, "tag": tag} if peers and tag not in (0, UNLABELLED, COMPARED) else peers
            call = Call(self, name, x, array, timeout_s=timeout_s, **detail).unchecked()
            if side == "recvs":
                check_writable(name, array, x, call.x)
            if peer is None and name in ("sendrecv", "exchange"):
                continue
            ranks = cast(tuple[int, ...], peer)  # checked by recv_any
            if name != "recv_any":
                ranks = (self._check_peer(name, peer_of, peer),)
            if side == "recvs" and any(arrays.share_elements(call.x, other) for other in found.values):
                which = "out overlaps x" if peers else "an array to receive into overlaps another array"
                raise ArrayError(f"{name}: {which}")
            found.calls.append(call)
            found.tags.append(tag)
            found.values.append(call.x)
            call.contiguous()
            of = label(tag, call.x.dtype, call.x.size)
            if side == "sends":
                found.sends.append((ranks[0], call.x, of))
            else:
                found.receives.append(Receive(ranks, call.x, of))
        if not found.calls:
            return found
        if not peers and len(found.sends) > 1 and len(found.receives) > 1:
            _check_told_apart(name, found)
        first = found.calls[0]
        if any(call.transport is not first.transport for call in found.calls):
            raise UnsupportedError(f"{name}: some arrays are host and some device arrays; make a call for each")
        first.payload = sum(x.nbytes for _, x, _ in found.sends)
        first.sends(found.sends[0][1] if found.sends else None)
        if found.receives:
            first.target = found.receives[0].out
        return found

    def _exchange(
        self, name: str, sends: _Given, recvs: _Given, timeout_s: float | None, **peers: object
    ) -> _Arguments:
        """The body of all calls of this class that wait."""
        found = self._arguments(name, sends, recvs, timeout_s, **peers)
        if not found.calls:
            return found
        first = found.calls[0]
        first.run(lambda *_: found.exchange(found.sends, found.receives))
        found.copy_back()
        if len(found.calls) == len(peers) and name != "recv_any":
            self._cache(found)
        return found

    def _begin(
        self, name: str, sends: _Given, recvs: _Given, timeout_s: float | None, **peers: object
    ) -> Request:
        """The body of `isend` and `irecv`."""
        found = self._arguments(name, sends, recvs, timeout_s, **peers)
        first = found.calls[0]
        self.flight.lanes.add(self._requests)
        self._requests.report_to(self.flight.unretrieved)
        limit_s = self.timeout_s if first.timeout_s is None else first.timeout_s

        def result() -> object:
            found.copy_back()
            return first.original if found.receives else None

        text = f"{name}({', '.join(f'{key}={value}' for key, value in first.detail.items())})"
        buffer = Buffer.of(found.values[0], is_written=not sends)
        self._requests.check_free(text, buffer)

        def begin(*_: Array) -> Request:
            note = call.later_failure(self)
            has_ended = first.transport.begin_labelled(found.sends, found.receives)

            def ended(until_s: float) -> bool:
                try:
                    return has_ended(until_s)
                except Exception as exc:
                    note(exc)
                    raise

            return self._requests.add(text, buffer, ended, result, limit_s, polled=first.transport.needs_polling)

        call = first.once(begin)
        # Within it, an exception of a signal handler aborts what has begun.
        return cast(Request, call.run(self, first.x, first.target, first.timeout_s))

    def _run_if_known(
        self, name: str, arguments: tuple[int | str | None, ...], x: object, out: object, timeout_s: float | None
    ) -> bool:
        """Run a call if there is a prepared one; return False, with nothing done, if there is none."""
        if self.check or x is out:
            return False
        for each in arguments:
            if type(each) is not int and type(each) is not str:  # 1.0 is 1, and neither a rank nor a tag
                return False
        return run_if_known(self, name, arguments, x, out, timeout_s) is not None

    def _cache(self, found: _Arguments) -> None:
        """Keep a call of at most one message each way for `_run_if_known`."""
        call, sends, receives = found.calls[0], found.sends, found.receives
        exchange = found.exchange
        dest, _, sent = sends[0] if sends else (None, None, b"")
        sources, expected = (receives[0].sources, receives[0].expected) if receives else ((), b"")

        receive = Receive(sources, None, expected)  # of all runs: it is faster to keep it
        waiting = (receive,) if sources else ()

        def move(x: Array, out: Array) -> None:
            receive.out, receive.message = x if dest is None else out, None
            exchange(() if dest is None else ((dest, x, sent),), waiting)
            receive.out = receive.message = None

        fills: Fills = "nothing"
        if receives:
            fills = "out" if sends else "x"
            call.output = Output(None, found.values[-1], found.values[-1])
        call.cache(move, *(peer for peer, *_ in sends), *sources, found.tags[0], fills=fills)


class _Arguments(NamedTuple):
    """What a call sends and receives."""

    calls: list[Call]
    tags: list[Tag]
    values: list[Array]
    """The arrays of sends, then those of receives, before copies were made of those that are not contiguous."""
    sends: list[Labelled]
    receives: list[Receive]

    @property
    def exchange(self) -> Callable[[Sequence[Labelled], Sequence[Receive]], None]:
        """Exchanges such messages."""
        transport = self.calls[0].transport
        if UNLABELLED not in self.tags:
            return transport.exchange_labelled

        def exchange(sends: Sequence[Labelled], receives: Sequence[Receive]) -> None:
            recvs = [(each.sources[0], cast(Array, each.out)) for each in receives]
            transport.exchange([(peer, x) for peer, x, _ in sends], recvs)

        return exchange

    def exchange_of_others(self) -> Callable[[Array, Array, Sequence[Array], Sequence[Array]], None]:
        """Exchanges such messages of other arrays: those to send, and those to receive into."""
        exchange, sent = self.exchange, [(peer, of) for peer, _, of in self.sends]
        expected = [(each.sources, each.expected) for each in self.receives]

        def move(_: Array, __: Array, read: Sequence[Array], written: Sequence[Array]) -> None:
            exchange(
                [(peer, x, of) for (peer, of), x in zip(sent, read, strict=True)],
                [Receive(ranks, out, of) for (ranks, of), out in zip(expected, written, strict=True)],
            )

        return move

    def copy_back(self) -> None:
        """Copy what was received to the arrays that are not contiguous."""
        for value, receive in zip(self.values[len(self.sends) :], self.receives, strict=True):
            if value is not receive.out:
                value[...] = receive.out


def _plain(sends: _Given, recvs: _Given) -> tuple[_Kind, list[Array], list[Array]]:
    """Return the arrays of an exchange, and all that its checks depend on but whether these overlap.

    None in place of it: the arguments need more checks, or the arrays are not NumPy's, or have to be copied.
    """
    kind: list[object] = ["exchange"]
    read, written = list[Array](), list[Array]()
    try:
        for side, needed, found in ((sends, READY, read), (recvs, READY | WRITABLE, written)):
            kind.append(len(side))
            for each in side:
                peer, x, tag = each if len(each) == 3 else (*each, 0)
                is_kept = type(peer) in _PEERS and type(tag) in _TAGS
                if not is_kept or type(x) is not np.ndarray or x.flags.num & needed != needed:
                    return None, [], []
                kind += peer, tag, x.dtype, x.shape
                if peer is not None:
                    found.append(x)
    except (TypeError, ValueError):
        return None, [], []
    return tuple(kind), read, written


def _overlap(read: Sequence[Array], written: Sequence[Array]) -> bool:
    """Whether one of `written` overlaps another array; all are contiguous."""
    others = [*read]
    for out in written:
        for x in others:
            if np.may_share_memory(x, out):
                return True
        others.append(out)
    return False


def _check_told_apart(call: str, found: _Arguments) -> None:
    """Raise `ArrayError` if only the order of several messages to a rank and from it tells them apart.

    Arrays of several sizes cannot be interchanged in silence, and it does not matter in which order one array is
    sent twice.
    """
    arriving = Counter(
        (each.sources[0], each.expected) for each in found.receives if each.out is not None and each.out.nbytes
    )
    first: dict[tuple[int, bytes], Array] = {}
    for (peer, _, of), x in zip(found.sends, found.values, strict=False):
        if arriving[peer, of] > 1 and not is_same(first.setdefault((peer, of), x), x):
            raise ArrayError(
                f"{call}: two arrays of {x.nbytes} bytes go to rank {peer}, and two come from it: only their "
                "order tells them apart, which is easily wrong where two neighbours are one rank. Give each "
                "direction and each field a tag, the same on both sides: sends=[(up, top, 'up'), (down, bottom, "
                "'down')], recvs=[(up, above, 'down'), (down, below, 'up')]"
            )
