"""One of the two hosts: connects all schemes, and sends and times, or receives and compares."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from ctypes import byref, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bagua_comm.arrays import Array
from bagua_comm.net.binding import HANDLE_BYTES, Plugin

from .link import Scenario

SLICE, OUTSTANDING = 1 << 20, 4
REPLY = 8
READY, END = b".", -1
"""The receiver's message before each series, and the end of all series, in place of a scheme."""

CONTROL_PORT = 29_398


@dataclass
class Scheme:
    """A connection each way by one scheme, at one end."""

    name: str
    plugin: Plugin
    handle: Any = None
    listener: Any = None
    sender: Any = None
    receiver: Any = None
    ports: tuple[int, ...] = ()
    """Ports of the flows by which this end sends, in the order in which they were opened."""


def load(name: str, most_flows: int, folder: Path) -> Scheme:
    """Load and start a scheme's library, with its settings."""
    if name in ("plugin", "one flow"):
        library = folder / f"{name.replace(' ', '-')}.so"  # a file of its own, so that it has its own settings
        os.environ["BAGUA_NET_FLOWS"] = str(most_flows if name == "plugin" else 1)
        plugin = Plugin(library)
    else:
        threads, sockets = (0, 0) if name == "default" else map(int, name.split("x"))
        os.environ |= {"NCCL_SOCKET_NTHREADS": str(threads), "NCCL_NSOCKS_PERTHREAD": str(sockets)}
        plugin = Plugin(folder / "stock.so", symbol="stockNet_v10")
    plugin.start()
    return Scheme(name, plugin)


def own_sockets() -> dict[int, int]:
    """The sockets by which this process has connected to another: file number and local port."""
    found, listening = {}, set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listening.add(one.getsockname()[1])
                elif one.getpeername()[1] != CONTROL_PORT:
                    found[int(name)] = one.getsockname()[1]
        except OSError:
            continue
    return {fd: port for fd, port in found.items() if port not in listening}


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def hear() -> dict[str, Any]:
    heard: dict[str, Any] = json.loads(sys.stdin.readline())
    return heard


def connect_schemes(scenario: Scenario, folder: Path) -> list[Scheme]:
    """Connect each scheme both ways; handles pass through the process that started this one."""
    schemes = []
    for name in scenario.schemes:
        scheme = load(name, scenario.most_flows, folder)
        scheme.handle, scheme.listener = scheme.plugin.listener(0)
        say(handle=bytes(scheme.handle).hex())
        handle = ctypes.create_string_buffer(bytes.fromhex(hear()["handle"]), HANDLE_BYTES)
        before = own_sockets().keys()
        while scheme.sender is None or scheme.receiver is None:
            if scheme.sender is None:
                scheme.sender = scheme.plugin.connected(0, handle)
                new = own_sockets()
                scheme.ports = tuple(new[fd] for fd in sorted(new.keys() - before))
            if scheme.receiver is None:
                scheme.receiver = scheme.plugin.accepted(scheme.listener)
        schemes.append(scheme)
    return schemes


def slices(size: int) -> list[tuple[int, int]]:
    return [(start, min(SLICE, size - start)) for start in range(0, size, SLICE)]


class Mover:
    """Sends or receives bytes in slices, four on their way, and tests the oldest."""

    def __init__(self, scheme: Scheme, sends: bool) -> None:
        table = scheme.plugin.table
        self.comm = scheme.sender if sends else scheme.receiver
        self.sends, self.test = sends, table.test
        self.isend, self.irecv = table.isend, table.irecv
        self.done, self.size, self.none = c_int(), c_int(), c_void_p()

    def move(self, address: int, size: int) -> None:
        """Move `size` bytes from or to this address."""
        waiting: deque[c_void_p] = deque()
        for start, length in slices(size):
            if len(waiting) == OUTSTANDING:
                self.wait(waiting.popleft())
            waiting.append(self.post(address + start, length))
        for request in waiting:
            self.wait(request)

    def post(self, address: int, size: int) -> c_void_p:
        """Post one message."""
        request = c_void_p()
        while True:
            if self.sends:
                code = self.isend(self.comm, address, size, 0, None, None, byref(request))
            else:
                data, sizes, tag = c_void_p(address), c_size_t(size), c_int()
                none = byref(self.none)
                code = self.irecv(self.comm, 1, byref(data), byref(sizes), byref(tag), none, none, byref(request))
            if code:
                raise RuntimeError(f"result {code}")
            if request.value:
                return request

    def wait(self, request: c_void_p) -> None:
        """Test it until it is done."""
        while True:
            if code := self.test(request, byref(self.done), byref(self.size)):
                raise RuntimeError(f"result {code}")
            if self.done.value:
                return
            os.sched_yield()


