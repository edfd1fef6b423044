"""The thread that writes the status of this process once a second, for `bagua top`.

It takes what the flight recorder and the counters have, and sends nothing. A process has one file, which says how
it ended.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .. import errors
from ..flight.entries import numbered
from ..flight.recorder import END, HEAD, NUMBER, START, FlightRecorder, Record
from ..flight.stacks import stacks_now, users_line
from ..logs import ROOT
from ..system.files import keep_latest, make_own_folder, write_at_once
from ..system.processes import ProcessId, namespace_number
from .status import SIGTERM, Phase, Status, file_name, live_folder

INTERVAL_S = 1.0
"""Seconds between two writes."""

WINDOW_S = 10.0
"""The time over which steps are averaged, or two steps if they take longer."""

STILL_S = 5.0
"""After so long without a new call, the status has the line of the program, looked up this often."""

JOBS = 16
"""The number of jobs whose files stay."""

__all__ = ["SIGTERM", "current", "end", "leave", "note", "show"]

_log = logging.getLogger(__name__)


class _Reading(NamedTuple):
    """The counts at one time."""

    time_s: float
    step: int
    waited_s: float


class _Warnings(logging.Handler):
    """Keeps the last warning of the library's logger."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


class LiveStatus:
    """The file of this process, and the thread that writes it.

    Args:
        file: The file, in the folder with the name of the job.
        flight: The flight recorder of the world.
        hosts: The names of the hosts of all ranks.
        attempt: The number of restarts by the supervisor.
    """

    def __init__(self, file: Path, flight: FlightRecorder, hosts: Sequence[str], attempt: int) -> None:
        self.file, self.job, self.process = file, file.parent.name, os.getpid()
        self._me, self._host = ProcessId.mine().text(), socket.gethostname()
        self._attempt = attempt
        self.phase: Phase = "training"
        self._reason = ""
        self.follow(flight, hosts)
        self._readings: deque[_Reading] = deque(maxlen=64)
        """Those at which steps had been made."""
        self._sent, self._sent_s = 0, time.monotonic()
        self._at: tuple[Record | None, Record | None] = (None, None)
        self._since_s = self._looked_s = time.monotonic()
        self._line = ""
        self._warnings = _Warnings(logging.WARNING)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live status", daemon=True)
        ROOT.addHandler(self._warnings)
        self._thread.start()

    def follow(self, flight: FlightRecorder, hosts: Sequence[str]) -> None:
        """Show another world of the same job from now on, as after ranks have died."""
        self.flight, self._hosts = flight, tuple(dict.fromkeys(hosts))
        if self.phase == "closed":
            self.phase = "training"

    def end(self, phase: Phase, reason: str = "") -> None:
        """Write how this process ends, and stop writing; the first end counts."""
        if not self._stop.is_set():
            self._stop.set()
            ROOT.removeHandler(self._warnings)
            self.phase, self._reason = phase, " ".join(reason.split())[:500]
            if threading.current_thread() is not self._thread:
                self._thread.join(INTERVAL_S)  # a disk may hang
            self._write()

    def _run(self) -> None:
        while True:
            self._write()
            if self._stop.wait(INTERVAL_S):
                return

    def _write(self) -> None:
        with suppress(Exception):  # the folder may be gone; training matters more
            write_at_once(self.file, self._status().to_json().encode(), 0o600)

    def _status(self) -> Status:
        flight, now_s, now_ns = self.flight, time.monotonic(), time.perf_counter_ns()
        ring = tuple(flight.ring)
        open_call = next((record for record in reversed(ring) if record[END] is None), None)
        ended = max((record for record in ring[-8:] if record[END]), key=lambda record: record[END], default=None)
        step_s, waiting_s = self._steps(now_s, now_ns, open_call)
        sent = sum(each.total().wire_bytes for each in list(flight.counters.values()))
        rate = max(0, sent - self._sent) / max(now_s - self._sent_s, 1e-3)
        self._sent, self._sent_s = sent, now_s
        return Status(
            job=self.job,
            rank=flight.rank,
            size=flight.size,
            host=self._host,
            process=self._me,
            hosts=self._hosts,
            attempt=self._attempt,
            phase=self.phase,
            reason=self._reason,
            step=_step(flight),
            step_s=step_s,
            own_s=None if step_s is None or waiting_s is None else step_s - waiting_s,
            waiting_s=waiting_s,
            sent_per_s=rate,
            memory=_memory(),
            call=_text(open_call),
            call_s=0.0 if open_call is None else (now_ns - open_call[START]) / 1e9,
            last=_text(ended),
            last_s=0.0 if ended is None else (now_ns - ended[END]) / 1e9,
            line=self._line_of(ring[-1] if ring else None, open_call, now_s),
            warning=(errors.last_warning() or self._warnings.text)[:500],
        )

    def _steps(self, now_s: float, now_ns: int, open_call: Record | None) -> tuple[float | None, float | None]:
        """The seconds of one step, and those of its waits."""
        flight, readings = self.flight, self._readings
        waits = [each.wait.time_ns for each in list(flight.exchanges.values())]
        waits += [
            each.total().time_ns for name, each in list(flight.counters.items()) if name not in flight.beside
        ]
        if open_call is not None and open_call[HEAD][0] not in flight.beside:
            waits.append(now_ns - open_call[START])
        step = _step(flight) or 0
        if readings and step < readings[-1].step:
            readings.clear()  # of another engine
        if step and (not readings or step > readings[-1].step):
            readings.append(_Reading(now_s, step, sum(waits) / 1e9))
        while len(readings) > 2 and readings[1].time_s < now_s - WINDOW_S:
            readings.popleft()
        if len(readings) < 2:
            return None, None
        first, last = readings[0], readings[-1]
        steps = last.step - first.step
        step_s = (last.time_s - first.time_s) / steps
        if now_s - last.time_s > 3 * step_s + 2 * INTERVAL_S:
            return None, None  # it makes none now
        return step_s, min(step_s, max(0.0, last.waited_s - first.waited_s) / steps)

    def _line_of(self, latest: Record | None, open_call: Record | None, now_s: float) -> str:
        """The line of the program, if nothing has begun or ended for `STILL_S`; else ""."""
        at = latest, open_call
        if at[0] is not self._at[0] or at[1] is not self._at[1]:
            self._at, self._since_s, self._line = at, now_s, ""
        elif now_s - self._since_s >= STILL_S and now_s - self._looked_s >= STILL_S:
            self._line, self._looked_s = users_line(stacks_now()), now_s
        return self._line


