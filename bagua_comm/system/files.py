"""Private folders, folders in memory, and atomic writes of files.

The files in the cache are run as code, so only their owner may be able to write there. In a folder that others
can write to, no link at a predictable name may redirect a write.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import secrets
import shutil
import stat
import tempfile
import warnings
from pathlib import Path


def cache_folder(name: str, caches: str | None = None) -> Path:
    """The folder `name` in the user's cache, if only the user can write to it; else a folder of this process.

    Args:
        name: The name of the folder.
        caches: The user's cache, if it is not ~/.cache.
    """
    return kept_folder(name, caches) or private_folder()


def kept_folder(name: str, caches: str | None = None) -> Path | None:
    """The folder of `cache_folder` if it is in the user's cache; else None."""
    try:
        folder = (Path(caches) if caches else Path.home() / ".cache") / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):  # it cannot be made, or there is no home directory
        return None
    if not is_private(found):
        warnings.warn(
            f"{folder} belongs to another user, or others can write to it, so nothing is kept there: make it "
            "private (chmod 700), or remove it",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


def is_private(found: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user, and no other user can write to it."""
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_own_file(path: Path) -> bool:
    """Whether `path` is a regular file, not a link, that only this user can have written."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and is_private(found)


def make_own_folder(folder: Path) -> bool:
    """Make a folder that only this user can read, unless it exists; return whether it is private.

    A symbolic link is refused: another user may have made it.

    Raises:
        OSError: It cannot be made.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and is_private(found)


def keep_latest(folder: Path, count: int) -> None:
    """Remove all folders in a folder but the `count` that were changed last."""
    with contextlib.suppress(OSError):
        found = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
        for each in found[: max(len(found) - count, 0)]:
            shutil.rmtree(each, ignore_errors=True)


def shared_memory() -> Path:
    """The folder of the file system in memory, or of temporary files if this system has none."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def shared_memory_is_full() -> bool:
    """Whether `shared_memory` has no room: SIGBUS ends a process that writes to a new part of a file there."""
    try:
        return shutil.disk_usage(shared_memory()).free < 1 << 16
    except OSError:  # it is gone, or cannot be read
        return False


@functools.cache
def private_folder() -> Path:
    """A new folder that only this user can read; the process that made it removes it at its end.

    Raises:
        OSError: There is no folder of temporary files.
    """
    folder = Path(tempfile.mkdtemp(prefix="bagua_comm-"))  # of mode 0o700
    remove_at_exit(folder)
    return folder


def remove_at_exit(folder: Path) -> None:
    """Remove a folder and all that is in it at the end of this process."""
    atexit.register(_remove, folder, os.getpid())


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)


def write_at_once(path: Path, content: bytes, mode: int = 0o666, *, durable: bool = False) -> None:
    """Write a file atomically: a reader finds the old or the new content, never a part. Follows no link.

    Args:
        path: The file to write.
        content: Its new content.
        mode: Its permissions, before the umask is applied.
        durable: Return only when the file is on the disk, and survives a loss of power.

    Raises:
        OSError: The file cannot be written; the old one is unchanged.
    """
    unfinished = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    try:
        # An opener in C: between `os.open` and `open`, a signal handler could raise and leak the descriptor.
        with open(unfinished, "xb", opener=functools.partial(os.open, mode=mode)) as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    if durable:
        sync_folder(path.parent)


def append(path: Path, text: str) -> None:
    """Append a text to a file in one write, so that those of several processes do not mix. Follows no link.

    Raises:
        OSError: It cannot be written.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o600)

    with open(path, "ab", buffering=0, opener=opener) as file:
        file.write(text.encode())


def sync_folder(path: Path) -> None:
    """Wait until the changes in a folder are on the disk, if its file system supports that.

    Raises:
        OSError: It could not be written.
    """
    number = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(number)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)
