"""The arithmetic of codecs, reductions and optimizers: in NumPy, compiled by Numba, and in CUDA.

`host` (NumPy) is the specification. `compiled` (Numba, from `numba`) and `device` (CuPy, from .cu files) give
the same bytes. The kernels of `compiled` are made once on each machine, in the background.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Literal, TypeAlias

import numpy as np

from ..arrays import UFUNCS, Array, DType
from . import compiled, host
from .numba.cache import numba_is_installed, state
from .selection import HostKernels

_of_this_process = HostKernels()


def of(x: Array) -> ModuleType:
    """The module of kernels for the memory of `x`: a host or a CUDA device."""
    if isinstance(x, np.ndarray):
        return on_host()
    return importlib.import_module(_DEVICE)


def only_launches(step: object) -> bool:
    """Whether a step of a codec launches kernels of a device and does nothing else."""
    if not isinstance(step, functools.partial):
        return False
    module: str = getattr(step.func, "__module__", "")
    return module.startswith(f"{_DEVICE}.")


_DEVICE = f"{__name__}.device"
"""The package of kernels for CuPy arrays, which imports CuPy."""


def on_host() -> ModuleType:
    """The module of kernels for NumPy arrays: the choice of `use`, else the fastest one available.

    If none have been compiled on this machine yet, the first call starts that in the background, and NumPy's are
    used until they are ready. The bytes are the same.
    """
    return _chosen.get() or _of_this_process.fastest or _of_this_process.load_or_compile()


def compile_now(timeout_s: float = 600.0) -> None:
    """Wait until the compiled kernels of NumPy arrays are in use, for tests and measurements.

    If this is their first use in this process, and no other process compiles them, they are compiled at normal
    priority.

    Args:
        timeout_s: The longest wait, in seconds.

    Raises:
        ImportError: Numba is not installed.
        RuntimeError: They cannot be compiled, loaded or kept; the message gives the reason.
        TimeoutError: They were not ready in time.
    """
    _of_this_process.compile_now(timeout_s)


@contextlib.contextmanager
def use(name: Literal["host", "compiled"] | object) -> Iterator[None]:
    """Choose the kernels of NumPy arrays in the body of `with`, to compare the two or to exclude one.

    An object that has functions of these names takes their place; see `planning.simulator`. The choice holds in
    this thread and context (see `contextvars`); threads started in the body do not inherit it.

    Raises:
        ImportError: `name` is "compiled", and Numba is not installed.
        RuntimeError: The compiled kernels cannot be compiled, loaded or kept.

    >>> with use("host"):
    ...     of(np.zeros(1)) is host
    True
    """
    if name == "compiled":
        compile_now()
    chosen: Any = {"host": host, "compiled": compiled}.get(name, name) if isinstance(name, str) else name
    token = _chosen.set(chosen)
    try:
        yield
    finally:
        _chosen.reset(token)


_chosen: ContextVar[ModuleType | None] = ContextVar("kernels of NumPy arrays", default=None)


Reducer: TypeAlias = Callable[[Sequence[Array], Array], None]
"""Reduces a row of (m,) from each rank to another array of (m,)."""


def reducer(dtype: DType, op: str, count: int) -> Reducer:
    """`reduce_rows` prepared for many calls with `count` host arrays of one dtype, two at least.

    To add small arrays takes less time than to choose the function. One thread at a time may use a reducer.
    """
    if not host.is_plain(dtype, op):
        return lambda rows, out: on_host().reduce_rows(rows, out, op)
    run, ufunc = host.silent_context().run, UFUNCS[op]

    def reduce(rows: Sequence[Array], out: Array) -> None:
        run(ufunc, rows[0], rows[1], out)
        for row in rows[2:]:
            run(ufunc, out, row, out)

    def choose(rows: Sequence[Array], out: Array) -> None:
        run(ufunc, rows[0], rows[1], out=out)  # np.minimum and np.maximum want it by name, which takes longer
        for row in rows[2:]:
            run(ufunc, out, row, out=out)

    def average(rows: Sequence[Array], out: Array) -> None:
        reduce(rows, out)
        run(np.divide, out, divisor, out)

    if op != "avg":
        return choose if op in ("min", "max") else reduce
    divisor = dtype.type(count)
    return average


__all__ = [
    "compile_now",
    "host",
    "numba_is_installed",
    "of",
    "on_host",
    "only_launches",
    "reducer",
    "state",
    "use",
]
