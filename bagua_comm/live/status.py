"""The status of one process of a job, and its file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..errors import BaguaError
from ..system.files import shared_memory

VERSION = 1
"""The version of the files."""

Phase: TypeAlias = Literal["training", "committing", "rendezvous", "standing by", "closed", "ended", "failed"]
"""What the process itself says. closed: its communicator is. ended, failed: the program."""

State: TypeAlias = Literal[
    "", "starting", "training", "in a call", "committing", "rendezvous", "standing by", "closed", "ended",
    "failed", "died", "stopped", "silent",
]  # fmt: skip
"""What a reader finds. starting: no step or call has begun. died: the process has ended without notice. stopped:
by a signal or a debugger. silent: it runs, but its file is old, as where C code does not let Python run."""

OVER = ("ended", "failed", "died")
"""The states of processes that are gone."""


SIGTERM = "SIGTERM"
"""The reason of a process that this signal has ended; launchers send it when another rank has failed."""

PREFIX = "process_"
"""How the names of the files of processes begin."""


def live_folder() -> Path:
    """This user's folder of jobs on this host, in memory; it outlives the processes."""
    return shared_memory() / f"bagua_comm-live-{os.geteuid()}"


def file_name(pid: int, namespace: int) -> str:
    """The name of the file of a process, by its number and that of its PID namespace."""
    return f"{PREFIX}{pid}_{namespace:x}.json"


class LiveError(BaguaError):
    """A folder is not that of a job, or the file of a process cannot be read."""


@dataclass(frozen=True)
class Status:
    """One process of a job.

    Attributes:
        job: The name of the job, the same on all ranks.
        rank, size: The rank in the world, and the number of ranks.
        host, process: The name of the host, and the process as text (`ProcessId.text`).
        hosts: The names of the hosts of all ranks.
        attempt: The number of restarts by the supervisor.
        phase, reason: What the process says of itself, and why it failed.
        step: The training steps begun; None without an engine.
        step_s, own_s, waiting_s: Of the latest steps, the seconds of one, of its own work, and of its waits for
            other ranks; None if no steps are made.
        sent_per_s: Bytes that the rank sends in a second.
        memory: Bytes of memory in use.
        call, call_s: The call in progress, with its number and communicator, and its seconds; "" without one.
        last, last_s: The call that ended last, and how many seconds ago.
        line: Where the program is, if it has begun no call and no step for a while.
        warning: The last warning of this library.
        state, age_s: What the reader finds, and the age of the file in seconds.
    """

    job: str
    rank: int
    size: int
    host: str
    process: str
    hosts: tuple[str, ...] = ()
    attempt: int = 0
    phase: Phase = "training"
    reason: str = ""
    step: int | None = None
    step_s: float | None = None
    own_s: float | None = None
    waiting_s: float | None = None
    sent_per_s: float = 0.0
    memory: int = 0
    call: str = ""
    call_s: float = 0.0
    last: str = ""
    last_s: float = 0.0
    line: str = ""
    warning: str = ""
    state: State = ""
    age_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the process is gone."""
        return self.state in OVER

    @property
    def pid(self) -> str:
        """The number of the process on its host."""
        return self.process.partition(" ")[0]

    def as_dict(self) -> dict[str, Any]:
        """The status for JSON."""
        return {"version": VERSION, **vars(self)}

    def to_json(self) -> str:
        """The content of the file."""
        return json.dumps(self.as_dict())

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Status:
        r"""The status of which `found` is `as_dict`. Texts lose what could control a terminal.

        Raises:
            LiveError: It is none, or of another version.

        >>> Status.from_dict(Status("job", 0, 1, "node1", "12 345 node1", line="x\x1b[2J").as_dict()).line
        'x [2J'
        """
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise LiveError(f"this is not the status of a process in version {VERSION}")
        try:
            given = {each.name: found[each.name] for each in fields(cls)}
            numbers = (
                given[name] for name in ("rank", "size", "sent_per_s", "memory", "call_s", "last_s", "age_s")
            )
            if not all(isinstance(number, int | float) for number in numbers):
                raise TypeError("a number is none")
            given["hosts"] = tuple(_printable(str(host)) for host in given["hosts"])
        except (KeyError, TypeError) as exc:
            raise LiveError(f"this is not the status of a process: {exc!r}") from exc
        return cls(**{name: _printable(each) if isinstance(each, str) else each for name, each in given.items()})

    @classmethod
    def from_json(cls, text: str) -> Status:
        """The status that `to_json` wrote.

        Raises:
            LiveError: It was not written by `to_json`, or by another version.
        """
        try:
            found = json.loads(text)
        except ValueError as exc:
            raise LiveError(f"this is not the status of a process: {exc}") from exc
        return cls.from_dict(found)


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)
