"""The thread that writes the status of this process once a second, for `bagua top`.

It takes what the flight recorder and the counters have, and sends nothing. A process has one file, which says how
it ended.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .. import errors
from ..flight.entries import numbered
from ..flight.recorder import END, HEAD, NUMBER, START, FlightRecorder, Record
from ..flight.stacks import stacks_now, users_line
from ..system.files import keep_latest, make_own_folder, write_at_once
from ..system.processes import ProcessId, namespace_number
from .status import State, Status, live_folder

INTERVAL_S = 1.0
"""Seconds between two writes."""

READINGS = 21
"""The number of writes over which rates are means."""

STILL_S = 3.0
"""After so long without a new call, the status has the line of the program."""

RECENT = 16
"""The number of calls among which the one is that ended last; those of lanes overlap."""

JOBS = 16
"""The number of jobs whose files stay."""

_log = logging.getLogger(__name__)


class _Reading(NamedTuple):
    """The counts at one time."""

    time_s: float
    step: int
    waited_s: float
    sent: int


class LiveStatus:
    """The file of this process, and the thread that writes it.

    Args:
        folder: The folder with the name of the job.
        flight: The flight recorder of the world; another one of the same job may replace it.
        hosts: The names of the hosts of all ranks.
        attempt: The number of restarts of the job before.
    """

    def __init__(self, folder: Path, flight: FlightRecorder, hosts: Iterable[str], attempt: int) -> None:
        self.job, self.process, self.flight = folder.name, os.getpid(), flight
        self._me = ProcessId.mine().text()
        self.earlier_error = errors.uncaught_error()
        self.state: State = "training"
        self._file = folder / f"{self.process}-{namespace_number():x}.json"
        self.attempt, self._hosts, self._reason = attempt, ",".join(dict.fromkeys(hosts)), ""
        self._readings: deque[_Reading] = deque(maxlen=READINGS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live status", daemon=True)
        self._thread.start()

    def end(self, state: State, reason: str) -> None:
        """Write how this process ends, and stop writing; the first end counts."""
        if not self._stop.is_set():
            self._stop.set()
            self.state, self._reason = state, " ".join(reason.split())[:500]
            self._thread.join(INTERVAL_S)  # a disk may hang
            self._write()

    def _run(self) -> None:
        self._write()
        while not self._stop.wait(INTERVAL_S):
            self._write()

    def _write(self) -> None:
        with suppress(Exception):  # the folder may be gone; training matters more
            write_at_once(self._file, json.dumps(self._status().as_dict()).encode(), 0o600)

    def _status(self) -> Status:
        flight, now_ns = self.flight, time.perf_counter_ns()
        ring = tuple(flight.ring)
        call = next((record for record in reversed(ring) if record[END] is None), None)
        last = max(
            (record for record in ring[-RECENT:] if record[END]), key=lambda record: record[END], default=None
        )
        call_s = 0.0 if call is None else (now_ns - call[START]) / 1e9
        last_s = 0.0 if last is None else (now_ns - last[END]) / 1e9
        self._readings.append(_read(flight, call, call_s))
        step_s, waiting_s, sent_per_s = _rates(self._readings)
        is_still = call_s > STILL_S or (call is None and last_s > STILL_S)
        return Status(
            job=self.job,
            rank=flight.rank,
            size=flight.size,
            host=socket.gethostname(),
            pid=self.process,
            process=self._me,
            hosts=self._hosts,
            attempt=self.attempt,
            state=self.state,
            reason=self._reason,
            step=self._readings[-1].step if flight.steps else None,
            step_s=step_s,
            own_s=None if step_s is None or waiting_s is None else step_s - waiting_s,
            waiting_s=waiting_s,
            sent_per_s=sent_per_s,
            memory=_memory(),
            call=_text(call),
            call_s=call_s,
            members=flight.groups.get(call[HEAD][0], ()) if call is not None and call[HEAD][1] else (),
            last=_text(last),
            last_s=last_s,
            line=users_line(stacks_now()) if is_still else "",
            slow="; ".join(map(str, flight.health.latest.slow)),
            warning=errors.last_warning()[:500],
        )


def _read(flight: FlightRecorder, call: Record | None, call_s: float) -> _Reading:
    """The counts of this moment, at which the rank has been in `call` for `call_s`."""
    waited_s = flight.waited_ns / 1e9
    if call is not None and call[HEAD][0] not in flight.beside:
        waited_s += call_s
    step = next(reversed(tuple(flight.steps.values())), 0)  # of the newest engine
    sent = sum(each.total().wire_bytes for each in tuple(flight.counters.values()))
    return _Reading(time.monotonic(), step, waited_s, sent)


def _rates(readings: deque[_Reading]) -> tuple[float | None, float | None, float]:
    """The seconds of a step and of its waits, None if no steps are made; and the bytes sent in a second.

    >>> _rates(deque([_Reading(0.0, 1, 0.0, 0), _Reading(1.0, 3, 0.5, 80), _Reading(2.0, 5, 1.0, 160)]))
    (0.5, 0.25, 80.0)
    """
    now, before = readings[-1], readings[max(0, len(readings) - 2)]
    sent_per_s = max(0, now.sent - before.sent) / max(now.time_s - before.time_s, 1e-3)
    first = next((each for each in readings if 0 < each.step <= now.step), now)  # others are of an engine before
    last = next(each for each in readings if each.step == now.step)
    steps = last.step - first.step
    step_s = (last.time_s - first.time_s) / max(1, steps)
    if steps < 1 or now.time_s - last.time_s > 3 * step_s + 2 * INTERVAL_S:
        return None, None, sent_per_s
    return step_s, min(step_s, max(0.0, last.waited_s - first.waited_s) / steps), sent_per_s


def _text(record: Record | None) -> str:
    return "" if record is None else numbered(record[HEAD][2], record[NUMBER], record[HEAD][0])


def _memory() -> int:
    """The bytes of memory that this process uses; 0 if this system does not say."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