def pattern(size: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def run_end(scenario: Scenario, host: int, folder: Path, address: str) -> None:
    """Host 0 sends and measures; host 1 follows its orders, which come over a plain socket."""
    os.environ["STOCK_ADDRESS"] = f"10.99.0.{host + 1}"
    os.environ["NCCL_SOCKET_IFNAME"] = "eth0"
    schemes = connect_schemes(scenario, folder)
    movers = [(Mover(scheme, sends=True), Mover(scheme, sends=False)) for scheme in schemes]
    data, reply = pattern(max(scenario.sizes), 1), np.zeros(REPLY, np.uint8)
    if host == 1:
        serve(movers, data, reply)
        return
    hear()
    stream = netlab_connected(address)

    def tell(*numbers: int) -> None:
        """Announce the next rounds, and wait until the other end is ready."""
        order(stream, *numbers)
        stream.recv(len(READY))

    def round_of(which: int, size: int) -> float:
        forth, back = movers[which]
        start = time.perf_counter()
        forth.move(data.ctypes.data, size)
        back.move(reply.ctypes.data, REPLY)
        return time.perf_counter() - start

    for which in range(len(schemes)):
        warm(which, scenario, tell, round_of)
    flows = own_sockets()
    for scheme in schemes:
        if (
            scheme.name == "plugin"
        ):  # has opened more flows while it was warming up: the newest of this end's sockets
            known = {port for one in schemes for port in one.ports}
            later = [port for fd, port in sorted(flows.items()) if port not in known]
            scheme.ports += tuple(later)
    say(ports={scheme.name: scheme.ports for scheme in schemes})
    hear()
    results = []
    warm(0, scenario, tell, round_of)  # once more, with the rates as they are now
    for size in scenario.sizes:
        times: dict[str, list[float]] = {scheme.name: [] for scheme in schemes}
        rounds = []
        for which in range(len(schemes)):
            tell(which, size, 1)
            first = round_of(which, size)
            rounds.append(min(1000, max(1, int(scenario.budget_s / 3 / first))))
        for _ in range(3):
            for which, scheme in enumerate(schemes):
                tell(which, size, rounds[which])
                times[scheme.name] += [round_of(which, size) for _ in range(rounds[which])]
        for scheme in schemes:
            seconds = times[scheme.name]
            results.append(
                {
                    "scheme": scheme.name,
                    "bytes": size,
                    "rounds": len(seconds),
                    "median_s": statistics.median(seconds),
                    "least_s": min(seconds),
                    "most_s": max(seconds),
                }
            )
    order(stream, END, 0, 0)
    wrong = hear_wrong(stream)
    say(results=results, wrong=wrong)


def order(stream: socket.socket, which: int, size: int, rounds: int) -> None:
    """Announce to the other end: the number of a scheme, bytes, and the number of rounds."""
    stream.sendall(np.array([which, size, rounds], np.int64).tobytes())


def warm(which: int, scenario: Scenario, tell: Any, round_of: Any) -> None:
    """Warm a scheme up: large messages for some seconds."""
    size = min(16 << 20, max(scenario.sizes))
    end = time.perf_counter() + (scenario.warm_s if which == 0 else 0.3)
    while time.perf_counter() < end:
        tell(which, size, 1)
        round_of(which, size)


def serve(movers: Sequence[tuple[Mover, Mover]], data: Array, reply: Array) -> None:
    """Receive, and reply; compare the last round of each series with what was sent."""
    wrong = 0
    out = np.zeros(data.size, np.uint8)
    with socket.create_server(("", CONTROL_PORT)) as server:
        say(serving=True)
        stream, _ = server.accept()
    with stream, stream.makefile("rb") as lines:
        while True:
            which, size, rounds = np.frombuffer(lines.read(24), np.int64).tolist()
            if which == END:
                stream.sendall(np.array([wrong], np.int64).tobytes())
                return
            back, forth = movers[which]
            out[:size] = 0
            stream.sendall(READY)
            for _ in range(rounds):
                forth.move(out.ctypes.data, size)
                back.move(reply.ctypes.data, REPLY)
            wrong += int(np.count_nonzero(out[:size] != data[:size]))


def hear_wrong(stream: socket.socket) -> int:
    with stream, stream.makefile("rb") as lines:
        return int(np.frombuffer(lines.read(8), np.int64)[0])


def netlab_connected(address: str) -> socket.socket:
    stream = socket.create_connection((address, CONTROL_PORT), timeout=60)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream
