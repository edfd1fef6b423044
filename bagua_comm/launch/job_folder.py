"""The folder of a supervised job on this host, and the removal of stale folders and leftover processes.

A supervisor holds a lock on its folder until it ends. The kernel releases the lock whatever ends the supervisor,
so a folder without a lock is stale, and the next supervisor removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..system.files import shared_memory
from ..system.processes import started_with

PREFIX, UNFINISHED = "bagua_comm-job-", "bagua_comm-new-"
"""The prefixes of folder names; the second is for unfinished folders."""

OWNER = "owner"
"""The locked file in a folder; it lists the other hosts with a folder of the same name."""

UNFINISHED_S = 60.0
"""The age after which an unfinished folder is stale."""

GRACE_S = 2.0
"""The time between SIGTERM and SIGKILL for a leftover process."""


@dataclass(frozen=True)
class JobFolder:
    """A folder that this process owns; see `make`."""

    path: Path
    name: str
    """The name of the job."""
    lock: int

    def remove(self) -> None:
        """Remove the folder, and release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self.lock)


def make(facts: dict[str, object]) -> JobFolder:
    """Make a folder that no other user can read, locked by this process.

    Args:
        facts: The facts that `stale` yields for this folder once this process has ended.

    Raises:
        OSError: It cannot be made.
    """
    name = secrets.token_hex(8)
    unfinished = shared_memory() / f"{UNFINISHED}{name}"
    unfinished.mkdir(mode=0o700)
    lock = os.open(unfinished / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, json.dumps(facts).encode())
    # Once it has its final name, it is locked.
    path = unfinished.rename(shared_memory() / f"{PREFIX}{name}")
    return JobFolder(path, name, lock)


def stale() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Remove the folders whose supervisors have ended; yields the path and the facts of each."""
    for folder in shared_memory().glob(f"{PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # another supervisor is removing it
        with contextlib.suppress(OSError), open(lock, closefd=True) as owner:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                facts = json.load(owner)
            except ValueError:
                facts = {}
            shutil.rmtree(folder, ignore_errors=True)
            yield folder, facts
    for folder in shared_memory().glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime > UNFINISHED_S:
                shutil.rmtree(folder, ignore_errors=True)


def end_leftovers(job: str, *, grace_s: float = GRACE_S) -> int:
    """End all processes on this host that the job has left behind; returns their number.

    These are the processes that were started with the name of the job in BAGUA_JOB.
    """
    found: set[int] = set()
    deadline = time.monotonic() + grace_s
    while left := set(started_with("BAGUA_JOB", job)) - {os.getpid()}:
        over = time.monotonic() >= deadline
        for pid in left if over else left - found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL if over else signal.SIGTERM)
        found |= left
        if time.monotonic() > deadline + GRACE_S:
            break  # the kernel cannot end them yet, for instance while a file system hangs
        time.sleep(0.02)
    return len(found)
