"""Runs a command, and ends all processes that it has started.

To use it: `python benchmarks/gpu/keeper.py SECONDS STARTER COMMAND...`, which imports nothing but the standard
library.

When the command has ended, when this process gets SIGTERM, or when its parent, the process STARTER, is gone, all
processes that the command has started and that still live get SIGTERM, and after SECONDS they get SIGKILL. This
includes processes with a session of their own, and processes that have lost their parent. The exit code is the
command's; it is 128 + n if signal n has ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
_KILL_S = 3.0
"""Seconds to wait after SIGKILL: the driver of a GPU may delay the end of a process."""


def descendants(process: int) -> set[int]:
    """The processes that a process has started, directly or not, and that have not ended."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found: set[int] = set()
    new = [process]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        found.update(new)
    return found


def end_descendants(grace_s: float) -> None:
    """End all processes that this one has started, and those that they start meanwhile."""
    for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_S)):
        signalled: set[int] = set()
        deadline = time.monotonic() + limit_s
        while (living := descendants(os.getpid())) and time.monotonic() < deadline:
            for process in living - signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
            signalled |= living
            time.sleep(0.01)


def leave(number: int, frame: FrameType | None) -> None:
    """A handler of signals that lets `finally` run."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main() -> int:
    """Run the command."""
    grace_s, starter, command = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    signal.signal(signal.SIGTERM, leave)
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1)  # children that lose their parent become ours
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != starter:
        return 128 + signal.SIGTERM
    try:
        code = subprocess.Popen(command).wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_descendants(grace_s)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
