"""Puts the stand-ins where `import cupy` finds them: in this process for a while, or in child processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import build, fake_cuda, fake_cupy, fake_cupyx, fake_nccl, machine

MODULES = {
    "cupy": fake_cupy,
    "cupy.cuda": fake_cuda,
    "cupy.cuda.nccl": fake_nccl,
    "cupy.cuda.runtime": fake_cuda.runtime,
    "cupyx": fake_cupyx,
}
OVER_CUPY = [
    f"bagua_comm.{name}"
    for name in ("kernels.device", "transports.nccl", "transports.nccl.transport", "transports.staged")
]
"""Modules that keep a reference to the CuPy with which they were imported."""

_AT_START = """import sys
from cuda_on_cpu.install import MODULES
sys.modules.update(MODULES)
"""


@contextlib.contextmanager
def installed(policy: str) -> Iterator[machine.Machine]:
    """In the body of `with`, CuPy is the stand-in, over a new `Machine`."""
    before, home = {name: sys.modules.get(name) for name in MODULES}, os.environ.get("HOME")
    sys.modules.update(MODULES)
    os.environ["HOME"] = str(build.folder())  # where compiled kernels are kept
    _forget(OVER_CUPY)
    machine.use(machine.Machine(policy))
    load, ctypes.CDLL = ctypes.CDLL, _load
    try:
        yield machine.running()
    finally:
        ctypes.CDLL = load
        _forget(OVER_CUPY)
        if home is None:
            del os.environ["HOME"]
        else:
            os.environ["HOME"] = home
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


_load_library = ctypes.CDLL


def _load(name: str | None, *args: Any, **kwargs: Any) -> Any:
    return fake_cuda._Driver if name == "libcuda.so.1" else _load_library(name, *args, **kwargs)


def environment(folder: Path) -> dict[str, str]:
    """Environment variables that give every new Python the stand-in, by way of a file in `folder`."""
    (folder / "sitecustomize.py").write_text(_AT_START)
    tests = Path(__file__).parents[1]
    path = [str(folder), str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
    home = str(build.folder())
    return {**os.environ, "HOME": home, build.FOLDER: home, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def _forget(names: list[str]) -> None:
    """Make the next import of these modules load them anew."""
    for name in names:
        for within in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
            del sys.modules[within]
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            vars(sys.modules[parent]).pop(child, None)
