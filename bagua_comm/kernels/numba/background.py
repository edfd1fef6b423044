"""Compile kernels in a separate process, while the training uses NumPy's.

A compiler in a training process would hold the GIL for seconds, also on a thread. So one process on each host
compiles (see `compiler_process`), which a lease chooses (see `cache.Lease`). It runs at the lowest priority and
pauses while all cores are busy, because even then it delays the wake-up of training threads.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...system.processes import processor_ticks
from .cache import Lease, UnavailableError, load, read_verdict, verdict_path
from .signatures import Function

_log = logging.getLogger(__name__)

_POLL_S = 0.25
"""The interval at which waiting processes look for the kernels."""

_WORK_S, _LOOK_S = 0.01, 0.2
"""While all cores are busy: the seconds that the compiler runs between pauses, and between looks at the load."""

_IDLE_CORES = 1.5
"""Idle cores needed to run without pauses: one for the compiler, half of one for threads that wake up."""

_FOREIGN = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_", "SLURM_", "TORCHELASTIC_", "BAGUA_")
"""Prefixes of the environment variables by which launchers know the processes of a job."""


_DIE_WITH_PARENT = "import ctypes, os; getattr(ctypes.CDLL(None), 'prctl', lambda *_: 0)(1, 9); os.setsid()"
"""Code that has Linux kill the process when the thread that started it ends: PR_SET_PDEATHSIG, SIGKILL.

Only then it makes the process group that is stopped during pauses: a process that is stopped before would stay
stopped for ever if its parent died.
"""

_MAIN = f"from {__package__.removesuffix('.numba')}.compiler_process import main"


class Starter(Protocol):
    """Starts a process for a step, such as `start`."""

    def __call__(self, step: str, folder: Path, lease: Lease, *, urgent: bool) -> subprocess.Popen[bytes]:
        """See `start`."""


@dataclass(frozen=True)
class Pacing:
    """How long the compiler runs while all cores are busy.

    On two busy cores a training of two ranks lost about a hundredth of its speed, and about a tenth beside a
    compiler that only had the lowest priority.

    Args:
        first: The share of the time that it runs, at first.
        last: The share in the end.
        ramp_s: The seconds in between.

    >>> [Pacing().share(age_s) for age_s in (0, 10, 60)]
    [0.01, 0.03, 0.05]
    """

    first: float = 0.01
    last: float = 0.05
    ramp_s: float = 20.0

    def share(self, age_s: float) -> float:
        """The share of the time that it runs, some seconds after its start."""
        return self.first + (self.last - self.first) * min(1.0, age_s / self.ramp_s)


class ProcessorLoad:
    """The load of this machine's processors.

    Args:
        ticks: Returns the times that all processors have spent in each mode; by default Linux' counters.
        cores: The number of processors.
    """

    def __init__(
        self, ticks: Callable[[], Sequence[int]] = processor_ticks, cores: int = os.cpu_count() or 1
    ) -> None:
        self._ticks, self._cores, self._before = ticks, cores, ticks()

    def is_full(self) -> bool:
        """Whether other processes have left less than `_IDLE_CORES` idle since the last call."""
        before, self._before = self._before, self._ticks()
        spent = [after - earlier for after, earlier in zip(self._before, before, strict=True)]
        if not sum(spent):
            return False
        _, nice, _, idle, *_ = spent  # the compiler's own time counts as nice
        return (nice + idle) * self._cores < _IDLE_CORES * sum(spent)


def last_words(what: str, code: int, output: bytes) -> str:
    """The exit code of a process and the last line of its output."""
    lines = output.decode(errors="replace").strip().splitlines()
    return f"{what} ended with {code}: {lines[-1] if lines else 'no message'}"


def start(step: str, folder: Path, lease: Lease, *, urgent: bool) -> subprocess.Popen[bytes]:
    """Start a process that runs `compiler_process.main`, outside of the job of this process."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    # With "error" it would end early: Python 3.12 warns of a `preexec_fn` beside threads.
    variables.pop("PYTHONWARNINGS", None)
    # A program may run in bagua_comm/kernels, where `import numba` would find the package beside this file.
    paths = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parents[1]]
    makes = step == "make"
    # The process that compares is stopped and resumed with the compiler, in its group.
    first = _DIE_WITH_PARENT if makes else "pass"
    code = f"import sys; sys.path[:] = {paths!r}; {first}; {_MAIN}; main(*sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, step, str(folder), lease.token, str(os.getpid()), *["urgent"][:urgent]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=variables,
        preexec_fn=None if makes else _dying_with_parent(),  # it may be stopped from its first moment
    )


