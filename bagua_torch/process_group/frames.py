"""Frames: the first part of each message, which holds all of a short message."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from bagua_comm import arrays
from bagua_comm.arrays import Array, as_bytes
from bagua_comm.transports.flow import Message
from bagua_comm.transports.labels import LABEL_BYTES

from ..arrays import as_tensor

_NUMBERS_BYTES = 32
HEADER_BYTES = _NUMBERS_BYTES + LABEL_BYTES
"""The head of a frame: four numbers, and the label of a message that has one. The numbers are the bytes of the
message; the bytes expected in return in a swap, else -1; the number of the collective call; and the offer of a
plan (`Plan.offer`), in place of which a frame that belongs to no call has the serial number of the next one."""

BODY_BYTES = 1 << 16
"""The most bytes of a message that its frame holds; only these are sent. With 64 KiB, an allreduce of 64 KiB
among two ranks takes three quarters of the time that it takes with 4 KiB, as no rest has to follow."""


class Frame:
    """The head and the beginning of a message, as arrays and as a tensor that share memory."""

    __slots__ = ("__weakref__", "body", "head", "label", "tensor", "work")

    def __init__(self) -> None:
        memory = np.empty(HEADER_BYTES + BODY_BYTES, np.uint8)
        self.head, self.body = memory[:_NUMBERS_BYTES].view(np.int64), memory[HEADER_BYTES:]
        self.label = memory.data[_NUMBERS_BYTES:HEADER_BYTES]
        self.tensor = as_tensor(memory)
        self.work: dist.Work | None  # None once it has been waited for


def swaps_of(sends: Sequence[Message], recvs: Sequence[Message]) -> dict[int, tuple[Array, Array]]:
    """For each peer with exactly one message in each direction: the array to send, and the array to receive."""
    outgoing, incoming = dict(sends), dict(recvs)
    several: set[int] = set()
    for messages, by_peer in ((sends, outgoing), (recvs, incoming)):
        if len(by_peer) < len(messages):
            peers = [peer for peer, _ in messages]
            several.update(peer for peer in by_peer if peers.count(peer) > 1)
    return {peer: (x, incoming[peer]) for peer, x in outgoing.items() if peer in incoming and peer not in several}


def rest_of(x: Array) -> torch.Tensor:
    """The bytes of `x` that do not fit in its frame. Shares memory with `x`; never copies."""
    return bytes_of(x, BODY_BYTES)


def bytes_of(x: Array, start: int = 0) -> torch.Tensor:
    """The bytes of `x` from `start` on. Shares memory with `x`; never copies."""
    rest = as_bytes(x)[start:]
    if not rest.flags.writeable:  # PyTorch has no read-only tensors; a sent array is only read
        memory = (ctypes.c_uint8 * rest.nbytes).from_address(arrays.address(rest))
        rest = np.frombuffer(memory, np.uint8)
    return as_tensor(rest)
