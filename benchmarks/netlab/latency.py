"""A switch between the hosts in which every packet waits: latency, where the kernel has no netem.

Each host has a TAP device, joined with the outer end of its link by a bridge. A process reads the packets that
hosts send from these devices, and writes each to the device of its receiver when its time has come. The queue is
not limited and keeps the order, so that the links alone limit the rate: what a host sends waits for its token
bucket first, then the latency, then the bucket of the receiver.

Packets cross whole, up to 64 KiB, as TCP gives them to the network card, and with their checksums still to be
made: a few thousand system calls a second carry four hosts with 200 Mbit/s each.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import struct
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

from ..bench import ROOT
from .tools import LabError

_SET_INTERFACE, _SET_OFFLOADS = 0x400454CA, 0x400454D0  # TUNSETIFF and TUNSETOFFLOAD of linux/if_tun.h
_TAP, _NO_PROTOCOL, _WITH_HEADER = 0x0002, 0x1000, 0x4000  # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR
_CHECKSUM, _SEGMENTS_4, _SEGMENTS_6 = 0x01, 0x02, 0x04  # TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6

_HEADER_BYTES = 10
"""Bytes of struct virtio_net_hdr, before the Ethernet header."""

_RECEIVER = slice(_HEADER_BYTES, _HEADER_BYTES + 6)
_SENDER = slice(_HEADER_BYTES + 6, _HEADER_BYTES + 12)
_MOST_BYTES = _HEADER_BYTES + 18 + (1 << 16)
START_S = 180
"""Seconds that the process may take to start, also on a busy machine."""

_AT_ONCE = 64
"""Packets that are read of a host before those that are due are sent."""


@contextlib.contextmanager
def delayed(latency_s: float, devices: Sequence[str]) -> Iterator[None]:
    """Create TAP devices, and let packets between them wait so long, in the body of `with`.

    Raises:
        LabError: This machine has no TAP devices, or the process that carries the packets has ended early.
    """
    command = [sys.executable, "-m", "benchmarks.netlab", "switch", repr(latency_s), *devices]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen(command, **pipes) as switch:
        assert switch.stdin is not None
        assert switch.stdout is not None
        try:
            ready, _, _ = select.select([switch.stdout], [], [], START_S)
            if not ready or not switch.stdout.readline():
                raise LabError("this machine does not allow TAP devices, by which packets are delayed; see above")
            yield
            if switch.poll() is not None:
                raise LabError("the process that delays packets has ended; its error is above")
        finally:
            switch.stdin.close()
            try:
                waits = switch.stdout.read() if switch.wait(30) == 0 else ""
            except subprocess.TimeoutExpired:
                waits = ""
            finally:
                switch.kill()
        if waits:
            print(_sentence(latency_s, json.loads(waits)), file=sys.stderr)


def _sentence(latency_s: float, waits: dict[str, float]) -> str:
    """What `carry` has found, for a reader."""
    return (
        f"netlab: {waits['packets']:,} packets waited {1e3 * latency_s:g} ms, and on average "
        f"{waits['late_ms']:.2f} ms longer; 99 of 100 less than {waits['late_ms_99']:g} ms longer"
    )


def carry(latency_s: float, devices: Sequence[str]) -> dict[str, float]:
    """Be the switch, until standard input ends; returns the number of packets, and how much longer they waited.

    Raises:
        OSError: The devices cannot be created.
    """
    taps = [_tap(name) for name in devices]
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)  # a packet's latency is not that of a busy machine
    print("ready", flush=True)
    queue: deque[tuple[float, int, bytes]] = deque()
    known: dict[bytes, int] = {}
    late_ms: Counter[int] = Counter()
    late_s = 0.0
    while True:
        now = time.monotonic()
        while queue and queue[0][0] <= now:
            due, source, packet = queue.popleft()
            late_s += now - due
            late_ms[int(1e3 * (now - due))] += 1
            target = known.get(packet[_RECEIVER])
            for tap in taps if target is None else [target]:
                if tap != source:
                    with contextlib.suppress(OSError):  # its link is down: the packet is lost
                        os.write(tap, packet)
        wait_s = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        readable, _, _ = select.select([*taps, sys.stdin], [], [], wait_s)
        if sys.stdin in readable:
            break
        due = time.monotonic() + latency_s
        for tap in readable:
            for packet in _packets(tap):
                known[packet[_SENDER]] = tap
                queue.append((due, tap, packet))
    count = late_ms.total()
    below, most = 0, 0
    for most in sorted(late_ms):
        below += late_ms[most]
        if below >= 0.99 * count:
            break
    return {"packets": count, "late_ms": 1e3 * late_s / max(1, count), "late_ms_99": most + 1}


def _tap(name: str) -> int:
    """Create a TAP device; it exists until the descriptor is closed."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TAP | _NO_PROTOCOL | _WITH_HEADER))
    fcntl.ioctl(tap, _SET_OFFLOADS, _CHECKSUM | _SEGMENTS_4 | _SEGMENTS_6)
    return tap


def _packets(tap: int) -> Iterator[bytes]:
    """The packets that wait at a device, `_AT_ONCE` at most."""
    for _ in range(_AT_ONCE):
        try:
            yield os.read(tap, _MOST_BYTES)
        except OSError:  # there is none, or the device is down
            return
