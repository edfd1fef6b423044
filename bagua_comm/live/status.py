"""The status of one process of a job, and its file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from ..errors import BaguaError
from ..system.files import shared_memory

VERSION = 1
"""The version of the files."""

State: TypeAlias = Literal[
    "training", "committing", "rendezvous", "standing by", "closed", "ended", "failed",
    "starting", "in a call", "stopped", "silent", "died",
]  # fmt: skip
"""What a process does. It writes those of the first line itself; closed: its communicator is; ended, failed: the
program. A reader finds the others. starting: no call or step has begun. stopped: by a signal or a debugger.
silent: it runs, but its file is old, as where C code does not let Python run. died: it ended without notice."""

OVER = ("ended", "failed", "died")
"""The states of processes that have ended."""

SIGTERM = "SIGTERM"
"""The reason of a process that this signal has ended; launchers send it when another rank has failed."""


class LiveError(BaguaError):
    """A folder is not that of a job, or the file of a process cannot be read."""


@dataclass(frozen=True)
class Status:
    """One process of a job.

    Attributes:
        job: The name of the job, the same on all ranks.
        rank, size: The rank in the world, and the number of ranks.
        host, pid: The name of its host, and its number there.
        process: The process as `ProcessId.text`.
        hosts: The names of the hosts of all ranks, separated by commas.
        attempt: The number of restarts of the job before.
        state, reason: What it does, and why it failed.
        step: The training steps begun; None without an engine.
        step_s, own_s, waiting_s: Of the latest steps, the seconds of one, of its own work, and of its waits for
            other ranks; None if no steps are made.
        sent_per_s: Bytes that the rank sends in a second.
        memory: Bytes of memory in use.
        call, call_s: The call in progress, with its number and communicator, and its seconds; "" without one.
        members: The ranks that all make this call, those of its communicator; empty for a message between two.
        last, last_s: The call that ended last, and how many seconds ago.
        line: Where the program is, if no call has begun or ended for a while.
        slow: The ranks and links that are slow in its training, as `Communicator.health` has them.
        warning: The last warning of this library.
        age_s: The age of the file, in seconds, when it was read.
    """

    job: str
    rank: int
    size: int
    host: str
    pid: int
    process: str = ""
    hosts: str = ""
    attempt: int = 0
    state: State = "training"
    reason: str = ""
    step: int | None = None
    step_s: float | None = None
    own_s: float | None = None
    waiting_s: float | None = None
    sent_per_s: float = 0.0
    memory: int = 0
    call: str = ""
    call_s: float = 0.0
    members: tuple[int, ...] = ()
    last: str = ""
    last_s: float = 0.0
    line: str = ""
    slow: str = ""
    warning: str = ""
    age_s: float = 0.0

    def as_dict(self) -> dict[str, object]:
        """The status for JSON."""
        return {"version": VERSION, **vars(self)}

    @classmethod
    def from_dict(cls, found: object) -> Status:
        r"""The status of which `found` is `as_dict`. Texts lose what could control a terminal.

        Raises:
            ValueError, TypeError: It is none, or of another version.

        >>> Status.from_dict(Status("job", 0, 1, "node1", 12, line="x\x1b[2J").as_dict()).line
        'x [2J'
        """
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise ValueError(f"it is not the status of a process, in version {VERSION}")
        given = {name: _printable(value) for name, value in found.items() if name != "version"}
        given["members"] = tuple(found.get("members", ()))
        return cls(**given)  # type: ignore[arg-type]


def _printable(value: object) -> object:
    """A text without characters that are not printed; any other value as it is."""
    return "".join(c if c.isprintable() else " " for c in value) if isinstance(value, str) else value


def is_running(ranks: Sequence[Status]) -> bool:
    """Whether one of these processes still runs."""
    return any(each.state not in OVER for each in ranks)


def live_folder() -> Path:
    """This user's folder of jobs on this host, in memory; it outlives the processes."""
    return shared_memory() / f"bagua_comm-live-{os.geteuid()}"
