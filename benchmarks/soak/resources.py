"""What a job uses, as Linux shows it, and whether it grows.

Memory is that of a process alone (RssAnon of /proc/PID/status), so that shared files are not counted twice.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WARM_UP_S = 30.0
"""Seconds that do not count after a rank has begun to train, or another process has started: buffers are made."""

LEAST_S = 90.0
"""A process that lived for less than this after `WARM_UP_S` is not judged: too short to see anything grow."""


@dataclass(frozen=True)
class Use:
    """What a process uses at one moment."""

    t: float
    mib: float
    threads: int
    descriptors: int


@dataclass(frozen=True)
class Limit:
    """How much may be added during a run: to each process, and to all files in memory together."""

    mib: float = 8.0
    threads: float = 2.0
    descriptors: float = 6.0
    shm_mib: float = 4.0
    shm_files: float = 4.0


def use_of(pid: int, t: float) -> Use | None:
    """What a process uses; None if it has ended."""
    with suppress(OSError, TypeError):
        status = Path(f"/proc/{pid}/status").read_text()
        kib, threads = (re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE) for name in ("RssAnon", "Threads"))
        if kib is not None and threads is not None:
            return Use(t, int(kib[1]) / 1024, int(threads[1]), len(os.listdir(f"/proc/{pid}/fd")))
    return None


def role_of(pid: int) -> str:
    """What a process of the job is: "run", "mpirun", "daemon" (of mpirun, on another host), "rank", or ""."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    name = os.path.basename(words[0])
    if name.startswith("python"):
        modules = words[1:3]
        if modules == ["-m", "bagua_comm"]:
            return "run"
        return "rank" if modules == ["-m", "benchmarks.faults.training"] else ""
    return {"mpirun": "mpirun", "prterun": "mpirun", "prted": "daemon"}.get(name, "")


def files_in(folder: Path) -> tuple[float, int]:
    """The size in MiB of all files in a folder and below, and their number."""
    sizes = []
    for parent, _, names in os.walk(folder):  # which does not mind that some vanish meanwhile
        for name in names:
            with suppress(OSError):
                sizes.append(os.lstat(os.path.join(parent, name)).st_blocks * 512)
    return sum(sizes) / 2**20, len(sizes)


class History:
    """What each process of a job has used, from its start on."""

    def __init__(self) -> None:
        self._uses: dict[int, list[Use]] = {}
        self._roles: dict[int, str] = {}
        self._begun: dict[int, float] = {}

    def begin(self, pid: int, t: float) -> None:
        """Note that a process begins to train; what it used before is not compared."""
        self._begun.setdefault(pid, t)

    def add(self, pids: Sequence[int], t: float) -> None:
        """Look at these processes now."""
        for pid in pids:
            if not self._roles.get(pid):
                self._roles[pid] = role_of(pid)
            use = use_of(pid, t) if self._roles[pid] else None
            if use is not None:
                self._uses.setdefault(pid, []).append(use)

    def of(self, role: str) -> dict[int, list[Use]]:
        """The processes of a role."""
        return {pid: uses for pid, uses in self._uses.items() if self._roles[pid] == role}

    def between(self, role: str, begin: float, end: float) -> list[Use]:
        """What processes of a role used in a time."""
        return [use for uses in self.of(role).values() for use in uses if begin <= use.t < end]

    def grown(self) -> Iterator[dict[str, Any]]:
        """By how much each process that lived long enough has grown, see `growth`."""
        for pid, uses in self._uses.items():
            if self._roles[pid] == "rank":
                uses = [use for use in uses if use.t >= self._begun.get(pid, float("inf"))]
            found = growth(uses)
            if found is not None:
                yield {"pid": pid, "role": self._roles[pid], "lived_s": round(uses[-1].t - uses[0].t), **found}


def growth(uses: Sequence[Use]) -> dict[str, float] | None:
    """From the median of the first third of a life to that of the last; None if it was short.

    >>> uses = [Use(float(t), 40.0 + 0.01 * t, 3, 20) for t in range(331)]
    >>> growth(uses)
    {'mib': 2.01, 'threads': 0.0, 'descriptors': 0.0}
    """
    warm = [use for use in uses if use.t - uses[0].t >= WARM_UP_S]
    if not warm or warm[-1].t - warm[0].t < LEAST_S:
        return None
    third = max(1, len(warm) // 3)
    first, last = ([asdict(use) for use in part] for part in (warm[:third], warm[-third:]))
    names = ("mib", "threads", "descriptors")
    return {
        name: round(statistics.median(u[name] for u in last) - statistics.median(u[name] for u in first), 2)
        for name in names
    }
