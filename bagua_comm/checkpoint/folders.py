"""The folder of checkpoints: names, manifests, and complete checkpoints.

    step-100/manifest.json            the contents of the checkpoint; its last key is a hash of the others
    step-100/rank-0.safetensors       the file of rank 0
    step-100/concatenated.safetensors the distributed arrays of all ranks, if there are any
    step-200.tmp/                     a checkpoint that is being written, or was when the program died
    step-100.old/                     one that is being replaced or removed
    latest                            the name of the newest, for people and scripts; not read here

A checkpoint is complete as soon as its folder has its final name. All files are on the disk before the rename,
which is atomic.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple, TypeAlias
from weakref import WeakSet

from ..errors import CheckpointError
from ..system.files import sync_folder, write_at_once
from .trees import Json

FORMAT, VERSION = "bagua_comm checkpoint", 1

Manifest: TypeAlias = dict[str, Json]
"""The content of the file that describes a checkpoint."""
MANIFEST, LATEST = "manifest.json", "latest"
_NAME = re.compile(r"step-(0|[1-9][0-9]{0,18})(\.old)?")


class Found(NamedTuple):
    """A folder with the name of a complete checkpoint."""

    step: int
    path: Path
    number: int
    """The number of the checkpoint in the order of saving; -1 if it cannot be read."""
    problem: str | None
    """Why it cannot be loaded, according to its manifest."""


def file_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank}.safetensors"


class Folder:
    """A folder of checkpoints, for one process. Nothing here is collective.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: _Lock | None = None

    # Writing ----------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Make an empty folder for a checkpoint; called by rank 0.

        Raises:
            OSError: It cannot be made.
            CheckpointError: Another program saves in this folder, or another object of this process.
        """
        if self._lock is None or not self._lock.is_held():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _Lock(self.path)
            self._tidy()
        self.drop(step)
        self.unfinished(step).mkdir()

    def unfinished(self, step: int) -> Path:
        """The folder of a checkpoint that is being written."""
        return self.path / f"step-{step}.tmp"

    def drop(self, step: int) -> None:
        """Remove an unfinished checkpoint."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.unfinished(step))

    def publish(self, step: int, manifest: Manifest, sizes: dict[str, int], keep: int | None) -> None:
        """Make a checkpoint complete, and remove old ones; called by rank 0 when all files are on the disk.

        A checkpoint that cannot be completed is removed: on a full disk, the next one needs its room.

        Args:
            step: Its step.
            manifest: Its manifest, without the number and the hash.
            sizes: The number of bytes of every file.
            keep: The number of newest checkpoints to keep; None keeps all.

        Raises:
            OSError: It cannot be completed, or an old one cannot be removed.
            CheckpointError: A file is missing; or the checkpoint is complete, but `latest` cannot name it.
        """
        try:
            self._make_complete(step, manifest, sizes)
        except BaseException:
            with contextlib.suppress(OSError):
                self.drop(step)
            raise
        try:
            self._name_latest(step)
        except OSError as exc:  # of a full disk, perhaps
            self._prune(keep)
            try:
                self._name_latest(step)
            except OSError:
                raise CheckpointError(
                    f"the checkpoint is complete, but the file {LATEST}, which names it for people and scripts, "
                    f"cannot be written: {exc}"
                ) from exc
        self._prune(keep)

    def _make_complete(self, step: int, manifest: Manifest, sizes: dict[str, int]) -> None:
        unfinished, final = self.unfinished(step), self.path / f"step-{step}"
        for name, size in sizes.items():
            try:
                found = (unfinished / name).stat().st_size
            except FileNotFoundError:
                raise CheckpointError(
                    f"rank 0 does not see {name} in {unfinished}: the folder must be in a file system that all "
                    "ranks share"
                ) from None
            if found != size:
                raise CheckpointError(f"rank 0 sees {found} bytes in {name}, expected {size}")
        number = 1 + max((each.number for each in self.complete()), default=0)
        write_at_once(unfinished / MANIFEST, sealed({**manifest, "number": number}), durable=True)
        old = self.path / f"step-{step}.old"
        if final.exists():
            final.rename(old)
        unfinished.rename(final)
        sync_folder(self.path)
        if old.exists():
            _remove(old)

    def _name_latest(self, step: int) -> None:
        write_at_once(self.path / LATEST, f"step-{step}\n".encode(), durable=True)

    def _prune(self, keep: int | None) -> None:
        """Remove all but the `keep` newest checkpoints; damaged ones stay, and do not count."""
        if keep is None:
            return
        good = [each for each in self.complete() if each.problem is None]
        for each in good[keep:]:
            old = each.path.with_name(f"step-{each.step}.old")
            each.path.rename(old)
            _remove(old)

    def close(self) -> None:
        """Release the lock of the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _tidy(self) -> None:
        """Remove the remains of a program that died, and restore a checkpoint that it was replacing."""
        for path in self.path.glob("step-*.old"):
            final = path.with_suffix("")
            if not _NAME.fullmatch(path.name):
                continue
            if final.exists() or manifest_at(path)[1] is not None:
                _remove(path)
            else:
                path.rename(final)
        for path in self.path.glob("step-*.tmp"):
            if _NAME.fullmatch(path.stem):
                shutil.rmtree(path)

    # Reading ----------------------------------------------------------------------------------------

    def complete(self) -> list[Found]:
        """The complete checkpoints, newest first; those with an unreadable manifest before all others.

        Raises:
            OSError: The folder cannot be read.
        """
        found: dict[int, Found] = {}
        try:
            names = sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []
        for name in names:
            match = _NAME.fullmatch(name)
            step = int(match[1]) if match else -1
            if match is None or (match[2] and step in found):
                continue
            path = self.path / name
            manifest, problem = manifest_at(path)
            if match[2] and problem is not None:  # it is half removed
                continue
            if problem is None and manifest["step"] != step:
                problem = f"its manifest is of step {manifest['step']}"
            found[step] = Found(step, path, -1 if problem else manifest["number"], problem)
        return sorted(found.values(), key=lambda each: (each.problem is None, -each.number, -each.step))


class _Lock:
    """The lock of a folder, which belongs to this object, not to the process as POSIX record locks do.

    Two objects of a process would share POSIX locks, and the first close of any descriptor of the file would free
    them. A forked child does not hold this lock.

    Raises:
        OSError: The file cannot be opened, or its file system has no locks.
        CheckpointError: Another holder has the lock.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = None
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        self._descriptor = os.open(folder / ".lock", flags, 0o666)
        _locks.add(self)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            self.close()
            if isinstance(exc, (BlockingIOError, PermissionError)):
                raise CheckpointError(
                    f"another program saves checkpoints in {folder}, or another Checkpoints of this one; close "
                    "that, or save in another folder"
                ) from None
            raise

    def is_held(self) -> bool:
        """Whether this process holds the lock."""
        return self._descriptor is not None

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a child just forked may still have the file
            self.let_go()

    def let_go(self) -> None:
        """Close the file of the lock without releasing it, in a forked child."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


_locks: WeakSet[_Lock] = WeakSet()
"""All locks of this process."""


def _give_up_in_child() -> None:
    for lock in list(_locks):
        lock.let_go()


os.register_at_fork(after_in_child=_give_up_in_child)


def _remove(path: Path) -> None:
    """Remove a checkpoint, its manifest first, so that an interruption leaves no checkpoint."""
    (path / MANIFEST).unlink(missing_ok=True)
    sync_folder(path)
    shutil.rmtree(path)


def sealed(manifest: Manifest) -> bytes:
    """The bytes of a manifest, with a hash of them."""
    return (json.dumps({**manifest, "hash": _hash_of(manifest)}) + "\n").encode()


def _hash_of(manifest: Manifest) -> str:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def manifest_at(path: Path) -> tuple[Manifest, str | None]:
    """The manifest in a folder, and the problem with it, if any."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        return {}, f"it has no {MANIFEST}"
    except OSError as exc:
        return {}, f"its {MANIFEST} cannot be read: {exc}"
    except (ValueError, RecursionError) as exc:
        return {}, f"its {MANIFEST} is damaged: {exc}"
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return {}, f"its {MANIFEST} is not one of this library"
    if manifest.get("version") != VERSION:
        return {}, f"its {MANIFEST} is of version {manifest.get('version')!r}, expected {VERSION}"
    expected = manifest.pop("hash", None)
    if _hash_of(manifest) != expected:
        return {}, f"its {MANIFEST} is damaged: its content does not have the hash that it names"
    return manifest, None
