"""Compiled kernels on disk: object files, the verdict on them, and the lock of the process that compiles them.

They are in a folder of ~/.cache/bagua_comm whose name is a hash of the source, the versions of Numba and LLVM,
and the processor. Loading them takes LLVM, but not Numba, and about 30 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from ...system.files import is_own_file, kept_folder, write_at_once
from .signatures import KERNELS, Function

GOOD = "good"
"""The verdict on kernels that may be used; any other verdict says why they may not."""

_TYPES: dict[str, type[ctypes.c_int64 | ctypes.c_double]] = {"i": ctypes.c_int64, "f": ctypes.c_double}


class UnavailableError(Exception):
    """There are no compiled kernels; the message gives the reason."""


def numba_is_installed() -> bool:
    """Whether Numba is installed."""
    return importlib.util.find_spec("numba") is not None


def cache_dir() -> Path:
    """The folder of kernels for this source, these versions and this processor.

    Raises:
        UnavailableError: Numba is not installed or is broken, or the cache cannot be written.
    """
    if not numba_is_installed():
        raise UnavailableError("Numba is not installed: pip install 'bagua-comm[fast]'")
    kept = kept_folder("bagua_comm")
    if kept is None:
        raise UnavailableError("nothing can be kept in ~/.cache/bagua_comm")
    try:
        return kept / f"kernels-{_key()}"
    except Exception as exc:  # a broken installation raises anything
        raise UnavailableError(f"Numba cannot be used here: {type(exc).__name__}: {exc}") from exc


@functools.cache
def _key() -> str:
    from importlib import metadata  # takes a tenth of the time in which the library is imported

    from llvmlite import binding

    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    versions = [metadata.version(name) for name in ("numba", "llvmlite")]
    processor = platform.machine(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    return hashlib.blake2b(repr((sources, versions, processor)).encode(), digest_size=12).hexdigest()


def state() -> str:
    """One line on the kernels of NumPy's arrays here; nothing is compiled or loaded for it."""
    try:
        folder = cache_dir()
    except UnavailableError as exc:
        return f"NumPy's: {exc}"
    verdict = read_verdict(folder)
    if verdict == GOOD:
        return f"compiled, in {folder}"
    if verdict is not None:
        return f"NumPy's: {verdict}"
    if folder.is_dir():
        with locked(folder) as is_free:
            if not is_free:
                return f"NumPy's until the compiled ones are ready, in {folder}"
    return "NumPy's until a program that uses them has compiled them in the background"


# ---------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------


def checksum(code: bytes) -> bytes:
    """The 32 bytes that precede the code in an object file of the cache."""
    return hashlib.blake2b(code, digest_size=32).digest()


def object_path(folder: Path, name: str) -> Path:
    """The file of a kernel."""
    return folder / f"{name}.o"


def read_object(path: Path) -> bytes | None:
    """The code in the object file at `path`; None if it is missing, damaged or another user's."""
    if not is_own_file(path):
        return None
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return content[32:] if content[:32] == checksum(content[32:]) else None


def write_object(path: Path, code: bytes) -> None:
    """Write an object file at once, after its checksum."""
    write_at_once(path, checksum(code) + code, mode=0o600)


def verdict_path(folder: Path) -> Path:
    """The file with the verdict on the kernels of a folder."""
    return folder / "verdict"


def read_verdict(folder: Path) -> str | None:
    """`GOOD`, or why the kernels of a folder cannot be used; None before they were compared with NumPy's."""
    path = verdict_path(folder)
    if not is_own_file(path):
        return None
    try:
        return path.read_text(errors="replace") or None
    except OSError:
        return None


def write_verdict(folder: Path, verdict: str) -> None:
    """Write the verdict on the kernels of a folder."""
    write_at_once(verdict_path(folder), verdict.encode(), mode=0o600)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Lock a folder in the body of `with`; the value is False if another process or thread has locked it.

    The lock of a process that ends is released. On a file system without locks, each process gets one.

    Raises:
        OSError: The file of the lock cannot be made.
    """
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_mine = True
    except OSError as exc:
        is_mine = not isinstance(exc, BlockingIOError)
    try:
        yield is_mine
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child just forked may still have the file
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------------
# Loading
# ---------------------------------------------------------------------------------------------------


def load(folder: Path) -> dict[str, Function] | None:
    """The kernels of a folder as functions; None before they are complete.

    Raises:
        UnavailableError: Their verdict is not `GOOD`, or LLVM cannot load them.
    """
    verdict = read_verdict(folder)
    if verdict is None:
        return None
    if verdict != GOOD:
        raise UnavailableError(verdict)
    try:
        return load_unchecked(folder)
    except Exception as exc:  # LLVM's
        raise UnavailableError(f"they cannot be loaded: {type(exc).__name__}: {exc}") from exc


def load_unchecked(folder: Path) -> dict[str, Function] | None:
    """The kernels of a folder as functions, whatever the verdict; None if an object file cannot be read."""
    from llvmlite import binding

    codes = {name: read_object(object_path(folder, name)) for name in KERNELS}
    if None in codes.values():
        return None
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    for code in codes.values():
        engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return {name: _function(engine.get_function_address(name), letters) for name, letters in KERNELS.items()}


_engines: list[object] = []
"""Keeps the code of kernels in memory."""


def _function(address: int, letters: str) -> Function:
    """The kernel at an address; it runs without the GIL."""
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, *(_TYPES[letter] for letter in letters))
    return functools.partial(prototype(address), *_UNUSED)


_results = ctypes.create_string_buffer(16)
_UNUSED = ctypes.addressof(_results), ctypes.addressof(_results) + 8
"""Where kernels write Numba's result and error pointers, which nothing reads."""
