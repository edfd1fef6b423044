"""The folder of snapshots of the processes of a torchrun agent, in the memory of the host.

Torchrun's agent survives when it ends its processes and restarts them. So the name of the folder identifies the
agent: its PID namespace (a container has one), its process id, and its start time. When the agent has ended, the
folder is stale, and the next job on this host removes it.
"""

from __future__ import annotations

import atexit
import re
import shutil
from contextlib import suppress
from pathlib import Path

from bagua_comm import BootstrapError
from bagua_comm.system.files import is_private, make_own_folder, shared_memory
from bagua_comm.system.processes import namespace_number, start_of, starter

PREFIX = "bagua_comm-torchrun-"
"""The prefix of the names of folders."""

_NAME = re.compile(re.escape(PREFIX) + r"(\d+)-(\d+)-(\d+)")


def agent() -> int:
    """The process id of torchrun's agent that started this process."""
    return starter("TORCHELASTIC_RUN_ID")


def provide() -> Path:
    """The folder of the agent that started this process. Removes stale folders.

    Raises:
        BootstrapError: It cannot be created, or belongs to another user.
    """
    memory = shared_memory()
    remove_stale(memory)
    folder = memory / f"{PREFIX}{namespace_number()}-{agent()}-{start_of(agent())}"
    try:
        is_private_folder = make_own_folder(folder)
    except OSError as exc:
        raise BootstrapError(f"elastic.run: the folder {folder} for snapshots cannot be made: {exc}") from exc
    if not is_private_folder:
        raise BootstrapError(f"elastic.run: the folder {folder} for snapshots belongs to another user; remove it")
    return folder


def remove_when_done(folder: Path, number: int) -> None:
    """Remove the folder when this process exits, unless it has left snapshots there for its replacement.

    Args:
        folder: The folder.
        number: The number of this process.
    """

    def remove() -> None:
        if not any(folder.glob(f"slot-{number}-*")):
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


def remove_stale(memory: Path) -> None:
    """Remove the folders of agents that have ended."""
    for folder in memory.glob(f"{PREFIX}*"):
        name = _NAME.fullmatch(folder.name)
        if name is None or int(name[1]) != namespace_number() or start_of(int(name[2])) == int(name[3]):
            continue
        with suppress(OSError):
            if is_private(folder.lstat()):
                shutil.rmtree(folder, ignore_errors=True)
