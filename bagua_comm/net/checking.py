"""Check of the compiled plugin: messages between two of its endpoints in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from ctypes import c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import BootstrapError, CommError, CommTimeout
from .binding import Plugin
from .building import build

SIZES = (0, 1, 8, 4096, 65_536, 1 << 20, 4 << 20)
"""Bytes of the messages that `check` sends."""


@dataclass(frozen=True)
class Checked:
    """Result of `check`."""

    library: str
    interface: str
    """The first network interface of the plugin."""
    interfaces: tuple[str, ...]
    speed_mbit: int
    messages: int
    nbytes: int
    seconds: float


def check(library: Path | None = None, *, timeout_s: float = 30.0) -> Checked:
    """Send messages through the plugin from this process to itself, and compare every byte.

    Args:
        library: The compiled plugin; by default it is built if missing.
        timeout_s: The time limit, in seconds.

    Raises:
        BootstrapError: The plugin cannot be built or loaded, or finds no interface.
        CommError: It fails, or changes a message; `CommTimeout` if it takes too long.
    """
    library = build() if library is None else library
    try:
        plugin = Plugin(library)
    except (OSError, ValueError) as exc:
        raise BootstrapError(f"{library} cannot be loaded as a network plugin: {exc}") from exc
    deadline = time.monotonic() + timeout_s
    start = time.monotonic()
    plugin.start()
    if (found := plugin.count()) < 1:
        raise BootstrapError("the network plugin finds no interface; see NCCL_SOCKET_IFNAME")
    pair = ConnectedPair.connect(plugin, deadline=deadline)
    try:
        for size in SIZES:
            _send_one(pair, size, deadline)
    finally:
        pair.close()
    seconds = time.monotonic() - start
    properties = [plugin.properties(device) for device in range(found)]
    names = tuple(one.name.decode() for one in properties)
    return Checked(str(library), names[0], names, properties[0].speed, len(SIZES), sum(SIZES), seconds)


@dataclass
class ConnectedPair:
    """The two ends of a connection in this process."""

    plugin: Plugin
    sender: c_void_p
    receiver: c_void_p

    @classmethod
    def connect(cls, plugin: Plugin, *, device: int = 0, deadline: float) -> ConnectedPair:
        """Listen, connect and accept.

        Raises:
            CommTimeout: The deadline, of `time.monotonic`, has passed.
        """
        handle, listener = plugin.listener(device)
        sender: c_void_p | None = None
        receiver: c_void_p | None = None
        try:
            while sender is None or receiver is None:
                sender = sender or plugin.connected(device, handle)
                receiver = receiver or plugin.accepted(listener)
                _within(deadline, "connecting")
        finally:
            plugin.closeListen(listener)
        return cls(plugin, sender, receiver)

    def close(self) -> None:
        """Close both ends."""
        self.plugin.closeSend(self.sender)
        self.plugin.closeRecv(self.receiver)


def _send_one(pair: ConnectedPair, size: int, deadline: float) -> None:
    plugin = pair.plugin
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    out = np.zeros(size + 1, np.uint8)
    posts: dict[str, Callable[[], c_void_p | None]] = {
        "received": lambda: plugin.receive(pair.receiver, out.ctypes.data, size),
        "sent": lambda: plugin.send(pair.sender, data.ctypes.data, size),
    }
    requests: dict[str, c_void_p | None] = dict.fromkeys(posts)
    sizes: dict[str, int | None] = dict.fromkeys(posts)
    while None in sizes.values():
        for name, post in posts.items():
            if (request := requests[name]) is None:
                requests[name] = post()
            elif sizes[name] is None:
                sizes[name] = plugin.finished(request)
        _within(deadline, f"a message of {size} bytes")
    if sizes != {"sent": size, "received": size} or not np.array_equal(out[:size], data) or out[size]:
        raise CommError(f"the network plugin changed a message of {size} bytes on its way ({sizes})")


def _within(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise CommTimeout(f"the network plugin: {what} takes too long; is this host's network up?")
