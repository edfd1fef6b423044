"""Compilation of the plugin: once, atomically, into a private folder."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import BootstrapError
from ..system.files import cache_folder, is_own_file

NAME = "bagua"
"""The plugin's name, for NCCL_NET."""

SOURCE = Path(__file__).with_name("plugin.c")

FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra")

COMPILERS = ("cc", "gcc", "clang")
"""Compilers in the order of attempts, before PyPI's ziglang, which contains a compiler and headers."""

OLDEST_LIBC = "2.17"
"""The glibc version for ziglang, so that the library runs wherever NCCL does."""

COMPILE_TIMEOUT_S = 300.0


def source_hash() -> str:
    """A hash of the plugin's source, in hexadecimal, which must be equal on all ranks."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]


def build(folder: Path | None = None) -> Path:
    """Compile the plugin unless it exists; return its path. Processes may call at the same time.

    Args:
        folder: The folder of the plugin; by default bagua_comm/net in the user's cache (XDG_CACHE_HOME, or
            ~/.cache).

    Raises:
        BootstrapError: No compiler works; the message has the output of each.
    """
    folder = default_folder() if folder is None else folder
    if (library := path(folder)) is not None:
        return library
    failures = []
    for command in compilers():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return compile_to(command, folder / _file_name(command))
        except (OSError, subprocess.SubprocessError) as exc:
            failures.append(f"{' '.join(command)}: {_said(exc)}")
    if not failures:
        raise BootstrapError(
            f"the network plugin needs a C compiler to be built once, and none of {', '.join(COMPILERS)} is on "
            "the PATH: install one (Debian: apt install gcc libc6-dev), or pip install ziglang"
        )
    raise BootstrapError(
        "the network plugin cannot be compiled; install a C compiler with its headers (Debian: apt install gcc "
        "libc6-dev), or pip install ziglang:\n" + "\n".join(failures)
    )


def path(folder: Path | None = None) -> Path | None:
    """The path of the compiled plugin, or None if this version has not been built here.

    Args:
        folder: As for `build`.
    """
    folder = default_folder() if folder is None else folder
    libraries = (folder / _file_name(command) for command in compilers())
    return next(filter(is_own_file, libraries), None)


def default_folder() -> Path:
    """The folder net in the cache folder of this library."""
    folder = cache_folder("bagua_comm", os.environ.get("XDG_CACHE_HOME")) / "net"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def compilers() -> Iterator[tuple[str, ...]]:
    """The commands of the installed C compilers, in the order of attempts."""
    for name in COMPILERS:
        if (found := shutil.which(name)) is not None:
            yield (found,)
    if importlib.util.find_spec("ziglang") is not None:
        target = f"{platform.machine()}-linux-gnu.{OLDEST_LIBC}"
        yield (sys.executable, "-m", "ziglang", "cc", "-target", target)


def compile_to(command: Sequence[str], library: Path, flags: Sequence[str] = (), source: Path = SOURCE) -> Path:
    """Compile a C file with further flags, for tests and benchmarks.

    Raises:
        OSError: The compiler cannot be run, or the library cannot be written.
        subprocess.SubprocessError: The compiler fails, or takes too long.
    """
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=library.parent) as folder:
        unfinished = Path(folder) / library.name
        _run(*command, *FLAGS, *flags, "-o", str(unfinished), str(source), timeout_s=COMPILE_TIMEOUT_S)
        unfinished.chmod(0o700)  # for any umask: a file that others can write to is not loaded
        unfinished.replace(library)
    return library


def _run(*command: str, timeout_s: float) -> str:
    """Run a compiler; return what it prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s).stdout


def _file_name(command: tuple[str, ...]) -> str:
    """The file name, in the form by which NCCL finds a plugin, with a hash of the build."""
    parts = [source_hash(), *FLAGS, *command, _version(command), *platform.libc_ver(), platform.machine()]
    return f"libnccl-net-{NAME}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"


@functools.cache
def _version(command: tuple[str, ...]) -> str:
    """The version text of a compiler; its error if it fails."""
    try:
        return _run(*command, "--version", timeout_s=60.0)
    except (OSError, subprocess.SubprocessError) as exc:
        return str(exc)


def _said(exc: Exception) -> str:
    said = exc.stderr if isinstance(exc, subprocess.CalledProcessError) else None
    return str(said or exc).strip()[-2000:]
