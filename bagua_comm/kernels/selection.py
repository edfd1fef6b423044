"""Which kernels the NumPy arrays of a process use: NumPy's, until compiled ones are ready."""

from __future__ import annotations

import logging
import os
import threading
from types import ModuleType

from . import compiled, host
from .numba.background import BackgroundCompiler, Starter, start
from .numba.cache import UnavailableError, cache_dir, load, numba_is_installed
from .numba.signatures import Function

_log = logging.getLogger(__package__)


class HostKernels:
    """The kernels of NumPy arrays of a process.

    Args:
        start: Starts the process that compiles them, if no process has done so on this machine.
    """

    def __init__(self, start: Starter = start) -> None:
        self._start = start
        self.fastest: ModuleType | None = None
        """The fastest module available; None before the first use."""
        self._compiler: BackgroundCompiler | None = None
        self._failure = ""  # why no compiler was started
        self._renew_lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        """Make the lock, after a fork anew: a thread of the parent may have held it."""
        self._lock = threading.Lock()

    def load_or_compile(self, *, urgent: bool = False) -> ModuleType:
        """Load the compiled kernels from disk, or start their compilation and return NumPy's.

        Args:
            urgent: Whether a caller waits for them; see `BackgroundCompiler`.
        """
        with self._lock:
            if self.fastest is not None:
                return self.fastest
            try:
                folder = cache_dir()
                functions = load(folder)
            except UnavailableError as exc:
                self.fastest, self._failure = host, str(exc)
                if numba_is_installed():
                    _log.warning("the kernels of NumPy's arrays are NumPy's: %s", exc)
                return self.fastest
            self.fastest = host
            if functions is not None:
                self._install(functions)
            else:
                self._compiler = BackgroundCompiler(folder, self._install, urgent=urgent, start=self._start)
            return self.fastest

    def compile_now(self, timeout_s: float) -> None:
        """Wait until the compiled kernels are in use; see `kernels.compile_now`."""
        self.load_or_compile(urgent=True)
        if self.fastest is compiled:
            return
        if self._compiler is not None and not self._compiler.is_of_this_process():
            self._compiler = BackgroundCompiler(cache_dir(), self._install, urgent=True, start=self._start)
        if not numba_is_installed():
            raise ImportError("Numba is not installed: pip install 'bagua-comm[fast]'")
        if self._compiler is not None and not self._compiler.finished.wait(timeout_s):
            raise TimeoutError(f"the kernels were not compiled within {timeout_s} s")
        if self.fastest is not compiled:
            reason = self._failure or (self._compiler and self._compiler.failure)
            raise RuntimeError(f"there are no compiled kernels: {reason}")

    def end(self) -> None:
        """Stop waiting for compiled kernels, and end the compiler if this process has started one."""
        if self._compiler is not None:
            self._compiler.end()

    def _install(self, functions: dict[str, Function]) -> None:
        compiled.install(functions)
        self.fastest = compiled
