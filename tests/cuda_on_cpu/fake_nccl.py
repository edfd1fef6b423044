"""Stands in for `cupy.cuda.nccl`: ranks are threads that share a unique id.

A call is only enqueued. It runs once the matching calls of all ranks are at the head of their streams, and blocks
its stream until then. As with NCCL, the first collective of a communicator, and the first message from one rank
to another, make the host wait for the other side, to connect. If ranks' calls do not match, NCCL hangs or writes
nonsense; here that is an error.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np

from . import matching
from .machine import Operation, poison, running
from .matching import Call, World

NCCL_INT8 = NCCL_CHAR = 0
NCCL_UINT8 = 1
NCCL_INT32 = NCCL_INT = 2
NCCL_UINT32 = 3
NCCL_INT64 = 4
NCCL_UINT64 = 5
NCCL_FLOAT16 = NCCL_HALF = 6
NCCL_FLOAT32 = NCCL_FLOAT = 7
NCCL_FLOAT64 = NCCL_DOUBLE = 8
NCCL_BFLOAT16 = 9
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)

available = True

_STATUS = {
    1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    2: "NCCL_ERROR_SYSTEM_ERROR: unhandled system error (run with NCCL_DEBUG=INFO for details)",
    3: "NCCL_ERROR_INTERNAL_ERROR: internal error - please report this issue to the NCCL developers",
    4: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument (run with NCCL_DEBUG=WARN for details)",
    5: "NCCL_ERROR_INVALID_USAGE: invalid usage (run with NCCL_DEBUG=WARN for details)",
    6: "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error",
}  # CuPy's own table also lacks 7 (in progress) and 8 (timeout)

_local = threading.local()


class NcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(_STATUS[status])


def get_version() -> int:
    return 23203


def get_build_version() -> int:
    return 22707


def get_unique_id() -> bytes:
    return os.urandom(128)


def groupStart() -> None:
    _local.depth = _depth() + 1


def groupEnd() -> None:
    if not _depth():
        raise NcclError(5)
    _local.depth -= 1
    if not _depth():
        calls, _local.calls = _calls(), []
        comms = dict.fromkeys(call.comm for call in calls)
        launched = [(comm, comm._launch([call for call in calls if call.comm is comm])) for comm in comms]
        for comm, operation in launched:
            comm._connect(operation)


def _depth() -> int:
    """How many groups this thread is in."""
    return getattr(_local, "depth", 0)


def _calls() -> list[Call]:
    """The calls of this thread in these groups."""
    return _local.__dict__.setdefault("calls", [])


class NcclConfig:
    def __init__(self, split_share: int = 0) -> None:
        self.split_share = split_share


class NcclCommunicator:
    def __init__(self, ndev: int, commId: bytes, rank: int, config: NcclConfig | None = None) -> None:
        if not isinstance(commId, bytes) or len(commId) != 128:
            raise TypeError(f"commId is {commId!r}, not 128 bytes")
        if not 0 <= rank < ndev:
            raise NcclError(4)
        with running().changed:
            self._enter(running().nccl_worlds.setdefault(commId, World(ndev)), rank)

    def _enter(self, world: World, rank: int) -> None:
        """Join the world, and wait until all ranks have."""
        assert not _depth(), "this NCCL makes no communicators in a group"
        assert rank not in world.comms, f"two ranks {rank} of {world.name}"
        self._machine, self._world, self._rank, self._device = running(), world, rank, running().device
        self._pending: list[Operation] = []
        self._splits = 0
        world.comms[rank] = self
        self._wait_for_ranks(world.comms, f"rank {rank} of {world.name} is set up and waits for")
        devices = {comm._device for comm in world.comms.values()}
        if len(devices) < world.size and not self._machine.nccl_allows_sharing:
            self._world = None
            raise NcclError(5)  # "Duplicate GPU detected"

    def _wait_for_ranks(self, came: dict[int, Any], what: str) -> None:
        world = self._alive()

        def missing() -> str | None:
            ranks = sorted({*range(world.size)} - {*came})
            return f"ranks {ranks}" if ranks and self._world is not None else None

        self._machine.progress()
        self._machine.wait_until(missing, what)
        if self._world is None:  # another thread aborted
            raise NcclError(3)

    def _alive(self) -> World:
        if self._world is None:
            raise NcclError(4)
        return self._world

    @property
    def comm(self) -> int:
        return 0 if self._world is None else id(self._world)

    def size(self) -> int:
        return self._alive().size

    def rank_id(self) -> int:
        return self._alive() and self._rank

    def device_id(self) -> int:
        return self._alive() and self._device

    def check_async_error(self) -> None:
        self._alive()
        if self._machine.nccl_async_error is not None:
            raise NcclError(self._machine.nccl_async_error)

    def commSplit(self, color: int, key: int, config: NcclConfig | None = None) -> NcclCommunicator | None:
        with self._machine.changed:
            world, index = self._alive(), self._splits
            assert all(each.done for each in self._pending), "commSplit while there is work on the communicator"
            self._splits += 1
            came = world.splits.setdefault(index, {})
            came[self._rank] = (color, key)
            self._wait_for_ranks(came, f"rank {self._rank} of {world.name} is in commSplit and waits for")
            if color == -1:
                return None
            members = [rank for _, rank in sorted((key, rank) for rank, (c, key) in came.items() if c == color)]
            child = NcclCommunicator.__new__(NcclCommunicator)
            group = world.children.setdefault((index, color), World(len(members)))
            child._enter(group, members.index(self._rank))
            return child

    def destroy(self) -> None:
        if self._world is not None:
            self._machine.wait(self._pending, "NcclCommunicator.destroy")
            self._world = None

    def _check_device(self) -> None:
        if self._device in self._machine.broken:
            raise NcclError(1)

    def abort(self) -> None:
        """End all calls that this rank has enqueued, with garbage; its peers' calls never end."""
        with self._machine.changed:
            self._check_device()
            self._world = None
            for operation in self._pending:
                if not operation.done:
                    garbled = [call.recv for call in operation.calls if call.recv is not None]
                    operation.run = lambda garbled=garbled: [poison(recv) for recv in garbled]
                    operation.matches = []
            self._machine.progress()

    # Calls ------------------------------------------------------------------------------------------

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        self._call("allReduce", datatype, stream, (sendbuf, count), (recvbuf, count), op=op)

    def reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int
    ) -> None:
        recv = (recvbuf, count) if root == self._rank else None
        self._call("reduce", datatype, stream, (sendbuf, count), recv, op=op, root=root)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        send = (sendbuff, count) if root == self._rank else None
        self._call("broadcast", datatype, stream, send, (recvbuff, count), root=root)

    def bcast(self, buff: int, count: int, datatype: int, root: int, stream: int) -> None:
        self.broadcast(buff, buff, count, datatype, root, stream)

    def reduceScatter(
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        send = (sendbuf, recvcount * self.size())
        self._call("reduceScatter", datatype, stream, send, (recvbuf, recvcount), op=op)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        self._call("allGather", datatype, stream, (sendbuf, count), (recvbuf, count * self.size()))

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._call("send", datatype, stream, (sendbuf, count), None, slot=(self._rank, peer))

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._call("recv", datatype, stream, None, (recvbuf, count), slot=(peer, self._rank))

    def _call(
        self,
        kind: str,
        datatype: int,
        stream: int,
        send: tuple[int, int] | None,
        recv: tuple[int, int] | None,
        *,
        op: int | None = None,
        root: int | None = None,
        slot: tuple[int, int] | None = None,
    ) -> None:
        ranks = range(self._alive().size)
        known = datatype in range(len(matching.DTYPES)) and op in (None, *range(len(matching.OPS)))
        if not known or not {root, *(slot or ())} <= {None, *ranks}:
            raise NcclError(4)
        dtype = matching.DTYPES[datatype]
        found = [self._machine.find(at[0], at[1] * dtype.itemsize) if at else (None, None) for at in (send, recv)]
        source, target = (None if data is None else data.view(dtype) for _, data in found)
        if source is not None and target is not None and np.may_share_memory(source, target):
            longer, shorter = sorted((source, target), key=len, reverse=True)
            own = longer[self._rank * len(shorter) :] if len(longer) > len(shorter) else longer
            assert own.ctypes.data == shorter.ctypes.data, f"{kind}: buffers overlap, but are not in place"
        count = min(at[1] for at in (send, recv) if at)
        shared = (count, dtype.name) if slot else (kind, count, dtype.name, op, root)
        reduce = None if op is None else matching.reduction(op, dtype)
        blocks = [block for block, _ in found if block is not None]
        call = Call(self, kind, stream, slot, shared, source, target, reduce, blocks)
        if _depth():
            _calls().append(call)
        else:
            self._connect(self._launch([call]))

    def _launch(self, calls: list[Call]) -> Operation:
        """Enqueue calls of one group as one operation."""
        self._alive()
        assert len({call.stream for call in calls}) == 1, "the calls of a group are on several streams"
        to_myself = [call.kind for call in calls if call.slot == (self._rank, self._rank)]
        if to_myself.count("send") != to_myself.count("recv"):
            raise NcclError(5)
        self._check_device()
        queue = self._machine.queue(calls[0].stream)
        assert queue.device == self._device, f"a communicator of device {self._device} is used on {queue}"
        name = "nccl " + "+".join(dict.fromkeys(call.kind for call in calls))
        blocks = [block for call in calls for block in call.blocks]
        return self._machine.enqueue(queue, name, lambda: None, blocks=blocks, calls=calls)

    def _connect(self, operation: Operation) -> None:
        """Wait for the ranks to which this one has never talked; no other calls wait."""
        for match in [each for each in operation.matches if each.first and self._machine.nccl_connects]:
            self._machine.wait_until(
                lambda match=match: match.missing() if self._world else None, f"to connect, {operation}"
            )
        if self._world is None:  # another thread aborted
            raise NcclError(3)
