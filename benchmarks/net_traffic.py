"""Traffic through a network plugin, as NCCL makes it: messages in order, at most 32 on their way, all checked."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from ctypes import c_void_p

import numpy as np

from bagua_comm.arrays import Array
from bagua_comm.errors import CommError, CommTimeout
from bagua_comm.net.binding import Plugin
from bagua_comm.net.checking import ConnectedPair

MOST_OUTSTANDING = 32
"""Requests of a connection at a time, as NCCL has them at most."""

GUARD = 0xA5
"""Bytes behind each receive buffer, which must not change."""


def connect_pair(plugin: Plugin, *, device: int = 0, timeout_s: float = 20.0) -> ConnectedPair:
    """Two ends of a connection in this process."""
    return ConnectedPair.connect(plugin, device=device, deadline=time.monotonic() + timeout_s)


def random_sizes(random: np.random.Generator, count: int, largest: int, mean: float) -> list[int]:
    """Sizes from 0 to `largest`, small ones mostly, whose mean is about `mean`; the largest is among them.

    A twentieth is 0. The density of the others falls as 1 / size**a, with the `a` that gives the mean.
    """
    low, high = 0.0, 3.0
    points = np.exp(np.linspace(0, np.log(largest), 4096))

    def mean_of(power: float) -> float:
        weights = points ** (1 - power)
        return float((points * weights).sum() / weights.sum())

    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_of(middle) > mean else (low, middle)
    weights = points ** (1 - low)
    sizes = random.choice(points, count, p=weights / weights.sum()).astype(np.int64)
    sizes += (sizes * random.random(count) * 0.002).astype(np.int64)  # between the points as well
    sizes[random.random(count) < 0.05] = 0
    sizes[random.integers(count)] = largest
    return [int(size) for size in np.minimum(sizes, largest)]


def make_pool(largest: int, seed: int = 0) -> Array:
    """Random bytes that messages are slices of."""
    return np.random.default_rng(seed).integers(0, 256, largest + 4096, np.uint8)


def exchange(
    pair: ConnectedPair,
    sizes: Sequence[int],
    pool: Array,
    *,
    seed: int = 0,
    outstanding: int = MOST_OUTSTANDING,
    timeout_s: float = 60.0,
    room: int = 0,
) -> int:
    """Send messages of these sizes over a connection whose ends are here, and compare every byte.

    Sends and receives are posted and tested in a random order; as in NCCL, only the oldest of each end is tested.

    Args:
        pair: The connection.
        sizes: Bytes of each message.
        pool: What they are slices of; see `make_pool`.
        seed: Of the order, and of the slices.
        outstanding: Requests of each end at a time, at most.
        timeout_s: When to give up if no message arrives for so long.
        room: How much larger than the message a receive buffer may be, in bytes.

    Returns:
        How many bytes were sent.

    Raises:
        CommError: Bytes are wrong, or lie where none may; a size is wrong; the plugin fails.
    """
    plugin, random = pair.plugin, np.random.default_rng(seed)
    starts = random.integers(0, 4096, len(sizes))
    sends: deque[tuple[c_void_p, Array]] = deque()
    receives: deque[tuple[int, c_void_p, Array]] = deque()
    to_send = to_receive = arrived = 0
    choices = random.integers(0, 4, 4096)
    turn, moved = 0, time.monotonic()
    while arrived < len(sizes) or sends:
        choice = choices[turn % 4096]
        turn += 1
        if choice == 0 and to_send < len(sizes) and len(sends) < outstanding:
            part = pool[starts[to_send] :][: sizes[to_send]]
            if (request := plugin.send(pair.sender, part.ctypes.data, sizes[to_send])) is not None:
                sends.append((request, part))
                to_send += 1
        elif choice == 1 and to_receive < len(sizes) and len(receives) < outstanding:
            size = sizes[to_receive] + (room if to_receive % 3 == 0 else 0)
            out = np.empty(size + 1, np.uint8)
            out[size] = GUARD
            if (request := plugin.receive(pair.receiver, out.ctypes.data, size)) is not None:
                receives.append((to_receive, request, out))
                to_receive += 1
        elif choice == 2 and sends:
            if plugin.finished(sends[0][0]) is not None:
                sends.popleft()
        elif choice == 3 and receives:
            number, request, out = receives[0]
            if (found := plugin.finished(request)) is not None:
                receives.popleft()
                _compare(number, found, out, pool[starts[number] :][: sizes[number]])
                arrived += 1
                moved = time.monotonic()
        if turn % 4096 == 0 and time.monotonic() - moved > timeout_s:
            raise CommTimeout(f"no message has arrived for {timeout_s} s; {arrived} of {len(sizes)} have")
    return sum(sizes)


def _compare(number: int, found: int, out: Array, part: Array) -> None:
    if found != len(part) or out[-1] != GUARD or not np.array_equal(out[:found], part):
        raise CommError(f"message {number} of {len(part)} bytes came as {found} bytes, or changed")
