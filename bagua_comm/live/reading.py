"""The statuses of a job on this host, and the states of their processes as this host sees them.

A file is judged on its own host, by its process and by the age that the file system gives it, so that the clocks
of hosts may differ.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..flight.batches import more
from ..system.files import is_private
from ..system.processes import ProcessId
from .status import OVER, PREFIX, LiveError, State, Status, live_folder

SILENT_S = 5.0
"""The age of a file, which is written once a second, after which its process is silent."""

NAMED = 8
"""The number of jobs that an error names."""


def read_job(folder: Path) -> list[Status]:
    """The processes of a job on this host, by rank; of several attempts, those of the last.

    Raises:
        LiveError: The folder is not that of a job, or a file cannot be read.
    """
    found = []
    for path in _files(folder):
        try:
            written_s = path.stat().st_mtime
            found.append(_judged(Status.from_json(path.read_text()), max(0.0, time.time() - written_s)))
        except FileNotFoundError:
            continue  # removed meanwhile
        except (OSError, UnicodeDecodeError, LiveError) as exc:
            raise LiveError(f"{path}: {exc}") from exc
    if not found:
        raise LiveError(
            f"{folder} has no files of processes, such as {PREFIX}123_1a2b.json: it is not that of a job"
        )
    latest = max(each.attempt for each in found)
    return sorted((each for each in found if each.attempt == latest), key=lambda each: (each.rank, each.is_over))


def folder_of(job: str | None) -> Path:
    """The folder of a job, by its name, the first characters of it, or its path.

    Without any, the folder of the job that runs, or else of the latest one.

    Raises:
        LiveError: There is none, or several may be meant.
    """
    if job is not None and Path(job).is_dir():
        return Path(job)
    root = live_folder()
    folders = _jobs(root)
    known = ", ".join(each.name for each in folders[-NAMED:]) + more(folders[:-NAMED])
    if job is not None:
        meant = [each for each in folders if each.name.startswith(job)]
        exact = [each for each in meant if each.name == job] or meant
        if len(exact) != 1:
            why = f"there are {len(exact)} such jobs" if exact else "there is no such job, and no such folder"
            raise LiveError(f"{job}: {why}; the jobs of this host are: {known or 'none'}")
        return exact[0]
    if not folders:
        raise LiveError(
            f"no job of yours has run on this host: there is nothing in {root}. A program is shown from its "
            "connect() on, if a launcher has started it, such as `bagua run`, and BAGUA_LIVE is not 0"
        )
    running = [each for each in folders if is_running(read_job(each))]
    if len(running) > 1:
        raise LiveError(f"{len(running)} jobs run here; name one of them: {_described(running)}")
    return running[0] if running else folders[-1]


def is_running(statuses: Sequence[Status]) -> bool:
    """Whether a process of a job still runs."""
    return not all(each.is_over for each in statuses)


def _described(folders: Sequence[Path]) -> str:
    firsts = [(folder.name, read_job(folder)[0]) for folder in folders[:NAMED]]
    return ", ".join(f"{name} ({each.size} ranks)" for name, each in firsts) + more(folders[NAMED:])


def _jobs(root: Path) -> list[Path]:
    """The folders of jobs, the one that was written last at the end."""
    with suppress(OSError):
        if is_private(root.lstat()):
            found = [path for path in root.iterdir() if path.is_dir() and _files(path)]
            return sorted(found, key=lambda path: path.stat().st_mtime)
    return []


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(folder.glob(f"{PREFIX}*.json"))
    except OSError as exc:
        raise LiveError(f"{folder} cannot be read: {exc.strerror or exc}") from exc


def _judged(status: Status, age_s: float) -> Status:
    """The status with its state, and with times that have gone on since it was written."""
    state = _state(status, ProcessId.parse(status.process).state(), age_s)
    if state in OVER:  # it makes no more steps
        return replace(status, state=state, step_s=None, own_s=None, waiting_s=None, sent_per_s=0.0)
    return replace(status, state=state, age_s=age_s, call_s=status.call_s + age_s, last_s=status.last_s + age_s)


def _state(status: Status, process: str, age_s: float) -> State:
    if status.phase in ("ended", "failed"):
        return status.phase
    if process == "ended":
        return "ended" if status.phase == "closed" else "died"
    if process == "stopped":
        return "stopped"
    if age_s > SILENT_S:
        return "silent"
    if status.phase != "training":
        return status.phase
    if status.call:
        return "in a call"
    return "training" if status.last or status.step else "starting"
