"""The ring in which a rank keeps its last calls, and the file that it writes of them when one fails.

A call costs one short list in a ring, made when it begins, and an assignment when it ends. Texts are made when
the ring is written.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet

from ..errors import CommAborted, RankFailed
from ..files import make_own_folder, write_at_once
from .entries import WORLD, Entry, RankRecord, RecordedFailure, file_name

CAPACITY = 1000
"""How many calls a rank keeps."""

WRITES = 32
"""How often a rank writes its record, at most: a program that goes on after errors must not write for ever."""

FAILURES = 8
"""How many errors a rank keeps; the first say more than those that follow from them."""

JOBS = 16
"""How many jobs leave their records in the folder that is used by default."""

Head: TypeAlias = tuple[str, bool, str, Any, tuple[int, ...], Mapping[str, Any], bool]
"""What calls of one kind have in common: group, whether they are collective, name, dtype (None for a call without
an array), shape, detail, and whether the work is only enqueued on a device when the call ends."""

Record: TypeAlias = list[Any]
"""A call in the ring; its fields are those of `Entry`, in another form."""

HEAD, NUMBER, WITHIN, START, END, ERROR = range(6)
"""The fields of a `Record`. WITHIN is a bucket and a step, or None; START and END are times by
`time.perf_counter_ns`, END None before the end."""


class Queue(Protocol):
    """A lane, to the flight recorder."""

    def queued(self) -> Sequence[Entry]:
        """What waits on it."""


class FlightRecorder:
    """The last calls of this rank, on a communicator and on all that were made from it.

    Args:
        rank: The rank in the world; it names the file.
        size: The number of ranks.
        folder: Where the record is written when a call fails; nothing is written if None.
        job: The name of the job, the same on all ranks.
        capacity: How many calls to keep.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        folder: Path | None = None,
        job: str = "",
        capacity: int = CAPACITY,
    ) -> None:
        self.rank, self.size, self.folder, self.job = rank, size, folder, job
        self.ring: deque[Record] = deque(maxlen=capacity)
        """Calls append themselves."""
        self.groups: dict[str, tuple[int, ...]] = {WORLD: tuple(range(size))}
        """The members of each communicator, as ranks of the world."""
        self.lanes: WeakSet[Queue] = WeakSet()
        self.later = False
        """Whether the record of a call that failed is written by `settle`: all who recover would wait for it."""
        self._owed = False
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._failures: list[RecordedFailure] = []
        self._writing = threading.Lock()
        self._writes = 0

    def entries(self) -> list[Entry]:
        """The last calls, in the order in which they began."""
        return [self._entry(record) for record in tuple(self.ring)]

    def record(self, left: str | None = None) -> RankRecord:
        """What is known now; `left` says why this rank has left the world."""
        return RankRecord(
            self.job,
            self.rank,
            self.size,
            socket.gethostname(),
            os.getpid(),
            time.time_ns(),
            dict(self.groups),
            tuple(self.entries()),
            tuple(entry for lane in tuple(self.lanes) for entry in lane.queued()),
            tuple(self._failures),
            left,
        )

    def failed(self, error: BaseException) -> Path | None:
        """A call has failed: write the record, unless that is for `later`. Never raises.

        Returns:
            The folder with the record, if it is worth a word in the message of the error.
        """
        repeated = isinstance(error, CommAborted) and bool(self._failures)
        if not repeated and len(self._failures) < FAILURES:
            ranks = tuple(error.ranks) if isinstance(error, RankFailed) else ()
            self._failures.append(RecordedFailure(type(error).__name__, str(error), ranks))
        if repeated:
            return None
        if self.later:
            self._owed = True
            return self.folder
        return self.write()

    def settle(self) -> None:
        """Write the record if a call has failed and it was left for `later`. Never raises."""
        if self._owed:
            self._owed = False
            self.write()

    def write(self, left: str | None = None) -> Path | None:
        """Write the record to this rank's file, atomically; returns the folder. Never raises.

        Returns:
            None if there is no folder, or it could not be written to, or this rank has written too often.
        """
        if self.folder is None or self._writes >= WRITES or not self._is_free_soon():
            return None
        with self._writing:
            try:
                self._writes += 1
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_at_once(self.folder / file_name(self.rank), self.record(left).to_json().encode())
            except Exception:  # the error that is being reported matters more
                return None
        return self.folder

    def _is_free_soon(self) -> bool:
        """Whether no thread writes, at the latest in a second: a disk may hang."""
        until = time.monotonic() + 1
        while self._writing.locked() and time.monotonic() < until:
            time.sleep(0.001)
        return not self._writing.locked()

    def _entry(self, record: Record) -> Entry:
        head: Head
        head, number, within, start, end, error = record
        group, collective, name, dtype, shape, detail, enqueued = head
        bucket, step = within or (None, None)
        return Entry(
            group,
            number,
            collective,
            name,
            _dtype_name(dtype),
            () if dtype is None else tuple(shape),
            _told(detail),
            bucket,
            step,
            start + self._epoch_ns,
            None if end is None else end + self._epoch_ns,
            enqueued,
            error,
        )


@functools.lru_cache(maxsize=64)
def _dtype_name(dtype: object) -> str:
    """The name of a dtype, remembered, since NumPy makes it anew each time; "" for None."""
    return "" if dtype is None else str(dtype)


def _told(detail: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call in a form that JSON holds."""
    return {
        key: value if isinstance(value, (int, str, list, type(None))) else str(value)
        for key, value in dict(detail).items()
    }


def default_folder() -> Path | None:
    """A folder of this user's alone, under that of temporary files; it outlives the process.

    The records of the latest `JOBS` jobs lie there. None if there is no folder that only this user can write to.
    """
    with suppress(OSError):
        folder = Path(tempfile.gettempdir()) / f"bagua_comm-flights-{os.geteuid()}"
        if make_own_folder(folder):
            return folder
    return None


def forget_old_jobs(folder: Path) -> None:
    """Remove the records of all jobs but the latest `JOBS` from the default folder."""
    with suppress(OSError):
        jobs = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
        for job in jobs[: max(len(jobs) - JOBS, 0)]:
            shutil.rmtree(job, ignore_errors=True)
