"""The statuses of a job on this host, and the states of their processes as this host sees them.

A file is judged on its own host, by its process and by the age that the file system gives it, so that the clocks
of hosts may differ.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..flight.batches import more
from ..system.files import is_private
from ..system.processes import ProcessId
from .status import OVER, LiveError, State, Status, is_running, live_folder

SILENT_S = 5.0
"""The age of a file, which is written once a second, after which its process is silent."""

NAMED = 8
"""The number of jobs that an error names, the latest ones."""


def folder_of(job: str | None) -> Path:
    """The folder of a job, by its name or path; by default of the one that runs, or else of the latest one.

    Raises:
        LiveError: There is none, or several run.
    """
    root = live_folder()
    folders = _jobs(root)
    known = ", ".join(each.name for each in folders[-NAMED:]) + more(folders[:-NAMED])
    if job is not None:
        found = [*(each for each in folders if each.name == job), Path(job)]
        if not found[0].is_dir():
            raise LiveError(f"{job}: there is no such job, nor folder; the jobs of this host: {known or 'none'}")
        return found[0]
    if not folders:
        raise LiveError(
            f"no job of yours has run on this host: there is nothing in {root}. A program is shown from its "
            "connect() on, if a launcher has started it, such as `bagua run`, and BAGUA_LIVE is not 0"
        )
    running = [each for each in folders if _runs(each)]
    if len(running) > 1:
        named = ", ".join(f"{each.name} ({read_job(each)[0].size} ranks)" for each in running)
        raise LiveError(f"{len(running)} jobs run here; name one of them: {named}")
    return [*folders, *running][-1]


def _runs(folder: Path) -> bool:
    """Whether a job runs; False if its files are of another version."""
    with suppress(LiveError):
        return is_running(read_job(folder))
    return False


def _jobs(root: Path) -> list[Path]:
    """The folders of jobs, the one that was written last at the end; none if others could make them."""
    with suppress(OSError):
        if is_private(root.lstat()):
            found = [path for path in root.iterdir() if any(path.glob("*.json"))]
            return sorted(found, key=lambda path: path.stat().st_mtime)
    return []


def read_job(folder: Path) -> list[Status]:
    """The processes of a job on this host, by rank; of several attempts, those of the last.

    Raises:
        LiveError: The folder is not that of a job, or a file cannot be read.
    """
    found = []
    for path in folder.glob("*.json"):
        try:
            age_s = max(0.0, time.time() - path.stat().st_mtime)
            found.append(_judged(Status.from_dict(json.loads(path.read_text())), age_s))
        except FileNotFoundError:
            continue  # removed meanwhile
        except (OSError, ValueError, TypeError) as exc:
            raise LiveError(f"{path}: {exc}") from exc
    if not found:
        raise LiveError(
            f"{folder} is not the folder of a job: it has no files of processes, such as 123-1a2b.json"
        )
    latest = max(each.attempt for each in found)
    return sorted((each for each in found if each.attempt == latest), key=lambda each: (each.rank, each.pid))


def _judged(status: Status, age_s: float) -> Status:
    """The status with the state that it has now, and with times that have gone on since it was written."""
    state = _state(status, ProcessId.parse(status.process).state(), age_s)
    if state in OVER or state in ("stopped", "silent"):  # it makes no more steps
        status = replace(status, step_s=None, own_s=None, waiting_s=None, sent_per_s=0.0)
    if state in OVER:
        return replace(status, state=state)
    call_s = status.call_s + age_s if status.call else 0.0
    return replace(status, state=state, age_s=age_s, call_s=call_s, last_s=status.last_s + age_s)


def _state(status: Status, process: str, age_s: float) -> State:
    if status.state in OVER:
        return status.state
    if process == "ended":
        return "ended" if status.state == "closed" else "died"
    if process == "stopped":
        return "stopped"
    if age_s > SILENT_S:
        return "silent"
    if status.state != "training" or status.call:
        return "in a call" if status.state == "training" else status.state
    return "training" if status.last or status.step else "starting"
