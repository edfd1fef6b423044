"""Python objects between ranks, by pickle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, overload

from ..errors import shown_as
from ..transports.labels import Receive, Tag, check_tag, label
from . import packets
from .base import CommBase
from .call import Call

T = TypeVar("T")

_BYTES = packets.EMPTY.data.dtype


@shown_as("Communicator")
class ObjectCalls(CommBase):
    """Calls that send Python objects."""

    @overload
    def broadcast_object(self, obj: None, *, root: int, timeout_s: float | None = None) -> Any: ...

    @overload
    def broadcast_object(self, obj: T | None, *, root: int, timeout_s: float | None = None) -> T: ...

    def broadcast_object(self, obj: Any, *, root: int, timeout_s: float | None = None) -> Any:
        """Return the object of `root` on every rank, by pickle; `obj` is ignored elsewhere.

        Collective. Unpickling runs code chosen by the sender: ranks trust each other.

        Raises:
            ArrayError: `root` is not a rank.
            UnsupportedError: The object cannot be pickled; raised on all ranks.
        """
        name = "broadcast_object"
        self._check_peer(name, "root", root)
        mine = packets.pack(name, obj) if self.rank == root else packets.EMPTY
        call = Call(self, name, payload=mine.data.nbytes, root=root, timeout_s=timeout_s)
        packet: packets.Packet = call.run(lambda *_: packets.broadcast(self.host, mine, root))
        return obj if mine.size > 0 else packet.open()

    def allgather_object(self, obj: T, *, timeout_s: float | None = None) -> list[T]:
        """Return the objects of all ranks in rank order, by pickle.

        Collective. Unpickling runs code chosen by the sender: ranks trust each other.

        Raises:
            UnsupportedError: An object cannot be pickled; raised on all ranks.
        """
        mine = packets.pack("allgather_object", obj)
        call = Call(self, "allgather_object", payload=mine.data.nbytes, timeout_s=timeout_s)
        found: list[packets.Packet] = call.run(lambda *_: packets.allgather(self.host, mine))
        failed = [packet for packet in found if packet.size < 0]
        return [packet.open() for packet in failed or found]

    def gather_object(self, obj: T, *, root: int, timeout_s: float | None = None) -> list[T] | None:
        """Return the objects of all ranks in rank order, by pickle, on `root`; None elsewhere.

        Collective. Unpickling runs code chosen by the sender: ranks trust each other.

        Raises:
            ArrayError: `root` is not a rank.
            UnsupportedError: An object cannot be pickled; raised on all ranks.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.gather_object({"rank": comm.rank}, root=0))
        [[{'rank': 0}, {'rank': 1}], None]
        """
        name = "gather_object"
        self._check_peer(name, "root", root)
        mine = packets.pack(name, obj)
        call = Call(self, name, payload=mine.data.nbytes, root=root, timeout_s=timeout_s)
        found: list[packets.Packet] = call.run(lambda *_: packets.gather(self.host, mine, root))
        objs = [packet.open() for packet in found]
        return objs if self.rank == root else None

    @overload
    def scatter_object(self, objs: None, *, root: int, timeout_s: float | None = None) -> Any: ...

    @overload
    def scatter_object(self, objs: Iterable[T] | None, *, root: int, timeout_s: float | None = None) -> T: ...

    def scatter_object(self, objs: Iterable[Any] | None, *, root: int, timeout_s: float | None = None) -> Any:
        """Scatter the objects of `root`, by pickle: the result is object number `rank`.

        Collective. `objs` are p objects on `root`, and None elsewhere. Unpickling runs code chosen by the sender:
        ranks trust each other.

        Raises:
            ArrayError: `root` is not a rank; or the number of its objects is not p, raised on all ranks.
            UnsupportedError: An object cannot be pickled; raised on all ranks.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.scatter_object(["a", 2.5] if comm.rank == 0 else None, root=0))
        ['a', 2.5]
        """
        name = "scatter_object"
        self._check_peer(name, "root", root)
        outgoing = packets.pack_each(name, objs, self.size) if self.rank == root else []
        payload = sum(packet.data.nbytes for packet in outgoing)
        call = Call(self, name, payload=payload, root=root, timeout_s=timeout_s)
        return call.run(lambda *_: packets.scatter(self.host, outgoing, root)).open()

    def send_object(self, obj: object, *, dest: int, tag: Tag = 0, timeout_s: float | None = None) -> None:
        """Send an object, by pickle, to `dest`, which calls `recv_object` with the same tag.

        Returns when `obj` may be modified, which can be before or after it is received. Objects never match the
        arrays of `send` and `recv`, whatever their tags.

        Raises:
            ArrayError: `dest` is not a rank, or `tag` is no tag.
            UnsupportedError: The object cannot be pickled. Nothing was sent.
        """
        name = "send_object"
        self._check_peer(name, "dest", dest)
        tag = check_tag(name, tag)
        packet = packets.pack(name, obj)
        if packet.size < 0:
            packet.open()
        message = dest, packet.data, label(tag, _BYTES, packet.size, of_object=True)
        call = Call(self, name, payload=packet.size, dest=dest, timeout_s=timeout_s).unchecked()
        call.run(lambda *_: self.host.exchange_labelled([message], []))

    def recv_object(self, *, source: int, tag: Tag = 0, timeout_s: float | None = None) -> Any:
        """Receive the next object that `source` sends to this rank by `send_object` with this tag.

        Unpickling runs code chosen by the sender: ranks trust each other.

        Raises:
            ArrayError: `source` is not a rank, or `tag` is no tag.

        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     comm.send_object({"from": comm.rank}, dest=1 - comm.rank)
        ...     return comm.recv_object(source=1 - comm.rank)
        >>> run_ranks(2, body)
        [{'from': 1}, {'from': 0}]
        """
        self._check_peer("recv_object", "source", source)
        return self._receive_object("recv_object", (source,), tag, timeout_s, source=source)[1]

    def recv_any_object(
        self, *, sources: Sequence[int] | None = None, tag: Tag = 0, timeout_s: float | None = None
    ) -> tuple[int, Any]:
        """Receive the next object of this tag that one of `sources` sends; return its rank, and the object.

        `sources` are all other ranks if None. Unpickling runs code chosen by the sender: ranks trust each other.

        Raises:
            ArrayError: `sources` are not ranks, or `tag` is no tag.

        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     if comm.rank > 0:
        ...         return comm.send_object("abc"[comm.rank], dest=0)
        ...     return sorted(comm.recv_any_object() for _ in range(1, comm.size))
        >>> run_ranks(3, body)[0]
        [(1, 'b'), (2, 'c')]
        """
        ranks = self._check_sources("recv_any_object", sources)
        return self._receive_object("recv_any_object", ranks, tag, timeout_s, sources=ranks)

    def _receive_object(
        self, name: str, ranks: tuple[int, ...], tag: Tag, timeout_s: float | None, **peers: Any
    ) -> tuple[int, Any]:
        receive = Receive(ranks, None, label(check_tag(name, tag), _BYTES, 0, of_object=True))
        call = Call(self, name, timeout_s=timeout_s, **peers).unchecked()
        call.run(lambda *_: self.host.exchange_labelled([], [receive]))
        return receive.source, packets.Packet(receive.message.size, receive.message).open()
