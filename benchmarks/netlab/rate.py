"""What a link reaches: its rate, and the time of a round trip."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

from .lab import Lab
from .tools import LabError


def measure_rate(lab: Lab, *, seconds: float = 2.0) -> float:
    """Bytes a second that arrive on host 1 from one plain TCP stream of host 0: no program can be faster."""
    this = (sys.executable, "-m", "benchmarks.netlab")
    receiver = subprocess.Popen(
        lab.inside(1, *this, "receive"), stdout=subprocess.PIPE, text=True, env=lab.environment()
    )
    try:
        lab.output(lab.inside(0, *this, "send", lab.address(1), str(seconds)))
        received = receiver.communicate(timeout=30)[0]
        if receiver.returncode:
            raise LabError(f"the receiver ended with exit code {receiver.returncode}")
        return float(received)
    finally:
        receiver.kill()
        receiver.wait()


def measure_round_trip(lab: Lab, *, count: int = 5) -> float:
    """The shortest time in seconds in which one byte goes from host 0 to host 1 and comes back, over TCP."""
    this = (sys.executable, "-m", "benchmarks.netlab")
    echo = subprocess.Popen(lab.inside(1, *this, "echo"), env=lab.environment())
    try:
        took_s = float(lab.output(lab.inside(0, *this, "ask", lab.address(1), str(count))))
        if code := echo.wait(timeout=30):  # it ends with its client
            raise LabError(f"the other end ended with exit code {code}")
        return took_s
    finally:
        echo.kill()
        echo.wait()


_PORT = 29399


def send(address: str, seconds: float) -> None:
    """Send as much as possible."""
    end = time.monotonic() + seconds
    with _connected(address) as stream:
        block = bytes(1 << 18)
        while time.monotonic() < end:
            stream.sendall(block)


def _connected(address: str) -> socket.socket:
    for _ in range(100):
        try:
            return socket.create_connection((address, _PORT), timeout=30)
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise LabError(f"no process listens at {address}, port {_PORT}")


def receive() -> float:
    """Bytes a second that arrive, from the first ones on."""
    with socket.create_server(("", _PORT)) as server:
        server.settimeout(30)
        stream, _ = server.accept()
        buffer = bytearray(1 << 18)
        stream.recv_into(buffer)
        received, start = 0, time.monotonic()
        while count := stream.recv_into(buffer):
            received += count
        return received / (time.monotonic() - start)


def ask(address: str, count: int) -> float:
    """Send a byte, and wait for it to come back; returns the shortest time in seconds."""
    times = []
    with _connected(address) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            start = time.perf_counter()
            stream.sendall(b"?")
            stream.recv(1)
            times.append(time.perf_counter() - start)
    return min(times)


def echo() -> None:
    """Send back what one client sends."""
    with socket.create_server(("", _PORT)) as server:
        server.settimeout(30)
        stream, _ = server.accept()
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while received := stream.recv(64):
            stream.sendall(received)
