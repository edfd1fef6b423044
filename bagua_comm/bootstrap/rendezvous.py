"""The rendezvous of ranks in `connect`: which of them are missing, and how long to wait for them.

`JoinLog` finds the missing ranks before MPI has started, as far as the host can see them; `Wait` applies the time
limit; `Deadline` ends a process that waits inside MPI.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..flight.batches import named
from ..system.files import append, is_private
from ..system.processes import ProcessId, children_of, sees_starter, started_with, starter, state_of
from .launchers import SRUN, SRUN_PMIX, find

R = TypeVar("R")

LATE_S, START_S = 3.0, 30.0
"""How much longer than `timeout_s` a rank waits in `connect`: the first for a rank that runs but has not called
`connect`, since ranks don't start at the same time; the second for MPI once all have called it, since MPI needs a
second to start, and more on a busy machine."""

ENDED_S = 3.0
"""The interval between two checks for ranks that have ended, within the time limit: they cannot come any more."""

LOOK_S = 0.5
"""The interval between two checks for missing ranks, once the time limit is over."""


class Deadline:
    """A time limit for a function: another thread polls `is_over` while `run` runs the function.

    Once `is_over` returns a message, the thread calls `act` with it, which ends the process. An exception from a
    signal handler ends the deadline, wherever it comes: nothing is called between the end of the function and
    that of the deadline.
    """

    def __init__(self, is_over: Callable[[], str | None], act: Callable[[str], None]) -> None:
        self._is_over, self._act = is_over, act
        self._done, self._acts = False, threading.Lock()

    def run(self, body: Callable[[], R]) -> R:
        """Return `body()`, and poll meanwhile."""
        try:
            threading.Thread(target=self._watch, name="deadline", daemon=True).start()
            return body()
        finally:
            self._done = True
            with self._acts:  # if the thread acts now, wait until it has ended the process
                pass

    def _watch(self) -> None:
        while not self._done:
            time.sleep(LOOK_S / 10)
            message = None if self._done else self._is_over()
            if message is not None:
                with self._acts:
                    if not self._done:
                        self._act(message)


class Wait:
    """A wait in `connect` for other ranks, which begins now."""

    def __init__(self, log: JoinLog, timeout_s: float) -> None:
        self._log, self._timeout_s = log, timeout_s
        self.rank = log.rank
        """The rank that waits."""
        self._start_s = time.monotonic()
        self._look_s = self._start_s + timeout_s
        self._ended_s = self._start_s + ENDED_S
        self._seen_ended: set[int] = set()
        """The ranks that had ended without calling `connect` at the last check."""
        self.ended: list[int] = []
        """The ranks that have ended without calling `connect`, if `complaint` has named them."""

    def complaint(self) -> str | None:
        """Return the message that names the missing ranks, if the wait has lasted too long or cannot succeed.

        The result is None otherwise.
        """
        now = time.monotonic()
        if now < self._look_s:
            return self._complaint_about_ended(now) if now > self._ended_s else None
        self._look_s = now + LOOK_S
        late_s = now - self._start_s - self._timeout_s
        missing = self._log.missing()
        if missing.gone or (missing.late and late_s > LATE_S) or late_s > START_S:
            advice = "" if missing.gone else ". Give a longer timeout_s if they are only late"
            return self._waited(now, f"{missing}{advice}")
        return None

    def _complaint_about_ended(self, now: float) -> str | None:
        """The message on ranks that two checks have found to have ended; None if there are none."""
        self._ended_s = now + ENDED_S
        ended = set(self._log.ended_before())
        self._seen_ended, self.ended = ended, sorted(ended & self._seen_ended)
        if not self.ended:
            return None
        spares = "; a spare replaces only ranks that have connected" if self._log.spares else ""
        return self._waited(now, f"{named(self.ended)} ended without calling connect{spares}")

    def _waited(self, now: float, missing: str) -> str:
        return (
            f"connect: {self._log.location()} waited {now - self._start_s:.0f} s for the other ranks: {missing}"
        )


class Missing(NamedTuple):
    """The ranks that have not called `connect`, in phrases."""

    gone: list[str]
    """The ranks that have ended, or are stopped."""
    late: list[str]
    """The ranks that run, but have not called `connect`."""
    unseen: list[str]
    """The ranks whose state is unknown."""

    def __str__(self) -> str:
        found = "; ".join([*self.gone, *self.late, *self.unseen])
        return found or "all of them have called connect"


class JoinLog:
    """The ranks that have called `connect`, as far as this host can see before MPI has started.

    mpirun keeps a folder for its job on every host. A rank checks in there when it connects: it appends a line
    with its `ProcessId` to its file. /proc shows the state of the processes of other ranks.

    Args:
        variables: The environment variables of this process.
        members: The ranks that connect; None if all do.
    """

    def __init__(self, variables: Mapping[str, str], members: Sequence[int] | None = None) -> None:
        def number(*names: str) -> int | None:
            """The number in the first of these variables that holds one."""
            return next((int(text) for name in names if (text := variables.get(name, "")).isdecimal()), None)

        self.rank = number("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK") or 0
        self.size = number("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
        self.spares = number("BAGUA_SPARES") or 0
        launch = find(variables)
        if launch is not None and launch.launcher in (SRUN, SRUN_PMIX):
            self.rank, self.size = launch.rank or 0, launch.size
        self._members = members
        self._local_size = number("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
        self._job = variables.get("PMIX_NAMESPACE", "")
        self._folder = self._find_folder(variables.get("PMIX_SERVER_TMPDIR"))
        # Each group of ranks has its own entries, since its ranks may have connected in other groups.
        self._group = "" if members is None else f"-of-{zlib.crc32(repr(list(members)).encode()):x}"
        self._times = 0

    def _find_folder(self, name: str | None) -> Path | None:
        """The folder of this job, if no other user can write to it."""
        with suppress(OSError):
            if name and self._job and is_private(os.stat(name)):
                return Path(name)
        return None

    def _file(self, name: str) -> Path:
        return Path(f"{self._folder}/bagua-{self._job.replace('/', '_')}-{name}")

    def check_in(self) -> None:
        """Log one more call of `connect` by this rank."""
        if self._folder is None:
            return
        try:
            append(self._file(f"{self.rank}{self._group}"), f"{ProcessId.mine().text()}\n")
        except OSError:
            self._folder = None
            return
        self._times = len(self._entries(self.rank))

    def is_reporter(self) -> bool:
        """Whether this rank is the first on this host that asks to report an error; True if that is not known."""
        if self._folder is None:
            return True
        try:
            self._file("error").touch(0o600, exist_ok=False)
        except OSError as exc:
            return not isinstance(exc, FileExistsError)
        return True

    def dead(self) -> dict[int, int]:
        """Return the processes that have called `connect` on this host and have ended since, by rank."""
        if self._folder is None or self.size is None:
            return {}
        others = (rank for rank in self._everyone() if rank != self.rank)
        last = {rank: entries[-1] for rank in others if (entries := self._entries(rank))}
        return {rank: process.pid for rank, process in last.items() if process.has_ended()}

    def ended_before(self) -> list[int]:
        """Return the ranks that have certainly ended without calling `connect`; empty if that is not known.

        A rank may hide its environment variables, for instance by a title. So the launcher must have lost as many
        children.
        """
        everyone = self._local_size == self.size and sees_starter("PMIX_NAMESPACE")
        if self._folder is None or self.size is None or not everyone:
            return []
        seen = {self.rank, *self.processes()}
        ended = [rank for rank in self._everyone() if rank not in seen and not self._entries(rank)]
        if ended and len(children_of(starter("PMIX_NAMESPACE"))) > self.size - len(ended):
            return []
        return ended

    def number_in_world(self, rank: int) -> int:
        """Return the number of a rank among those that connect together."""
        return rank if self._members is None else self._members.index(rank)

    def note(self, timeout_s: float) -> str:
        """Return the message of a rank that has ended, but waits for other ranks: those that run on this host."""
        processes = sorted(self.processes().items()) if self._job else []
        others = [f"rank {rank} (process {pid}, {state_of(pid)})" for rank, pid in processes if rank != self.rank]
        return (
            f"{self.location()} has ended, and has waited {timeout_s:g} s for the other ranks to end; it "
            f"continues to wait. On this host: {', '.join(others) or 'none can be seen'}"
        )

    def name(self) -> str:
        """Return this rank and the number of ranks, as its launcher counts them."""
        return f"rank {self.rank}" if self.size is None else f"rank {self.rank} of {self.size}"

    def location(self) -> str:
        """Return this rank, as `name` does, and its host."""
        return f"{self.name()} on {socket.gethostname()}"

    def missing(self) -> Missing:
        """Return the ranks that have not called `connect`."""
        missing = Missing([], [], [])
        if self._folder is None or self.size is None:
            missing.unseen.append("this launcher does not show which of them have not called connect")
            return missing
        processes, unseen = self.processes(), []
        for rank in self._everyone():
            entries = self._entries(rank)
            process = entries[-1].pid if entries else processes.get(rank)
            if rank == self.rank:
                continue
            state = entries[-1].state() if entries else state_of(process or 0)
            if process is None or (not state and 0 < len(entries) < self._times):
                unseen.append(rank)
            elif state not in ("running", ""):
                missing.gone.append(
                    f"rank {rank} (process {process}) {'is' if state == 'stopped' else 'has'} {state}"
                )
            elif len(entries) < self._times:
                missing.late.append(f"rank {rank} (process {process}) runs, but has not called connect")
        if unseen and self._local_size == self.size and sees_starter("PMIX_NAMESPACE"):
            missing.gone.append(f"{named(unseen)} ended without calling connect")
        elif unseen:
            missing.unseen.append(f"{named(unseen)} cannot be seen from here: on another host, or ended")
        return missing

    def _everyone(self) -> Sequence[int]:
        """The ranks that connect; empty if their number is not known."""
        return range(self.size or 0) if self._members is None else self._members

    def _entries(self, rank: int) -> list[ProcessId]:
        """The processes that have checked in as `rank`, one for each call of `connect`."""
        with suppress(OSError, ValueError):
            return list(map(ProcessId.parse, self._file(f"{rank}{self._group}").read_text().splitlines()))
        return []

    def processes(self) -> dict[int, int]:
        """Return the process of each rank that runs on this host."""
        found: dict[int, list[int]] = {}
        for process, variables in started_with("PMIX_NAMESPACE", self._job).items():
            rank = variables.get("PMIX_RANK", "")
            if rank.isdecimal():
                found.setdefault(int(rank), []).append(process)
        # A rank's children have the same variables: choose a process that is stopped, if any, else the oldest.
        return {
            rank: min(same, key=lambda process: (state_of(process) != "stopped", process))
            for rank, same in found.items()
        }