_shown: list[LiveStatus] = []
"""The status of this process, if it has one."""


def show(job: str, flight: FlightRecorder, hosts: Iterable[str], attempt: int = 0) -> None:
    """Write the status of this process from now on; after ranks have died, that of another world of the job.

    Args:
        job: The name of the job, the same on all ranks.
        flight: The flight recorder of the world that was opened.
        hosts: The names of the hosts of all ranks.
        attempt: The number of restarts of the job before.
    """
    root = live_folder()
    for mine in _mine():
        if mine.job == job:
            mine.flight = flight
            note("training" if mine.state == "closed" else mine.state)
            return
    end("ended")
    try:
        if not make_own_folder(root):
            raise PermissionError(f"{root} belongs to another user, or others can write to it; remove it")
        keep_latest(root, JOBS)
        (root / job).mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        _log.warning("`bagua top` will not show this process: %s", exc)
        return
    _shown[:] = [LiveStatus(root / job, flight, hosts, attempt)]


def shown() -> tuple[str, int] | None:
    """The job in which this process is shown, and the number of its restarts before; None if it is not shown."""
    return next(((mine.job, mine.attempt) for mine in _mine()), None)


def note(state: State) -> None:
    """Show what this process does now."""
    for mine in _mine():
        mine.state = state


def leave(flight: FlightRecorder) -> None:
    """Show that the world of this flight recorder is closed, unless another one is shown."""
    if any(mine.flight is flight for mine in _mine()):
        note("closed")


def end(state: State, reason: str = "") -> None:
    """Write how this process ends; the first end counts."""
    for mine in _mine():
        mine.end(state, reason)


def _mine() -> list[LiveStatus]:
    """The status of this process; none in a forked child."""
    return [each for each in _shown if each.process == os.getpid()]


@atexit.register
def _at_exit() -> None:
    """Write how the program ended, where no hook has."""
    for mine in _mine():
        # An interactive session goes on after an error, and none of them has ended it.
        error = None if hasattr(sys, "ps1") else errors.uncaught_error(mine.earlier_error)
        if error is None:
            mine.end("ended", "")
        else:
            mine.end("failed", f"{type(error).__name__}: {error}")