def _dying_with_parent() -> Callable[[], object] | None:
    """A `preexec_fn` that has Linux kill the child when the thread that started it ends; None elsewhere."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    return None if prctl is None else functools.partial(prctl, 1, int(signal.SIGKILL))


class BackgroundCompiler:
    """A thread that loads the kernels once they are compiled, by its own process or by another one's.

    Args:
        folder: Their folder (see `cache_dir`).
        use: Called with the kernels, on the thread.
        urgent: Whether a caller waits for them, so that the compiler runs at normal priority without pauses.
        start: Starts the process that compiles them.
        pacing: How long it runs while all cores are busy.
        is_busy: Whether they were since the last call; by default `ProcessorLoad.is_full`.
    """

    def __init__(
        self,
        folder: Path,
        use: Callable[[dict[str, Function]], None],
        *,
        urgent: bool = False,
        start: Starter = start,
        pacing: Pacing = Pacing(),
        is_busy: Callable[[], bool] | None = None,
    ) -> None:
        self._folder, self._use, self._urgent, self._start = folder, use, urgent, start
        self._pacing, self._is_busy = pacing, is_busy
        self._pauses = not urgent
        self._stop, self._owner = threading.Event(), os.getpid()
        self.failure: str | None = None
        """Why this process will have no compiled kernels."""
        self.finished = threading.Event()
        """Set when the kernels are in use, or never will be."""
        self._thread = threading.Thread(target=self._work, name="bagua_comm kernels", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def is_of_this_process(self) -> bool:
        """Whether the thread runs in this process, which may be a fork of the one that started it."""
        return os.getpid() == self._owner

    def hurry(self) -> None:
        """Let the compiler run without pauses from now on."""
        self._pauses = False

    def end(self) -> None:
        """End the thread and the compiler that it started."""
        if self.is_of_this_process():  # a forked child has neither
            self._stop.set()
            self._thread.join()

    def _work(self) -> None:
        try:
            functions = self._obtain()
            if functions is not None:
                self._use(functions)
                _log.info("the kernels of NumPy's arrays are the compiled ones from now on")
        except Exception as exc:  # NumPy's kernels remain in use
            self.failure = str(exc) or type(exc).__name__
            _log.warning("the kernels of NumPy's arrays stay NumPy's: %s", exc)
        finally:
            self.finished.set()

    def _obtain(self) -> dict[str, Function] | None:
        """Wait for the kernels, and compile them if no other process does; None if `end` was called."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        lease = Lease(self._folder)
        while not self._stop.is_set():
            verdict, functions = read_verdict(self._folder), load(self._folder)
            if functions is not None:
                return functions
            if not lease.claim():
                self._stop.wait(_POLL_S)
                continue
            try:
                if read_verdict(self._folder) == verdict:  # no other process has compiled them since
                    self._compile(lease)
            finally:
                lease.drop()
        return None

    def _compile(self, lease: Lease) -> None:
        """Start the compiler, and wait until it has ended or `end` is called.

        Raises:
            UnavailableError: It ended without a verdict.
        """
        with contextlib.suppress(OSError):  # there is an old verdict if a file that it judged cannot be read
            verdict_path(self._folder).unlink()
        process = self._start("make", self._folder, lease, urgent=self._urgent)
        output, busy, is_busy = b"", False, self._is_busy or ProcessorLoad().is_full
        start_s = time.monotonic()
        while process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                output = process.communicate(timeout=_WORK_S if busy else _POLL_S)[0]
            if process.returncode is None and self._stop.is_set():
                process.kill()
            elif process.returncode is None and self._pauses:
                share = self._pacing.share(time.monotonic() - start_s)
                busy = self._pause(process, is_busy, _WORK_S / share - _WORK_S) if busy else is_busy()
        if read_verdict(self._folder) is None and not self._stop.is_set() and lease.is_held():
            raise UnavailableError(last_words("compiling them", process.returncode, output))

    def _pause(self, process: subprocess.Popen[bytes], is_busy: Callable[[], bool], seconds: float) -> bool:
        """Stop the compiler and its child for some seconds; return whether the cores are still busy.

        The pause ends early if they are not, or if a caller waits for the kernels.
        """
        busy = True
        with contextlib.suppress(OSError):  # it has just ended, or started: see _DIE_WITH_PARENT
            os.killpg(process.pid, signal.SIGSTOP)
            end_s = time.monotonic() + seconds
            while busy and self._pauses and (left_s := end_s - time.monotonic()) > 0:
                # Never so short that the processors' clocks do not tick.
                self._stop.wait(left_s if left_s < 2 * _LOOK_S else _LOOK_S)
                busy = not self._stop.is_set() and is_busy()
            os.killpg(process.pid, signal.SIGCONT)
        return busy
