"""Python objects between ranks, by pickle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, overload

import numpy as np

from .. import arrays
from ..arrays import Array
from ..errors import shown_as
from . import packets
from .arguments import EMPTY
from .base import CommBase
from .call import Call

T = TypeVar("T")


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

    def send_object(self, obj: Any, *, dest: int, timeout_s: float | None = None) -> None:
        """Send an object, by pickle, to `dest`, which calls `recv_object`.

        Returns when `obj` may be modified, which can be before or after it is received. Objects never match the
        arrays of `send` and `recv`; receive both in the order in which they are sent.

        Raises:
            ArrayError: `dest` is not a rank.
            UnsupportedError: The object cannot be pickled. Nothing was sent.
        """
        name = "send_object"
        self._check_peer(name, "dest", dest)
        packet = packets.pack(name, obj)
        if packet.size < 0:
            packet.open()

        def move(*_: Array) -> None:
            if self.check:
                self._message_checker.compare(self.host, name, [(dest, None)], [])
            packets.send(self.host, packet, dest)

        Call(self, name, payload=packet.size, dest=dest, timeout_s=timeout_s).unchecked().run(move)

    def recv_object(self, *, source: int, timeout_s: float | None = None) -> Any:
        """Receive the next object that `source` sends to this rank by `send_object`.

        Unpickling runs code chosen by the sender: ranks trust each other.

        Raises:
            ArrayError: `source` is not a rank.

        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     comm.send_object({"from": comm.rank}, dest=1 - comm.rank)
        ...     return comm.recv_object(source=1 - comm.rank)
        >>> run_ranks(2, body)
        [{'from': 1}, {'from': 0}]
        """
        name, host = "recv_object", self.host
        self._check_peer(name, "source", source)

        def move(*_: Array) -> packets.Packet:
            if self.check:
                (wrong,) = self._message_checker.compare(host, name, [], [(source, None)])
                if wrong is not None:
                    # Receive it all the same, so that the next receive gets the next message.
                    if wrong.library == arrays.library(EMPTY):
                        host.exchange([], [(source, np.empty(wrong.nbytes, np.uint8))])
                    raise wrong.error
            return packets.receive(host, source)

        return Call(self, name, source=source, timeout_s=timeout_s).unchecked().run(move).open()