_shown: list[LiveStatus] = []
"""The status of this process, if it has one."""


def show(job: str, flight: FlightRecorder, hosts: Sequence[str], attempt: int = 0) -> None:
    """Write the status of this process from now on.

    Args:
        job: The name of the job, the same on all ranks.
        flight: The flight recorder of the world that was opened.
        hosts: The names of the hosts of all ranks.
        attempt: The number of restarts by the supervisor.
    """
    mine = current()
    if mine is not None and mine.job == job:
        mine.follow(flight, hosts)
        return
    end("ended")
    try:
        root = live_folder()
        if not make_own_folder(root):
            raise PermissionError(f"{root} belongs to another user, or others can write to it; remove it")
        keep_latest(root, JOBS)
        folder = root / job
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        _log.warning("`bagua top` will not show this process: %s", exc)
        return
    _shown[:] = [LiveStatus(folder / file_name(os.getpid(), namespace_number()), flight, hosts, attempt)]


def current() -> LiveStatus | None:
    """The status of this process; None if it has none, as in a forked child."""
    return _shown[0] if _shown and _shown[0].process == os.getpid() else None


def note(phase: Phase) -> None:
    """Show what this process does now."""
    mine = current()
    if mine is not None:
        mine.phase = phase


def leave(flight: FlightRecorder) -> None:
    """Show that the world of this flight recorder is closed, unless another one is shown."""
    mine = current()
    if mine is not None and mine.flight is flight:
        mine.phase = "closed"


def end(phase: Phase, reason: str = "") -> None:
    """Write how this process ends; the first end counts."""
    mine = current()
    if mine is not None:
        mine.end(phase, reason)


@atexit.register
def _at_exit() -> None:
    """Write how the program ended, where no hook has: an exception that nobody caught is the last one then."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        end("ended")
    else:
        end("failed", f"{type(error).__name__}: {error}")


def _step(flight: FlightRecorder) -> int | None:
    """The steps of the newest engine; None without one."""
    return next(reversed(tuple(flight.steps.values())), None)


def _text(record: Record | None) -> str:
    return "" if record is None else numbered(record[HEAD][2], record[NUMBER], record[HEAD][0])


def _memory() -> int:
    """The bytes of memory that this process uses; 0 if this system does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
