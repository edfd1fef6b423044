"""The arithmetic of codecs and reductions, once for each kind of memory.

`host` (NumPy) is the specification: `compiled` (Numba, from `loops`) and `device` (CuPy, from the .cu files) give
the same bytes. `making` has the compiled ones made once for a machine, in the background.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Literal, TypeAlias

import numpy as np

from ..arrays import UFUNCS, Array, DType
from . import compiled, host, making
from .making import state

_log = logging.getLogger(__name__)


def of(x: Array) -> ModuleType:
    """The module whose kernels work where `x` lies."""
    return on_host() if isinstance(x, np.ndarray) else importlib.import_module(".device", __name__)


def on_host() -> ModuleType:
    """The module for NumPy arrays: the one that `use` has chosen, else the fastest that is ready.

    If nobody has compiled kernels on this machine yet, that begins now in the background, and all work is NumPy's
    until they are there. The bytes are the same.
    """
    return _chosen.get() or _ready or _begin()


def compile_now(timeout_s: float = 600.0) -> None:
    """Wait until the kernels of NumPy arrays are the compiled ones, as tests and measurements must.

    If this is the first use of them in this process, and no other process compiles them, that does not give way
    to other work.

    Args:
        timeout_s: How long to wait, in seconds.

    Raises:
        ImportError: Numba is not installed.
        RuntimeError: They cannot be compiled, loaded or kept; the message says why.
        TimeoutError: They were not there in time.
    """
    global _supply
    _begin(urgent=True)
    if _ready is compiled:
        return
    if _supply is not None and not _supply.is_here():
        _supply = making.Supply(making.place(), _take_over, urgent=True)
    if not making.is_installed():
        raise ImportError("Numba is not installed: pip install 'bagua-comm[fast]'")
    if _supply is not None:
        _supply.hurry()
        if not _supply.ended.wait(timeout_s):
            raise TimeoutError(f"the kernels were not compiled within {timeout_s} s")
    if _ready is not compiled:
        raise RuntimeError(f"there are no compiled kernels: {_obstacle or (_supply and _supply.obstacle)}")


@contextlib.contextmanager
def use(name: Literal["host", "compiled"]) -> Iterator[None]:
    """Choose the kernels of NumPy arrays in the body of `with`, to compare the two or to rule one out.

    The choice holds in this thread and context (see `contextvars`); threads that start in the body do not
    inherit it.

    Raises:
        ImportError: `name` is "compiled", and Numba is not installed.
        RuntimeError: They cannot be compiled, loaded or kept.

    >>> with use("host"):
    ...     of(np.zeros(1)) is host
    True
    """
    if name == "compiled":
        compile_now()
    token = _chosen.set(host if name == "host" else compiled)
    try:
        yield
    finally:
        _chosen.reset(token)


_chosen: ContextVar[ModuleType | None] = ContextVar("kernels of NumPy arrays", default=None)


Reducer: TypeAlias = Callable[[Sequence[Array], Array], None]
"""Reduces the rows of as many ranks as there are, (m,) each, to an array, (m,), that is none of them."""


def reducer(dtype: DType, op: str, count: int) -> Reducer:
    """`reduce_rows` of `count` host arrays of one dtype, two at least, worked out for many calls.

    Small arrays take less time to add than to find out how. Like a `Scratch` it belongs to one thread at a time.
    """
    if not host.is_plain(dtype, op):
        return lambda rows, out: on_host().reduce_rows(rows, out, op)
    run, ufunc = host.silent_context().run, UFUNCS[op]
    # Few of NumPy's functions want `out` by name, which takes longer.
    combine = functools.partial(_by_name, ufunc) if op in ("min", "max") else ufunc

    def reduce(rows: Sequence[Array], out: Array) -> None:
        run(combine, rows[0], rows[1], out)
        for row in rows[2:]:
            run(combine, out, row, out)

    def average(rows: Sequence[Array], out: Array) -> None:
        reduce(rows, out)
        run(np.divide, out, divisor, out)

    if op != "avg":
        return reduce
    divisor = dtype.type(count)
    return average


def _by_name(ufunc: np.ufunc, x: Array, y: Array, out: Array) -> None:
    ufunc(x, y, out=out)


_ready: ModuleType | None = None
"""The fastest module that is ready; None before anybody has asked."""

_supply: making.Supply | None = None
_obstacle = ""
"""Why there is no supply of compiled kernels."""

_beginning = threading.Lock()


def _begin_anew() -> None:
    """After a fork: a thread that is not in the child may have held the lock."""
    global _beginning
    _beginning = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def _begin(*, urgent: bool = False) -> ModuleType:
    """Load the compiled kernels if they are on disk; else have them made, and use those of NumPy."""
    global _ready, _supply, _obstacle
    with _beginning:
        if _ready is not None:
            return _ready
        try:
            folder = making.place()
            functions = making.load(folder)
        except making.UnavailableError as exc:
            _ready, _obstacle = host, str(exc)
            if making.is_installed():
                _log.warning("the kernels of NumPy's arrays are NumPy's: %s", exc)
            return _ready
        _ready = host
        if functions is not None:
            _take_over(functions)
        else:
            _supply = making.Supply(folder, _take_over, urgent=urgent)
        return _ready


def _take_over(functions: dict[str, making.Function]) -> None:
    global _ready
    compiled.take(functions)
    _ready = compiled


__all__ = ["compile_now", "host", "of", "on_host", "reducer", "state", "use"]
