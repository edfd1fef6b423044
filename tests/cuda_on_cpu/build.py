"""Kernels that a C++ compiler builds and the CPU runs, in place of NVRTC and a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

HEADER, GRID = (Path(__file__).with_name(name) for name in ("cuda_on_cpu.h", "grid.cpp"))
COMPILER = "g++"
FOLDER = "CUDA_ON_CPU_FOLDER"
"""The environment variable that names the folder of this run."""

KERNELS = "CUDA_ON_CPU_KERNELS"
"""The environment variable that names the folder of compiled kernels, which later runs use, too."""

KEPT_S = 30 * 24 * 3600
"""How long a compiled kernel is kept."""

FLAGS = ("-std=c++17", "-Og", "-fPIC", "-ffp-contract=off", "-fwrapv", "-w", "-fno-gnu-unique")
"""Without symbols that are unique in a process: shared memory in a template would be that of all compilations."""

LINK = ("-shared", "-Wl,-Bsymbolic")

_one_at_a_time = threading.Lock()  # the header keeps a grid's state in globals
_compiling = threading.Lock()  # of two threads with the same source, the second finds it compiled


class Kernels:
    """The kernels of one compilation: `source` for CUDA, with the -D options in `options`."""

    def __init__(self, source: str, options: Sequence[str] = ()) -> None:
        with _compiling:
            self._library = ctypes.CDLL(str(_compiled(source, tuple(o for o in options if o.startswith("-D")))))

    def arguments_at(self, name: str, pointers: int) -> list[np.void]:
        """Copies of the arguments of a kernel, of which there is a table of pointers at this address."""
        wanted, size_of = (getattr(self._library, f"{name}_{what}") for what in ("arguments", "size"))
        size_of.argtypes, size_of.restype = [ctypes.c_size_t], ctypes.c_size_t
        table = (ctypes.c_void_p * wanted()).from_address(pointers)
        return [np.void(ctypes.string_at(at, size_of(i))) for i, at in enumerate(table)]

    def launch(
        self, name: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], order: str = "forward"
    ) -> None:
        """Run a kernel over a grid, its threads in the given order.

        An argument is an int (64 bits, also for addresses), a float (64 bits) or a NumPy scalar.

        Raises:
            RuntimeError: The kernel did something that would hang or fault on a GPU.
        """
        wanted = getattr(self._library, f"{name}_arguments")()
        assert wanted == len(args), f"{name} takes {wanted} arguments, got {len(args)}"
        values = [_value(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        run = getattr(self._library, f"{name}_grid")
        run.restype = ctypes.c_char_p
        with _one_at_a_time:
            problem = run(_dim3(grid), _dim3(block), pointers, ctypes.c_bool(order == "backward"))
        if problem is not None:
            raise RuntimeError(f"{name}: {problem.decode()}")


@functools.cache
def _compiled(source: str, defines: tuple[str, ...]) -> Path:
    library = _place(f"{defines}{source}", ".so")
    if not library.exists():
        compiler = [COMPILER, *FLAGS, *defines, "-x", "c++", "-"]
        plain = _run([*compiler, "-D__global__=", "-D__launch_bounds__(...)=", "-E"], source)
        kernels = re.findall(r'extern "C" void\s+(\w+)', plain)
        code = source + "".join(f"\nLAUNCHER({name})" for name in kernels) + "\n"
        complete = library.with_suffix(f".{os.getpid()}")
        header, grid = precompiled()
        linked = ["-x", "none", str(grid)]
        _run([*compiler, *LINK, "-include", str(header), *linked, "-o", str(complete)], code)
        complete.replace(library)  # atomically: other processes may be looking
    return library


@functools.cache
def _compiler() -> str:
    """The compiler and its version, the machine and the C library."""
    version = _run([COMPILER, "-dumpfullversion", "-dumpmachine"], "")
    return f"{version}{platform.machine()}{platform.libc_ver()}"


def keep_in(kernels: Path) -> None:
    """Keep compiled kernels in a folder, where later runs find them; old ones are removed.

    Raises:
        OSError: No file can be written there.
    """
    tempfile.TemporaryFile(dir=kernels).close()
    for library in kernels.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another run has removed it
            if library.stat().st_mtime < time.time() - KEPT_S:
                library.unlink()
    os.environ[KERNELS] = str(kernels)


@functools.cache
def precompiled() -> tuple[Path, Path]:
    """A copy of the header, beside which the compiler finds what it once made of it; and the compiled grid."""
    header, grid = _place("", ".h"), _place("", ".o")
    parts, made = header.with_suffix(f".{os.getpid()}"), header.with_suffix(".h.gch")
    if not (made.exists() and grid.exists()):
        parts.write_bytes(HEADER.read_bytes())
        parts.replace(header)  # atomically: other processes may be looking
        for source, language, what in ((header, "c++-header", made), (GRID, "c++", grid)):
            _run([COMPILER, *FLAGS, "-x", language, "-c", "-o", str(parts), str(source)], "")
            parts.replace(what)
    return header, grid


def _place(what: str, suffix: str) -> Path:
    """The file of what is made by this compiler with the header."""
    sources = HEADER.read_text() + GRID.read_text()
    key = hashlib.sha256(f"{_compiler()}{sources}{FLAGS}{what}".encode()).hexdigest()[:20]
    return Path(os.environ.get(KERNELS) or folder()) / f"{key}{suffix}"


def _run(command: list[str], code: str) -> str:
    result = subprocess.run(command, input=code, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def folder() -> Path:
    """A folder that is kept as long as the process lives; children find it through `FOLDER`."""
    return Path(os.environ.get(FOLDER) or _temporary().name)


def _value(arg: Any) -> Any:
    if isinstance(arg, np.generic):
        return (ctypes.c_char * arg.nbytes).from_buffer_copy(arg.tobytes())
    return ctypes.c_double(arg) if isinstance(arg, float) else ctypes.c_longlong(arg)


def _dim3(extent: Sequence[int]) -> Any:
    return (ctypes.c_uint * 3)(*extent, *[1] * (3 - len(extent)))
