"""Events that the processes of a trial send to the harness: lines of JSON through a named pipe.

A line that was written is in the pipe even if its writer is killed directly after it. All times are of one clock,
CLOCK_MONOTONIC, which the processes of a machine share.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple


class Event(NamedTuple):
    """An event of a process."""

    t: float
    """Seconds."""
    pid: int
    what: str
    facts: dict[str, Any]


class EventWriter:
    """Sends the events of this process.

    Args:
        pipe: The named pipe.
    """

    def __init__(self, pipe: Path) -> None:
        self._fd = os.open(pipe, os.O_WRONLY)
        self._pid = os.getpid()

    def __call__(self, what: str, **facts: Any) -> None:
        """Send an event. A line of up to 4096 bytes is never mixed with others."""
        line = json.dumps([time.monotonic(), self._pid, what, facts]) + "\n"
        os.write(self._fd, line.encode()[: select.PIPE_BUF])


class EventReader:
    """Makes the pipe and reads events from it.

    Args:
        pipe: Path of the pipe.
    """

    def __init__(self, pipe: Path) -> None:
        os.mkfifo(pipe)
        self._fd = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # also for writing, so that it never ends
        self._rest = b""

    def __enter__(self) -> EventReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def listen(self, timeout_s: float) -> Iterator[Event]:
        """Return the events received, after waiting at most this long for the first."""
        if not select.select([self._fd], [], [], max(0.0, timeout_s))[0]:
            return
        *lines, self._rest = (self._rest + os.read(self._fd, 1 << 16)).split(b"\n")
        for line in lines:
            yield Event(*json.loads(line))
