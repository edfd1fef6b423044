"""Where this process is: the fleet that it belongs to, and the folder where its copies lie."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .fleet import Fleet


class Here(NamedTuple):
    """The surroundings of this process."""

    fleet: Fleet
    folder: Path | None = None
    """Where copies lie that outlive the process; None for its own memory."""


def here() -> Here:
    """The fleet of the processes that were started with this one."""
    raise NotImplementedError
