"""Compile kernels in a separate process, while the training uses NumPy's.

A compiler in a training process would hold the GIL for seconds, also on a thread. So one process on each machine
compiles (see `compiler_process`), at the lowest priority; a lock chooses which (see `cache.locked`).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from .cache import UnavailableError, load, locked, read_verdict, verdict_path
from .signatures import Function

_log = logging.getLogger(__name__)

_POLL_S = 0.25
"""The interval at which waiting processes look for the kernels."""

_FOREIGN = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_", "SLURM_", "TORCHELASTIC_", "BAGUA_")
"""Prefixes of the environment variables by which launchers know the processes of a job."""

_MAIN = f"from {__package__.removesuffix('.numba')}.compiler_process import main"


class Starter(Protocol):
    """Starts a process for a step, such as `start`."""

    def __call__(self, step: str, folder: Path, *, urgent: bool) -> subprocess.Popen[bytes]:
        """See `start`."""


def last_words(what: str, code: int, output: bytes) -> str:
    """The exit code of a process and the last line of its output."""
    lines = output.decode(errors="replace").strip().splitlines()
    return f"{what} ended with {code}: {lines[-1] if lines else 'no message'}"


def start(step: str, folder: Path, *, urgent: bool) -> subprocess.Popen[bytes]:
    """Start a process that runs `compiler_process.main`, outside of the job of this process."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    # A program may run in bagua_comm/kernels, where `import numba` would find the package beside this file.
    paths = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parents[1]]
    code = f"import sys; sys.path[:] = {paths!r}; {_MAIN}; main(*sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, step, str(folder), str(os.getpid()), *["urgent"][:urgent]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=variables,
        start_new_session=True,
    )


class BackgroundCompiler:
    """A thread that loads the kernels once they are compiled, by its own process or by another one's.

    Args:
        folder: Their folder (see `cache_dir`).
        use: Called with the kernels, on the thread.
        urgent: Whether a caller waits for them, so that the compiler runs at normal priority.
        start: Starts the process that compiles them.
    """

    def __init__(
        self,
        folder: Path,
        use: Callable[[dict[str, Function]], None],
        *,
        urgent: bool = False,
        start: Starter = start,
    ) -> None:
        self._folder, self._use, self._urgent, self._start = folder, use, urgent, start
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
        while not self._stop.is_set():
            verdict, functions = read_verdict(self._folder), load(self._folder)
            if functions is not None:
                return functions
            with locked(self._folder) as is_mine:
                if is_mine and read_verdict(self._folder) == verdict:  # no other process has compiled them since
                    self._compile()
            if not is_mine:
                self._stop.wait(_POLL_S)
        return None

    def _compile(self) -> None:
        """Start the compiler, and wait until it has ended or `end` is called.

        Raises:
            UnavailableError: It ended without a verdict.
        """
        with contextlib.suppress(OSError):  # there is an old verdict if a file that it judged cannot be read
            verdict_path(self._folder).unlink()
        process, output = self._start("make", self._folder, urgent=self._urgent), b""
        while process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                output = process.communicate(timeout=_POLL_S)[0]
            if process.returncode is None and self._stop.is_set():
                process.kill()
        if read_verdict(self._folder) is None and not self._stop.is_set():
            raise UnavailableError(last_words("compiling them", process.returncode, output))
