"""Point-to-point messages: send, recv, sendrecv and exchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from .. import arrays
from ..arrays import A, AnyArray, Array
from ..errors import ArrayError, UnsupportedError, shown_as
from ..transports.base import Transport
from ..transports.flow import Message
from . import packets
from .arguments import Output, check_writable, is_same
from .base import CommBase
from .call import Call
from .prepared import Fills, run_if_known

MaybeMessage: TypeAlias = tuple[int | None, AnyArray]
"""A message; nothing is sent or received if the peer is None."""


_ARGUMENTS = {"sends": ("x", "dest"), "recvs": ("out", "source")}
"""The names of an array and its peer in calls of one message each way."""


@shown_as("Communicator")
class PointToPoint(CommBase):
    """Messages between two ranks."""

    def send(self, x: AnyArray, *, dest: int, timeout_s: float | None = None) -> None:
        """Send `x` to `dest`, which calls `recv`.

        Returns when `x` may be modified, which can be before or after it is received. Submitted to a lane, a send
        or recv runs concurrently with the caller, as MPI's isend and irecv do. The tasks of a lane run in order,
        so a long send blocks it until the recv: if two ranks send to each other, submit `sendrecv` or `exchange`.

        Raises:
            ArrayError: `dest` is not a rank.
            UnsupportedError: No transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     x = np.arange(2) if comm.rank == 0 else np.zeros(2, int)
        ...     with comm.lane() as lane:
        ...         if comm.rank == 0:
        ...             request = lane.submit(lane.comm.send, x, dest=1)     # isend: returns at once
        ...         else:
        ...             request = lane.submit(lane.comm.recv, x, source=0)   # irecv
        ...         request.result()                                         # wait; until then, leave x alone
        ...     return x
        >>> run_ranks(2, body)
        [array([0, 1]), array([0, 1])]
        """
        if not self._run_if_known("send", (dest,), x, None, timeout_s):
            self._exchange("send", [(dest, x)], [], timeout_s, dest=dest)

    def recv(self, out: A, *, source: int, timeout_s: float | None = None) -> A:
        """Receive the next array that `source` sends to this rank into `out`, and return it.

        Submitted to a lane, it runs concurrently with the caller; see `send`.

        Raises:
            ArrayError: `source` is not a rank, or `out` cannot be written to.
            CommMismatch: The sizes of the message and of `out` differ.
            UnsupportedError: No transport takes such an array.
        """
        if not self._run_if_known("recv", (source,), out, None, timeout_s):
            self._exchange("recv", [], [(source, out)], timeout_s, source=source)
        return out

    def sendrecv(
        self, x: AnyArray, out: A, *, dest: int | None, source: int | None, timeout_s: float | None = None
    ) -> A:
        """Send `x` to `dest` while receiving `out` from `source`; return `out`.

        Nothing is sent if `dest` is None, and `out` is unchanged if `source` is None (MPI's PROC_NULL), as at the
        ends of a row of ranks.

        Raises:
            ArrayError: `dest` or `source` is not a rank, or `out` cannot be written to or overlaps `x`.
            CommMismatch: The sizes of the message and of `out` differ.
            UnsupportedError: No transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):   # the left neighbour of each rank
        ...     right = comm.rank + 1 if comm.rank + 1 < comm.size else None
        ...     left = comm.rank - 1 if comm.rank > 0 else None
        ...     return comm.sendrecv(np.array(comm.rank), np.array(-1), dest=right, source=left)
        >>> run_ranks(3, body)
        [array(-1), array(0), array(1)]
        """
        if out is None or not self._run_if_known("sendrecv", (dest, source), x, out, timeout_s):
            self._exchange("sendrecv", [(dest, x)], [(source, out)], timeout_s, dest=dest, source=source)
        return out

    def exchange(
        self, sends: Sequence[MaybeMessage], recvs: Sequence[MaybeMessage], *, timeout_s: float | None = None
    ) -> None:
        """Send and receive several messages, given as lists of (peer, array), concurrently.

        Between two ranks, messages match in the order of the lists; they also match `send` and `recv`. A message
        whose peer is None is left out.

        Two arrays of one size to a rank and two from it are refused, unless the two to it are the same array:
        only their order tells them apart, and it is easily wrong on a ring of one or two ranks, where both
        neighbours are one rank. There, make one call for each direction, as below, and for each array: also for
        several fields of one size.

        Raises:
            ArrayError: A peer is not a rank; or an array to receive into cannot be written to or overlaps another
                one; or only the order of messages tells them apart. Raised on the ranks that pass them.
            CommMismatch: The sizes of a message and of the array that receives it differ.
            UnsupportedError: No transport takes such arrays.

        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):   # the halo of each rank of a ring, of any size
        ...     up, down = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        ...     column = np.array([-1, 10 * comm.rank, 10 * comm.rank + 1, -1])
        ...     top, bottom = column[1:2], column[2:3]
        ...     comm.exchange([(up, top)], [(down, column[3:])])
        ...     comm.exchange([(down, bottom)], [(up, column[:1])])
        ...     return column.tolist()
        >>> run_ranks(2, body)
        [[11, 0, 1, 10], [1, 10, 11, 0]]
        """
        self._exchange("exchange", sends, recvs, timeout_s)

    def _exchange_in_order(self, sends: Sequence[MaybeMessage], recvs: Sequence[MaybeMessage]) -> None:
        """As `exchange`, but with any messages, which match in the order of the lists."""
        self._exchange("exchange", sends, recvs, None, in_order=True)

    def _exchange(
        self,
        name: str,
        sends: Sequence[MaybeMessage],
        recvs: Sequence[MaybeMessage],
        timeout_s: float | None,
        *,
        in_order: bool = False,
        **peers: Any,
    ) -> None:
        """The body of all calls of this class; `peers` are the arguments of a call of one message each way."""
        outgoing: list[Message] = []
        incoming: list[Message] = []
        values: list[Array] = []
        calls: list[Call] = []
        try:
            messages = [("sends", peer, x) for peer, x in sends] + [("recvs", peer, x) for peer, x in recvs]
        except (TypeError, ValueError) as exc:
            raise ArrayError(f"{name}: sends and recvs are lists of pairs, (peer, array): {exc}") from exc
        for side, peer, x in messages:
            array, peer_of = _ARGUMENTS[side] if peers else (side, f"a peer in {side}")
            call = Call(self, name, x, array, timeout_s=timeout_s, **peers).unchecked()
            if side == "recvs":
                check_writable(name, array, x, call.x)
            if peer is None and name in ("sendrecv", "exchange"):
                continue
            peer = self._check_peer(name, peer_of, peer)
            if side == "recvs" and any(arrays.share_elements(call.x, other) for other in values):
                which = "out overlaps x" if peers else "an array to receive into overlaps another array"
                raise ArrayError(f"{name}: {which}")
            calls.append(call)
            values.append(call.x)
            call.contiguous()
            (outgoing if side == "sends" else incoming).append((peer, call.x))
        if not calls:
            return
        if not (in_order or peers) and len(outgoing) > 1 and len(incoming) > 1:
            _check_told_apart(name, outgoing, values, incoming)
        first = calls[0]
        if any(call.transport is not first.transport for call in calls):
            raise UnsupportedError(f"{name}: some arrays are host and some device arrays; make a call for each")
        first.payload = sum(x.nbytes for _, x in outgoing)
        first.sends(outgoing[0][1] if outgoing else None)
        if incoming:
            first.target = incoming[0][1]
        if self.check:
            first.run(lambda *_: self._exchange_what_fits(name, first.transport, outgoing, incoming))
        else:
            first.run(lambda *_: first.transport.exchange(outgoing, incoming))
        received = values[len(outgoing) :]
        for value, (_, target) in zip(received, incoming, strict=True):
            if value is not target:
                value[...] = target
        if peers and len(calls) == len(peers):
            self._cache(first, [peer for peer, _ in outgoing], [peer for peer, _ in incoming], received)

    def _run_if_known(
        self, name: str, peers: tuple[int | None, ...], x: Any, out: Any, timeout_s: float | None
    ) -> bool:
        """Run a call if there is a prepared one; return False, with nothing done, if there is none."""
        if self.check or x is out:
            return False
        for peer in peers:
            if type(peer) is not int:  # 1.0 is 1, and no rank
                return False
        return run_if_known(self, name, peers, x, out, timeout_s) is not None

    def _cache(self, call: Call, dests: list[int], sources: list[int], received: list[Array]) -> None:
        """Keep a call of at most one message each way for `_run_if_known`."""
        exchange = call.transport.exchange

        def move(x: Array, out: Array) -> None:
            exchange([*zip(dests, (x,), strict=False)], [*zip(sources, (out,), strict=False)])

        fills: Fills = "nothing"
        if received:
            fills = "out" if dests else "x"
            call.output = Output(None, received[0], received[0])
        call.cache(move, *dests, *sources, fills=fills)

    def _exchange_what_fits(
        self, call: str, transport: Transport, sends: Sequence[Message], recvs: Sequence[Message]
    ) -> None:
        """Exchange messages; raise if one differs from what this rank expects.

        It is received all the same, so that the next receive gets the next message.
        """
        host = self.host
        mismatches = self._message_checker.compare(host, call, sends, recvs)
        incoming = []
        for (peer, out), wrong in zip(recvs, mismatches, strict=True):
            if wrong is None:
                incoming.append((peer, out))
            elif wrong.library == arrays.library(out):
                incoming.append((peer, arrays.empty((wrong.nbytes,), np.uint8, like=out)))
        transport.exchange(sends, incoming)
        for (peer, _), wrong in zip(recvs, mismatches, strict=True):
            if wrong is not None and wrong.library == "object":
                packets.receive(host, peer)
        for wrong in mismatches:
            if wrong is not None:
                raise wrong.error


def _check_told_apart(
    call: str, outgoing: Sequence[Message], values: Sequence[Array], incoming: Sequence[Message]
) -> None:
    """Raise `ArrayError` if only the order of several messages to a rank and from it tells them apart.

    `values` begins with the arrays that the user sends, before copies were made. Arrays of several sizes cannot
    be interchanged in silence, and it does not matter in which order one array is sent twice.
    """
    arriving = Counter((peer, out.nbytes) for peer, out in incoming if out.nbytes)
    first: dict[tuple[int, int], Array] = {}
    for (peer, _), x in zip(outgoing, values, strict=False):
        if arriving[peer, x.nbytes] > 1 and not is_same(first.setdefault((peer, x.nbytes), x), x):
            raise ArrayError(
                f"{call}: two arrays of {x.nbytes} bytes go to rank {peer}, and two come from it: only their "
                "order tells them apart, which is easily wrong where two neighbours are one rank. Make one call "
                "for each direction and each field, such as sendrecv(x, out, dest=up, source=down), and then "
                "sendrecv(x, out, dest=down, source=up); or send the fields as one array, by numpy.stack"
            )
