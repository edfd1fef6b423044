"""The ring of a rank's last calls, and the file of them that it writes when one fails.

A call adds a short list to the ring at its begin, and an assignment at its end. Texts are made when the ring is
written.
"""

from __future__ import annotations

import functools
import os
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet, WeakValueDictionary

from ..errors import CommAborted, CommTimeout, RankFailed
from ..health.slow import HealthLogs
from ..system.files import make_own_folder, write_at_once
from ..system.processes import ProcessId
from ..trace import Counters, ExchangeCounters
from .entries import WORLD, Entry, RankRecord, RecordedFailure, file_name, numbered
from .requests import request_record
from .stacks import ThreadStack, stacks_now, users_line

CAPACITY = 1000
"""The number of calls that a rank keeps."""

WRITES = 32
"""The largest number of records that a rank writes, for programs that continue after errors."""

FAILURES = 8
"""The number of errors that a rank keeps; the first ones are the causes of later ones."""

JOBS = 16
"""The number of jobs whose records stay in the default folder."""

Head: TypeAlias = tuple[str, bool, str, Any, tuple[int, ...], Mapping[str, object], bool]
"""The common part of equal calls: group, whether they are collective, name, dtype (None for a call without an
array), shape, detail, and whether the work is only enqueued on a device when the call ends."""

Record: TypeAlias = list[Any]
"""A call in the ring; its fields are those of `Entry`, in another form."""

HEAD, NUMBER, WITHIN, START, END, ERROR = range(6)
"""The fields of a `Record`. WITHIN is a bucket and a step, or None; START and END are times by
`time.perf_counter_ns`, END None before the end. The record of a failed call also ends with the public method that
made it."""


class Queue(Protocol):
    """The part of a lane that the flight recorder uses."""

    def queued(self) -> Sequence[Entry]:
        """The calls that wait on the lane."""


class AgreedPlan(Protocol):
    """The part of a transport's plan of calls that others than transports use; see `transports.plan.Plan`."""

    calls: tuple[str, ...]
    cursor: int
    in_force: bool
    noted: int

    def latest(self, count: int) -> tuple[str, ...]:
        """See `Plan.latest`."""

    def adopt(self, calls: tuple[str, ...]) -> None:
        """See `Plan.adopt`."""


