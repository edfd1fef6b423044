"""The process that compiles kernels, and the one that compares them with NumPy's.

Code that crashes or gives wrong bytes does so in the second process, before any training uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

from ..arrays import dtype_named
from . import compiled, host
from .numba.background import last_words, start
from .numba.cache import (
    GOOD,
    UnavailableError,
    load_unchecked,
    object_path,
    read_object,
    write_object,
    write_verdict,
)
from .numba.signatures import KERNELS

NO_PARENT = 75
"""The exit code of a process whose parent has ended."""

_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}
"""Signals by which code ends its own process; any other comes from outside, as for want of memory."""


def main(step: str, folder: str, parent: str, urgent: str = "") -> None:
    """Compile the kernels that a folder lacks, or compare those in it with NumPy's.

    Args:
        step: "make" or "check".
        folder: The folder of the kernels.
        parent: The number of the process that started this one, which ends with it.
        urgent: Not empty to compile at normal priority.
    """
    _end_with_parent(int(parent))
    if not urgent:
        _lower_priority()
    if step == "make":
        _make(Path(folder), urgent=bool(urgent))
    else:
        _check(Path(folder))


def _end_with_parent(parent: int) -> None:
    """Have Linux kill this process when the thread that started it ends."""
    with contextlib.suppress(AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
    if os.getppid() != parent:
        sys.exit(NO_PARENT)


def _lower_priority() -> None:
    """Use processor time that no other process wants."""
    os.nice(19)
    with contextlib.suppress(AttributeError, OSError):  # only Linux has the following
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        # Linux may first divide the processors among sessions; this process is the only one of its session.
        Path("/proc/self/autogroup").write_text("19")


def _make(folder: Path, *, urgent: bool) -> None:
    try:
        # These import Numba, and register their kernels in codegen.
        from .numba import casts, checksums, elementwise, fixed_point, int4, minmax, sums, top_k  # noqa: F401
        from .numba.codegen import object_code

        for name in KERNELS:
            if read_object(object_path(folder, name)) is None:
                write_object(object_path(folder, name), object_code(name))
    except (OSError, MemoryError):
        raise  # the next attempt may find room
    except Exception as exc:
        write_verdict(folder, f"compiling them raised {type(exc).__name__}: {exc}")
        return
    process = start("check", folder, urgent=urgent)
    output = process.communicate()[0]
    verdict = verdict_of(process.returncode, output)
    if verdict is None:
        sys.exit(last_words("comparing them", process.returncode, output))
    write_verdict(folder, verdict)


def verdict_of(code: int, output: bytes) -> str | None:
    """The verdict on kernels from the exit code and the output of the process that compared them.

    None if it was ended from outside, which says nothing about the kernels.
    """
    if code == NO_PARENT or (code < 0 and -code not in _CRASHES):
        return None
    return last_words("comparing them", code, output) if code else GOOD


def _check(folder: Path) -> None:
    """Raise unless the kernels of a folder, used in a process without Numba, give NumPy's bytes."""
    functions = load_unchecked(folder)
    if functions is None:
        raise UnavailableError("some cannot be read")
    compiled.install(functions)
    for dtype in compiled.DTYPES:
        if _results_of(host, dtype) != _results_of(compiled, dtype):
            raise UnavailableError(f"they differ from NumPy's in arrays of {dtype}")


def _results_of(run: ModuleType, dtype: str) -> list[bytes]:
    """The output bytes of all kernels for some random numbers."""
    element, wire16, count = dtype_named(dtype), np.dtype(np.float16), 3000
    x = np.random.default_rng(0).standard_normal((3, count), np.float32).astype(element)
    layout = {"start": 48 * element.itemsize, "block": 128, "eps": 1e-7}
    coded, cast = np.zeros((3, 48 * element.itemsize + count), np.uint8), np.zeros((3, 2 * count), np.uint8)
    outs = [np.zeros_like(x) for _ in range(5)]
    totals = [np.zeros_like(coded[:1]), np.zeros_like(cast[:1])]
    run.minmax_encode(x, coded, **layout)
    run.minmax_decode(coded, outs[0], **layout)
    run.minmax_combine(coded, totals[0], count, element, op="avg", **layout)
    run.cast_encode(x, cast, wire16)
    run.cast_decode(cast, outs[1], wire16)
    run.cast_combine(cast, totals[1], count, element, wire16, "avg")
    run.reduce_rows(x, outs[2][0], "sum")
    run.loss(x[0], x[1], 3, outs[4][0])
    run.decayed_loss(x[1], x[2], 0.8, outs[4][0])
    bounds, fields, total = np.array([0, 100, count]), np.zeros(2, np.uint8), np.zeros(count, np.int32)
    run.fixed_exponents(x[0], bounds, fields)
    run.fixed_add(x[0], bounds, fields, 24, total, first=True)
    run.fixed_mean(total, bounds, fields, 24, 3, outs[3][0])
    four = {"start": 192, "block": 32, "rotate": 32}
    packed, decoded, mean = np.zeros((3, 192 + 1504), np.uint8), np.zeros_like(x), np.zeros((1, 1696), np.uint8)
    for draws in (None, host.Draws(2**40 + 1, 7)):
        run.int4_encode(x, packed, **four, draws=draws)
        run.int4_decode(packed, decoded, **four)
        run.int4_combine(packed, mean, count, element, **four, op="avg", draws=draws)
        outs += [packed.copy(), decoded.copy(), mean.copy()]
    sparse = np.zeros_like(x)
    for bits in (2, 16, 32):
        wires = np.zeros((3, host.top_k_layout(count, 1024, 32, bits).nbytes), np.uint8)
        for row, wire in zip(x, wires, strict=True):
            run.top_k_encode(row, wire, 1024, 32, bits)
        run.top_k_sum(wires, sparse[0], 1024, 32, bits, "avg")
        sparse[1] = x[1]
        run.top_k_subtract(sparse[1], wires[1], 1024, 32, bits)
        outs += [wires, sparse.copy()]
    words, weights, sums = coded[0].view(np.uint64), np.arange(128, dtype=np.uint64).reshape(2, 64), np.zeros(64)
    run.checksum_blocks(words, weights, sums.view(np.uint64))
    return [array.tobytes() for array in (coded, cast, *totals, *outs, fields, total, sums)]
