"""Where the processes of a torchrun agent keep what their successors need, in the memory of the host.

Torchrun's agent lives on when it ends its processes and starts them again. So the name of the folder tells of
the agent: the namespace (a container has one) in which it has its number, that number, and when it was started.
When the agent is gone the folder is stale, and whoever comes next on this host removes it.
"""

from __future__ import annotations

import atexit
import re
import shutil
from contextlib import suppress
from pathlib import Path

from bagua_comm import BootstrapError
from bagua_comm.files import is_private, make_own_folder, shared_memory
from bagua_comm.processes import namespace_number, start_of, starter

PREFIX = "bagua_comm-torchrun-"
"""How the names of folders begin."""

_NAME = re.compile(re.escape(PREFIX) + r"(\d+)-(\d+)-(\d+)")


def agent() -> int:
    """The process of torchrun's agent that started this one."""
    return starter("TORCHELASTIC_RUN_ID")


def provide() -> Path:
    """The folder of the agent that started this process. Removes what agents have left that are gone.

    Raises:
        BootstrapError: It cannot be made, or belongs to somebody else.
    """
    memory = shared_memory()
    remove_stale(memory)
    folder = memory / f"{PREFIX}{namespace_number()}-{agent()}-{start_of(agent())}"
    try:
        is_mine = make_own_folder(folder)
    except OSError as exc:
        raise BootstrapError(f"elastic.run: the folder {folder} for copies cannot be made: {exc}") from exc
    if not is_mine:
        raise BootstrapError(f"elastic.run: the folder {folder} for copies belongs to somebody else; remove it")
    return folder


def remove_when_done(folder: Path, number: int) -> None:
    """Remove the folder when this process ends, unless it leaves its own copies there: then it wants a successor.

    Args:
        folder: The folder.
        number: That of this process.
    """

    def remove() -> None:
        if not any(folder.glob(f"slot-{number}-*")):
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


def remove_stale(memory: Path) -> None:
    """Remove the folders of agents that are gone."""
    for folder in memory.glob(f"{PREFIX}*"):
        name = _NAME.fullmatch(folder.name)
        if name is None or int(name[1]) != namespace_number() or start_of(int(name[2])) == int(name[3]):
            continue
        with suppress(OSError):
            if is_private(folder.lstat()):
                shutil.rmtree(folder, ignore_errors=True)
