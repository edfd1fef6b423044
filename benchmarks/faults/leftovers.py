"""Leftovers of a trial: processes, files in memory, temporary files.

Every process of a trial inherits an environment variable by which it is found. As root, a trial has its own
folder mounted at /dev/shm, whose files are left over; without root, files in /dev/shm are compared by name. A
port is open as long as a process holds it, so no process means no port.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from bagua_comm.live.status import live_folder
from bagua_comm.system.processes import started_with

MARK = "BENCHMARK_FAULTS_TRIAL"
"""The variable whose value names the trial."""

SHARED_MEMORY = Path("/dev/shm")
FILLER = "filler"
"""The file that a trial itself fills a file system with."""

GRACE_S = 3.0
"""Seconds that processes may take to end after their parent."""


class TrialFolder:
    """The folder of a trial, which is removed at the end.

    Args:
        name: The name of the trial, unique among those that run at the same time.
        memory_bytes: The size of its /dev/shm, which needs root; by default that of the machine.
        disk_bytes: The size of `disk`, a file system of its own, which needs root; by default it is a folder.
    """

    def __init__(self, name: str, memory_bytes: int | None = None, disk_bytes: int | None = None) -> None:
        self.name = f"{name}-{os.getpid()}"
        self.path = Path(tempfile.mkdtemp(prefix="faults-"))  # short: sockets lie in it
        self.temporary = self.path / "tmp"
        self.temporary.mkdir()
        self.own_memory = os.geteuid() == 0 and shutil.which("unshare") is not None
        self._before = set(os.listdir(SHARED_MEMORY))
        self.memory = SHARED_MEMORY
        if self.own_memory:
            self.memory = Path(tempfile.mkdtemp(prefix="faults-", dir=SHARED_MEMORY))
        self.disk = self.path / "disk"
        self.disk.mkdir()
        self._mounted: list[Path] = []
        for folder, size in ((self.memory, memory_bytes), (self.disk, disk_bytes)):
            if size is not None:
                mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "faults", str(folder)]
                subprocess.run(mount, check=True)
                self._mounted.append(folder)

    def __enter__(self) -> TrialFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for folder in self._mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)
        shutil.rmtree(self.path, ignore_errors=True)
        if self.memory != SHARED_MEMORY:
            shutil.rmtree(self.memory, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """The environment of the trial's processes."""
        kept = {  # a cache of PyTorch for later runs, and the flight records of failures
            "TORCHINDUCTOR_CACHE_DIR": str(self.path / "inductor"),
            "BAGUA_FLIGHT_FOLDER": str(self.path / "flights"),
        }
        return {**os.environ, **kept, MARK: self.name, "TMPDIR": str(self.temporary)}

    def inside(self, command: list[str]) -> list[str]:
        """The command that runs `command` with this folder."""
        if not self.own_memory:
            return command
        mount = f"mount --bind {shlex.quote(str(self.memory))} {SHARED_MEMORY} && exec {shlex.join(command)}"
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount]

    def processes(self) -> list[int]:
        """The ids of the trial's processes that are alive."""
        return list(started_with(MARK, self.name))

    def left(self) -> list[str]:
        """The leftovers after the trial, once processes had time to end."""
        end = time.monotonic() + GRACE_S
        while (pids := self.processes()) and time.monotonic() < end:
            time.sleep(0.05)
        found = [f"process {pid}: {_command_of(pid)}" for pid in pids]
        found += [f"{self.temporary.name}/{path.name}" for path in self.temporary.iterdir()]
        expected = {FILLER, live_folder().name} | (set() if self.own_memory else self._before)
        memory = set(os.listdir(self.memory)) - expected
        return found + [f"{SHARED_MEMORY}/{name}" for name in sorted(memory)]


def _command_of(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    except OSError:
        return "has ended meanwhile"
