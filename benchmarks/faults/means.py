"""How a process is harmed other than by SIGKILL and SIGSTOP, from outside or by itself.

GIL           a call of C that keeps Python's lock: no other thread of the process runs; SIGUSR2 starts it
out of memory the kernel kills the process, in a memory cgroup that has no room; without one, SIGKILL does
descriptors   a limit: the process can open no more files and connections
full memory   /dev/shm of the whole trial is full
full disk     the file system of the checkpoints is full, but for a part of one; free disk ends it
clock         the clock of the whole trial is set, by a library that the dynamic linker loads first
link          of a host; see `hosts`
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

from .leftovers import FILLER, TrialFolder

Means = Literal[
    "signal", "GIL", "out of memory", "descriptors", "full memory", "full disk", "free disk", "clock", "link"
]

HARMLESS: frozenset[Means] = frozenset({"descriptors", "full memory", "full disk", "free disk", "clock"})
"""Those of which no process may die."""

GIL_S = "FAULTS_GIL_S"
"""The environment variable with the seconds for which a process keeps the GIL."""

GROUPS = Path("/sys/fs/cgroup/memory")
"""Version 1 of the memory cgroups."""

CLOCK_VARIABLE = "FAULTS_CLOCK"
"""The environment variable with the path of the file that shifts the clock."""

_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const long long *shift;

__attribute__((constructor)) static void open_shift(void) {
  const char *path = getenv("FAULTS_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *found = mmap(0, sizeof *shift, PROT_READ, MAP_SHARED, file, 0);
  if (found != MAP_FAILED) shift = found;
  close(file);
}

int clock_gettime(clockid_t id, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(id, now);
  if (!result && shift && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *shift;
  return result;
}

int gettimeofday(struct timeval *now, void *zone) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  now->tv_sec = t.tv_sec;
  now->tv_usec = t.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  if (out) *out = t.tv_sec;
  return t.tv_sec;
}
"""


def keep_gil(seconds: float) -> None:
    """Keep the GIL: no other Python code of this process runs meanwhile, and signals do not end it."""
    calls = ctypes.PyDLL(None)  # its calls do not release the GIL
    end_s, end_ns = divmod(time.time_ns() + int(seconds * 1e9), 10**9)
    mutex, end = ctypes.create_string_buffer(64), (ctypes.c_long * 2)(end_s, end_ns)
    calls.pthread_mutex_lock(mutex)
    calls.pthread_mutex_timedlock(mutex, end)  # locked already, so this waits until the end


def obey() -> None:
    """Let this process keep the GIL when it gets SIGUSR2, if the trial wants that."""
    seconds = float(os.environ.get(GIL_S, 0))
    if seconds:
        signal.signal(signal.SIGUSR2, lambda *_: keep_gil(seconds))


def harm(means: Means, pid: int, number: int, amount: float, folder: TrialFolder) -> None:
    """Harm a process, or what it shares with all others of its trial.

    Args:
        means: How.
        pid: The process.
        number: The signal, if the means are one.
        amount: By how many seconds the clock is set; how many bytes of a full disk stay free.
        folder: The folder of the trial.

    Raises:
        ProcessLookupError: The process has ended.
    """
    if means == "full memory":
        fill(folder.memory)
    elif means == "full disk":
        fill(folder.disk, room=int(amount))
    elif means == "free disk":
        (folder.disk / FILLER).unlink()
    elif means == "clock":
        set_clock(folder.path, int(amount))
    elif means == "descriptors":
        used = _descriptors_of(pid)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, used))
    elif means == "out of memory":
        _leave_no_memory(pid)
    else:
        os.kill(pid, signal.SIGUSR2 if means == "GIL" else number)


def _descriptors_of(pid: int) -> int:
    try:
        return 1 + max(map(int, os.listdir(f"/proc/{pid}/fd")))
    except (OSError, ValueError):
        raise ProcessLookupError(pid) from None


def _leave_no_memory(pid: int) -> None:
    group = GROUPS / f"faults-{os.getpid()}"
    try:
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text("65536")
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        os.kill(pid, signal.SIGKILL)


def forget_groups() -> None:
    """Remove the cgroup of this program, if it has one and nobody is left in it."""
    with contextlib.suppress(OSError):
        (GROUPS / f"faults-{os.getpid()}").rmdir()


def fill(folder: Path, room: int = 0) -> None:
    """Use up the room of a file system, but for so many bytes."""
    with open(folder / FILLER, "ab", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
        file.truncate(max(0, file.tell() - room))


def make_clock(folder: Path) -> dict[str, str]:
    """Prepare a clock in this folder that can be set; the environment variables of the processes that use it.

    Raises:
        RuntimeError: There is no C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("a trial that sets the clock needs a C compiler: there is neither cc nor gcc")
    source, library, shift = folder / "clock.c", folder / "clock.so", folder / "clock"
    source.write_text(_CLOCK)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    shift.write_bytes(struct.pack("q", 0))
    return {"LD_PRELOAD": str(library), CLOCK_VARIABLE: str(shift)}


def set_clock(folder: Path, seconds: int) -> None:
    """Set the clock of `make_clock` to so many seconds after, or before, that of the machine."""
    with open(folder / "clock", "r+b") as file, mmap.mmap(file.fileno(), 8) as shift:
        shift[:8] = seconds.to_bytes(8, sys.byteorder, signed=True)
