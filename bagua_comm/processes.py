"""What Linux tells about another process on this host."""

from __future__ import annotations

import os
from pathlib import Path


def state_of(process: int) -> str:
    """Whether a process is "running", "stopped" (by a signal, a debugger) or has "ended"; "" if that is unknown.

    >>> state_of(os.getpid()) in ("running", "")
    True
    """
    if not os.path.isdir("/proc/self"):
        return ""
    try:
        letter = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "ended"
    return {"T": "stopped", "t": "stopped", "Z": "ended", "X": "ended"}.get(letter, "running")