class FlightRecorder:
    """Recorder of this rank's last calls, on a communicator and on all made from it.

    Args:
        rank: The rank in the world; it names the file.
        size: The number of ranks.
        folder: The folder for the record of a failure; None to write none.
        job: The name of the job, the same on all ranks.
        capacity: The number of calls to keep.
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
        """The last calls, which append themselves."""
        self.groups: dict[str, tuple[int, ...]] = {WORLD: tuple(range(size))}
        """The members of each communicator, as ranks of the world."""
        self.steps: dict[str, int] = {}
        """The number of training steps that have begun, by the communicator of their engine."""
        self.counters: WeakValueDictionary[str, Counters] = WeakValueDictionary()
        """The counters of the communicators that are in use."""
        self.exchanges: WeakValueDictionary[str, ExchangeCounters] = WeakValueDictionary()
        """Those of the engines, by their communicator."""
        self.beside: set[str] = set()
        """The communicators of lanes, for whose calls the program does not wait."""
        self.plans: WeakValueDictionary[str, AgreedPlan] = WeakValueDictionary()
        """The plans of calls of the communicators that are in use, of those whose transport has one."""
        self.health = HealthLogs(self.groups)
        """The rows of training steps of all ranks, and what is slow."""
        self.lanes: WeakSet[Queue] = WeakSet()
        self.unretrieved: set[Any] = set()
        """The tasks of lanes that have failed, and whose errors nobody has retrieved."""
        self.peers: Sequence[ProcessId] = ()
        """The processes of the other ranks, which write their records when a call of this rank times out. Empty
        if the transport asks the ranks that are missing."""
        self.later = False
        """Whether `settle` writes the record of a failed call, so that no rank waits for it during recovery."""
        self._owed = False
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._failures: list[RecordedFailure] = []
        self._last_stacks: tuple[ThreadStack, ...] = ()
        self._writing = threading.Lock()
        self._writes = 0

    @property
    def waited_ns(self) -> int:
        """How long the thread that trains has waited: in calls that have ended, and for exchanges of engines."""
        calls = [each for name, each in tuple(self.counters.items()) if name not in self.beside]
        waits = sum(each.wait.time_ns for each in tuple(self.exchanges.values()))
        return waits + sum(each.time_ns for of in calls for each in tuple(of.by_operation.values()))

    def entries(self) -> list[Entry]:
        """The last calls, in the order in which they began."""
        return [self._entry(record) for record in tuple(self.ring)]

    def record(self, left: str | None = None) -> RankRecord:
        """The record at this moment; `left` is the reason why this rank has left the world."""
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
            dict(self.steps),
            self._stacks(left),
            {
                group: ((plan.cursor - 1) % count + 1, count)
                for group, plan in tuple(self.plans.items())
                if plan.in_force and (count := len(plan.calls))
            },
            tuple((str(slow), slow.ranks) for slow in self.health.latest.slow),
        )

    def _stacks(self, left: str | None) -> tuple[ThreadStack, ...]:
        """The present stacks; those of the record before if an error has ended the program meanwhile."""
        stacks = stacks_now()
        if users_line(stacks) or left is not None:
            self._last_stacks = stacks
        return self._last_stacks or stacks

    def failed(self, error: BaseException) -> Path | None:
        """Note the failure of a call, and write the record unless `later` is set. Never raises.

        Returns:
            The folder with the record, if the message of the error should name it.
        """
        repeated = isinstance(error, CommAborted) and bool(self._failures)
        if not repeated and len(self._failures) < FAILURES:
            ranks = tuple(error.ranks) if isinstance(error, RankFailed) else ()
            self._failures.append(RecordedFailure(type(error).__name__, str(error), ranks))
        if repeated:
            return None
        if isinstance(error, CommTimeout):
            for peer in self.peers:
                if peer.is_visible() and not peer.has_ended():  # its id may be that of another process
                    request_record(peer.pid)
        if self.later:
            self._owed = True
            return self.folder
        return self.write()

    def died(self, ranks: Mapping[int, str]) -> None:
        """Record that ranks of the world have died, with a text for each; the next record names them."""
        for rank, text in ranks.items():
            if len(self._failures) < FAILURES:
                self._failures.append(RecordedFailure(RankFailed.__name__, text, (rank,)))

    def record_of(self, head: Head) -> Record:
        """The latest record of a call that has begun just now."""
        latest = self.ring[-1]  # unless another thread has begun one since
        return latest if latest[HEAD] is head else next(each for each in tuple(self.ring) if each[HEAD] is head)

    def call_before(self, record: Record) -> str:
        """The name and number of the call before this one in its communicator; "" if it was the first.

        Reads the ring backwards, since the calls of a lane are in it, too.
        """
        group = record[HEAD][0]
        for other in reversed(tuple(self.ring)):
            if other is not record and other[HEAD][0] == group and other[START] <= record[START]:
                return numbered(other[HEAD][2], other[NUMBER], group)
        return ""

    def settle(self) -> None:
        """Write the record if a call has failed while `later` was set. Never raises."""
        if self._owed:
            self._owed = False
            self.write()

    def write(self, left: str | None = None) -> Path | None:
        """Write the record to this rank's file, atomically; return the folder. Never raises.

        Returns:
            None without a folder, or if it cannot be written to, or if this rank has written too often.
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
        """Wait up to a second for a thread that writes; return whether none does. A disk may hang."""
        until = time.monotonic() + 1
        while self._writing.locked() and time.monotonic() < until:
            time.sleep(0.001)
        return not self._writing.locked()

    def _entry(self, record: Record) -> Entry:
        head: Head
        head, number, within, start, end, error, *method = record
        group, collective, name, dtype, shape, detail, enqueued = head
        bucket, step = within or (None, None)
        return Entry(
            group,
            number,
            collective,
            name,
            _dtype_name(dtype),
            () if dtype is None else tuple(shape),
            _json_detail(detail),
            bucket,
            step,
            start + self._epoch_ns,
            None if end is None else end + self._epoch_ns,
            enqueued,
            error,
            *method,
        )


@functools.lru_cache(maxsize=64)
def _dtype_name(dtype: object) -> str:
    """The name of a dtype, cached, since NumPy makes it each time; "" for None."""
    return "" if dtype is None else str(dtype)


def _json_detail(detail: Mapping[str, object]) -> dict[str, object]:
    """The arguments of a call as JSON values."""
    return {
        key: value if isinstance(value, (int, str, list, type(None))) else str(value)
        for key, value in dict(detail).items()
    }


def default_folder() -> Path | None:
    """This user's private folder of records, in the folder of temporary files; it outlives the process.

    It holds the records of the latest `JOBS` jobs. None if no private folder can be made.
    """
    with suppress(OSError):
        folder = Path(tempfile.gettempdir()) / f"bagua_comm-flights-{os.geteuid()}"
        if make_own_folder(folder):
            return folder
    return None
