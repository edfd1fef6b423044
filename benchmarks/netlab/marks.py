"""Hides processes of one emulated host from the others, which share the kernel and all process ids.

The supervisor of `bagua run` finds the processes of its job by BAGUA_JOB in /proc/PID/environ, and ends those
that are left over. On real hosts it would not see those of a host that it cannot reach.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

SHOWN, HIDDEN = b"BAGUA_JOB=", b"HIDDENJOB="
"""The name of the variable, and another one of that length."""


def mark(process: int, *, hidden: bool) -> None:
    """Change the name of BAGUA_JOB in the memory that /proc/PID/environ shows; needs root.

    Python has copied its environment before, so the process itself does not see a change.
    """
    before, after = (SHOWN, HIDDEN) if hidden else (HIDDEN, SHOWN)
    proc = Path("/proc", str(process))
    with contextlib.suppress(OSError, IndexError, ValueError):
        begin = int((proc / "stat").read_text().rpartition(")")[2].split()[47])  # env_start
        position = (b"\0" + (proc / "environ").read_bytes()).index(b"\0" + before)
        with open(proc / "mem", "r+b", buffering=0) as memory:
            memory.seek(begin + position)
            memory.write(after)
