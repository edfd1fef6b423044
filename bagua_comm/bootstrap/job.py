"""The job of a supervised program: what its processes know of it, where they keep what outlives them, its record.

`python -m bagua_comm run --restarts 3` starts mpirun again when it ends too early. What the attempts share lies
in a folder in the memory of each host. One file of it is the record, a line of JSON for each thing that happened:

    kind       written by                facts, beside time (seconds since 1970), attempt, host, namespace and pid
    job        the supervisor, once      command, ranks, spares, min_ranks, hosts
    attempt    the supervisor            ranks, spares, hosts, left_out
    start      each rank                 rank, size, and the files in /dev/shm that MPI shares memory by
    death      each rank that learnt it  dead: the number, host and pid of the process; reason; meeting
    recruits   the rank that starts processes in the place of dead ones: count
    recovery   each rank that goes on    seconds, ranks, the commit that it goes on from, meeting
    trained    each rank that trained to the end
    exit       each rank that came to the end of its program
    error      each rank with an exception that nobody caught: rank, error, text, and whether it is due to others
    commit     the supervisor            number: that of the last commit
    end        the supervisor            code: mpirun's
    verdict    the supervisor, last      well, code, why

Nothing here fails when the record cannot be written: training is worth more.
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
from typing import Any

from ..errors import BootstrapError
from ..files import make_own_folder
from ..processes import pid_namespace
from .launchers import checked_number

RECORD, COMMITTED = "record", "committed"
"""The names of the files in the folder of a job: the record, and the number of the last commit."""

KINDS = (
    "job",
    "attempt",
    "start",
    "death",
    "recruits",
    "recovery",
    "trained",
    "exit",
    "error",
    "commit",
    "end",
    "verdict",
)

_CURE = "unset it, or start this program with python -m bagua_comm run --spares N"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """What a process knows of the job that it belongs to; all defaults where nobody supervises it."""

    name: str = ""
    """No two jobs have the same; empty without a supervisor."""
    folder: Path | None = None
    """Where processes keep what outlives them, on each host the same path; None without a supervisor."""
    spares: int = 0
    """How many of the ranks stand by."""
    min_ranks: int | None = None
    """With fewer ranks training does not go on; None if the user did not say."""
    attempt: int = 0
    """How often mpirun has been started again."""
    recruiter: str = ""
    """Who has started this process in the place of a dead one, as BAGUA_RECRUITER tells (see `elastic.mpi`);
    empty in those that were started with the job."""

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Job:
        """The job of a process with these environment variables.

        Raises:
            BootstrapError: One of them holds no number.

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
            variables.get("BAGUA_RECRUITER", ""),
        )

    def variables(self) -> dict[str, str]:
        """The environment variables from which `of` makes this job again.

        >>> Job.of(Job("a", Path("/a"), 1, 2, 3).variables())
        Job(name='a', folder=PosixPath('/a'), spares=1, min_ranks=2, attempt=3, recruiter='')
        """
        found = {"BAGUA_SPARES": str(self.spares)}
        if self.min_ranks is not None:
            found["BAGUA_MIN_RANKS"] = str(self.min_ranks)
        if self.folder is not None:
            mine = {"BAGUA_JOB": self.name, "BAGUA_JOB_FOLDER": str(self.folder)}
            found |= {**mine, "BAGUA_ATTEMPT": str(self.attempt)}
        return found

    def prepare(self) -> None:
        """Make the folder of the job on this host, unless it is there.

        Raises:
            BootstrapError: It cannot be made, or somebody else can write to it.
        """
        if self.folder is None:
            return
        try:
            is_mine = make_own_folder(self.folder)
        except OSError as exc:
            raise BootstrapError(f"the folder of this job, {self.folder}, cannot be made: {exc}") from exc
        if not is_mine:
            raise BootstrapError(f"the folder of this job, {self.folder}, belongs to somebody else; remove it")

    def record(self, kind: str, **facts: Any) -> None:
        """Add a line to the record, in one write; do nothing without a supervisor.

        Args:
            kind: One of `KINDS`.
            facts: What is to be told, as JSON can tell it.
        """
        if self.folder is None:
            return
        if kind not in KINDS:
            raise ValueError(f"record: the kind is {kind!r}, expected one of {', '.join(KINDS)}")
        here = {"host": socket.gethostname(), "namespace": pid_namespace(), "pid": os.getpid()}
        entry = {"kind": kind, "time": round(time.time(), 3), "attempt": self.attempt, **here, **facts}
        add_lines(self.folder / RECORD, [json.dumps(entry, default=str)])

    def committed(self, number: int) -> None:
        """Note the number of the last commit, in place of the one before; do nothing without a supervisor."""
        if self.folder is None:
            return
        with suppress(OSError):
            file = os.open(self.folder / COMMITTED, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                os.pwrite(file, b"%20d\n" % number, 0)
            finally:
                os.close(file)

    def last_commit(self) -> int | None:
        """The number that `committed` noted last on this host; None if there was no commit."""
        with suppress(OSError, ValueError, TypeError):
            return int((self.folder / COMMITTED).read_text())  # type: ignore[operator]
        return None


def add_lines(file: Path, lines: Iterable[str]) -> None:
    """Append lines to a record in one write, so that those of several processes do not mix."""
    data = "".join(f"{line}\n" for line in lines).encode()
    try:
        number = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            os.write(number, data)
        finally:
            os.close(number)
    except OSError as exc:
        _log.warning("the record of this job cannot be written: %s", exc)


def entries(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """What the lines of a record tell; a line that was cut off is left out.

    >>> [entry["kind"] for entry in entries(['{"kind": "start"}', '{"kind": "ex'])]
    ['start']
    """
    for line in lines:
        with suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and entry.get("kind") in KINDS:
                yield entry
