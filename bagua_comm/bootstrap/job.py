"""The job of a supervised program: its settings, its folder, and its record.

`python -m bagua_comm run --restarts 3` starts mpirun again when it ends too early. The attempts share a folder in
the memory of each host. One of its files is the record, with a line of JSON for each event:

    kind       written by                facts, beside time (seconds since 1970), attempt, host, namespace and pid
    job        the supervisor, once      command, ranks, spares, min_ranks, hosts
    attempt    the supervisor            ranks, spares, hosts, left_out
    start      each rank                 rank, size, and the files in /dev/shm that MPI shares memory by
    death      each rank that saw it     dead: the number, host and pid of the process; reason; meeting
    recovery   each rank that continues  seconds, ranks, the commit that it continues from, meeting
    trained    each rank that trained to the end
    exit       each rank whose program has finished
    error      each rank with an uncaught exception: rank, error, text, and whether it is due to others
    commit     the supervisor            number of the last commit
    end        the supervisor            code: mpirun's
    verdict    the supervisor, last      well, code, why

A record that cannot be written causes a warning, and no error: training continues.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from ..errors import BootstrapError
from ..system.files import append, make_own_folder
from ..system.processes import pid_namespace
from .launchers import checked_number

RECORD, COMMITTED = "record", "committed"
"""The names of the files in the folder of a job: the record, and the number of the last commit."""

KINDS = ("job", "attempt", "start", "death", "recovery", "trained", "exit", "error", "commit", "end", "verdict")


class Event(TypedDict, total=False):
    """A line of the record, with those facts that programs read."""

    kind: str
    time: float
    attempt: int
    host: str
    namespace: str
    pid: int
    rank: int
    size: int
    ranks: int
    spares: int
    shared: list[str]
    dead: dict[str, object]
    reason: str
    meeting: int
    seconds: float
    number: int
    error: str
    text: str
    due_to_others: bool


_CURE = "unset it, or start this program with python -m bagua_comm run --spares N"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """The job of a process, as the supervisor describes it; the defaults describe a job without a supervisor."""

    name: str = ""
    """The unique name of the job; empty without a supervisor."""
    folder: Path | None = None
    """The folder for data that outlives processes, the same path on each host; None without a supervisor."""
    spares: int = 0
    """The number of spare ranks."""
    min_ranks: int | None = None
    """The least number of ranks that train; None if the user did not set it."""
    attempt: int = 0
    """The number of restarts of mpirun so far."""

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Job:
        """Return the job of a process with these environment variables.

        Raises:
            BootstrapError: One of them is not a number.

        >>> Job.of({"BAGUA_SPARES": "1"}).spares
        1
        """

        def number(name: str, least: int) -> int | None:
            if name not in variables:
                return None
            return checked_number(variables, name, f"a number from {least} on", least, cure=_CURE)

        folder = variables.get("BAGUA_JOB_FOLDER")
        return cls(
            variables.get("BAGUA_JOB", ""),
            Path(folder) if folder else None,
            number("BAGUA_SPARES", 0) or 0,
            number("BAGUA_MIN_RANKS", 1),
            number("BAGUA_ATTEMPT", 0) or 0,
        )

    def variables(self) -> dict[str, str]:
        """Return the environment variables from which `of` makes an equal job.

        >>> Job.of(Job("a", Path("/a"), 1, 2, 3).variables())
        Job(name='a', folder=PosixPath('/a'), spares=1, min_ranks=2, attempt=3)
        """
        found = {"BAGUA_SPARES": str(self.spares)}
        if self.min_ranks is not None:
            found["BAGUA_MIN_RANKS"] = str(self.min_ranks)
        if self.folder is not None:
            found |= {"BAGUA_JOB": self.name, "BAGUA_JOB_FOLDER": str(self.folder)}
            found["BAGUA_ATTEMPT"] = str(self.attempt)
        return found

    def prepare(self) -> None:
        """Make the folder of the job on this host, unless it exists.

        Raises:
            BootstrapError: It cannot be made, or another user can write to it.
        """
        if self.folder is None:
            return
        try:
            is_mine = make_own_folder(self.folder)
        except OSError as exc:
            raise BootstrapError(f"the folder of this job, {self.folder}, cannot be made: {exc}") from exc
        if not is_mine:
            raise BootstrapError(f"the folder of this job, {self.folder}, belongs to another user; remove it")

    def record(self, kind: str, **facts: object) -> None:
        """Append a line to the record, in one write; do nothing without a supervisor.

        Args:
            kind: One of `KINDS`.
            facts: The facts of the event; values outside of JSON are written as text.
        """
        if self.folder is None:
            return
        if kind not in KINDS:
            raise ValueError(f"record: the kind is {kind!r}, expected one of {', '.join(KINDS)}")
        source = {"host": socket.gethostname(), "namespace": pid_namespace(), "pid": os.getpid()}
        entry = {"kind": kind, "time": round(time.time(), 3), "attempt": self.attempt, **source, **facts}
        add_lines(self.folder / RECORD, [json.dumps(entry, default=str)])

    def committed(self, number: int) -> None:
        """Write the number of the last commit; do nothing without a supervisor."""
        if self.folder is None:
            return
        with suppress(OSError):
            file = os.open(self.folder / COMMITTED, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                os.pwrite(file, b"%20d\n" % number, 0)
            finally:
                os.close(file)

    def last_commit(self) -> int | None:
        """Return the number that `committed` wrote last on this host; None if there was no commit."""
        with suppress(OSError, ValueError, TypeError):
            return int((self.folder / COMMITTED).read_text())  # type: ignore[operator]
        return None


def add_lines(file: Path, lines: Iterable[str]) -> None:
    """Append lines to a record in one write, so that lines of several processes do not mix."""
    try:
        append(file, "".join(f"{line}\n" for line in lines))
    except OSError as exc:
        _log.warning("the record of this job cannot be written: %s", exc)


def entries(lines: Iterable[str]) -> Iterator[Event]:
    """Parse the lines of a record; an incomplete line is skipped.

    >>> [entry["kind"] for entry in entries(['{"kind": "start"}', '{"kind": "ex'])]
    ['start']
    """
    for line in lines:
        with suppress(ValueError):
            entry: Event = json.loads(line)
            if isinstance(entry, dict) and entry.get("kind") in KINDS:
                yield entry
