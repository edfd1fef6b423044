"""Where the copies of a commit lie: memory that is written again and again, and can tell whether it is whole.

A slot is one stretch of memory, of this process, or of a file in a folder in memory (/dev/shm) that outlives it:

    head      64 bytes: a magic number, the mark, the version, the sizes and the checksum of what follows
    data      arrays back to back, each aligned to 64 bytes
    header    JSON: what the arrays are

The mark says how far writing came. It goes back to WRITING before the first byte changes, and to PREPARED after
the last one; COMMITTED says that all ranks have prepared theirs. A process that dies in between leaves WRITING.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ... import arrays, kernels
from ...arrays import Array

WRITING, PREPARED, COMMITTED = 0, 1, 2
"""The marks."""

_MAGIC = b"bagua-s1"
_HEAD = struct.Struct("<8sQQQQQ")
_MARK = struct.Struct("<Q")
_MARK_AT = 8
_DATA_AT = 64
_ALIGNMENT = 64
_BLOCK = 1 << 13
"""Bytes of a block. Its weights, twice as many, stay in the first-level cache: then a copy that is summed takes
little longer than a copy."""
_CHAIN = 1 << 12
"""Sums of blocks that are chained at once."""
_WRAP = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15


class Kind(NamedTuple):
    """What an array is."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * arrays.dtype_named(self.dtype).itemsize

    @classmethod
    def of(cls, x: Array) -> Kind:
        """The kind of `x`."""
        return cls(arrays.dtype_name(x.dtype), tuple(int(n) for n in x.shape))


class Written(NamedTuple):
    """What a slot holds."""

    version: int
    mark: int
    header: dict[str, Any]
    data: npt.NDArray[np.uint8]
    """A view of the slot's memory."""


class Slot:
    """A stretch of memory for one copy. Nothing is allocated once it is large enough.

    Args:
        path: The file in which it lies; None for memory of this process.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        if path is not None and path.exists() and path.stat().st_size >= _DATA_AT:
            self._memory = _mapped(path, path.stat().st_size)

    def begin(self, data_bytes: int, text_bytes: int = 0) -> npt.NDArray[np.uint8]:
        """Begin to write: the memory of so many bytes of data. What the slot held is gone.

        Args:
            data_bytes: The size of the data.
            text_bytes: The size of its header, for which there will be room; 0 if that is not known yet.

        Raises:
            OSError: There is no room for it.
        """
        if self._memory.size >= _DATA_AT:
            self._mark(WRITING)
        self._provide(_DATA_AT + data_bytes + max(1 << 16, data_bytes >> 6, 2 * text_bytes), keep=0)
        self._mark(WRITING)
        return self._memory[_DATA_AT : _DATA_AT + data_bytes]

    def finish(self, version: int, header: dict[str, Any], data_bytes: int) -> None:
        """End writing: all of the data is there. May be called again, with another header.

        Raises:
            OSError: There is no room for the header.
        """
        text = np.frombuffer(json.dumps(header).encode(), np.uint8)
        end = _DATA_AT + data_bytes
        self._mark(WRITING)
        if self._memory.size < end + text.size:
            self._provide(end + 2 * text.size, keep=end)
        self._memory[end : end + text.size] = text
        head = _HEAD.pack(_MAGIC, WRITING, version, data_bytes, text.size, checksum(text))
        self._memory[: len(head)] = np.frombuffer(head, np.uint8)
        self._mark(PREPARED)

    def commit(self) -> None:
        """Mark what was prepared as committed."""
        self._mark(COMMITTED)

    def read(self) -> Written | None:
        """What the slot holds; None if it is empty, half written, or damaged."""
        if self._memory.size < _DATA_AT:
            return None
        magic, mark, version, data_bytes, text_bytes, its_sum = _HEAD.unpack(self._memory[: _HEAD.size].tobytes())
        end = _DATA_AT + data_bytes
        if magic != _MAGIC or mark not in (PREPARED, COMMITTED) or end + text_bytes > self._memory.size:
            return None
        text = self._memory[end : end + text_bytes].copy()  # a process that was taken for dead may write it yet
        if checksum(text) != its_sum:
            return None
        return Written(version, mark, json.loads(text.tobytes()), self._memory[_DATA_AT:end])

    def close(self) -> None:
        """Let go of the memory; the file goes away."""
        self._memory = np.empty(0, np.uint8)
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _mark(self, mark: int) -> None:
        self._memory[_MARK_AT : _MARK_AT + _MARK.size] = np.frombuffer(_MARK.pack(mark), np.uint8)

    def _provide(self, size: int, keep: int) -> None:
        """Have memory of at least `size` bytes, with the first `keep` of what there was."""
        if self._memory.size >= size:
            return
        if self.path is None:
            memory = np.empty(size, np.uint8)
            memory[:_DATA_AT] = 0
            memory[:keep] = self._memory[:keep]
        else:
            _extend(self.path, size)
            memory = _mapped(self.path, size)
        self._memory = memory


def _extend(path: Path, size: int) -> None:
    """Make a file as long as that, and have its memory now: a full folder is an error here, and a crash later."""
    with open(path, "ab") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def _mapped(path: Path, size: int) -> npt.NDArray[np.uint8]:
    with open(path, "r+b") as file:
        memory: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
        return memory


# Arrays in it ----------------------------------------------------------------------------------------------


def offsets(kinds: Iterable[Kind]) -> tuple[list[int], int]:
    """Where arrays of these kinds begin in the data, and how many bytes all of them take."""
    begins, end = [], 0
    for kind in kinds:
        begins.append(end)
        end += -(-kind.nbytes // _ALIGNMENT) * _ALIGNMENT
    return begins, end


def views(data: npt.NDArray[np.uint8], kinds: Sequence[Kind]) -> list[Array]:
    """The arrays in the data, which share its memory."""
    begins, _ = offsets(kinds)
    return [
        data[at : at + kind.nbytes].view(arrays.dtype_named(kind.dtype)).reshape(kind.shape)
        for at, kind in zip(begins, kinds, strict=True)
    ]


def copy_into(out: npt.NDArray[Any], x: Array) -> int:
    """Copy an array of the host or of a device into `out`, on the host; returns its checksum.

    What lies on the host is read once: it is summed while it is copied, in about the time of a copy.
    """
    if not isinstance(x, np.ndarray):
        out[...] = x.get()
        return checksum(out)
    if not x.flags.c_contiguous:
        out[...] = x
        return checksum(out)
    return _checksum(arrays.as_bytes(x), arrays.as_bytes(out))


def checksum(x: npt.NDArray[Any]) -> int:
    """A checksum of 64 bits of a contiguous array: s <- f s + sum_i (v_i x_i + w_i floor(x_i / 2^32)), per block.

    The x are 64-bit words, and sums wrap. The random odd weights tell places apart, so that exchanged values are
    found as well as changed ones. The second term is there for the upper half of each word: of its highest bit,
    often a sign, every odd weight makes the same, and two changed signs would go unseen. The checksum is no match
    for somebody who means harm.
    """
    return _checksum(arrays.as_bytes(x), None)


def _checksum(x: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8] | None) -> int:
    """The checksum of `x`, which is copied to `out`."""
    whole = x.size & ~7
    words = x[:whole].view(np.uint64)
    sums = np.empty(-(-whole // _BLOCK), np.uint64)
    kernels.on_host().checksum_blocks(
        words, _weights(), sums, None if out is None else out[:whole].view(np.uint64)
    )
    if out is not None:
        out[whole:] = x[whole:]
    total = x.size
    for at in range(0, len(sums), _CHAIN):
        part = sums[at : at + _CHAIN]
        total = (total * pow(_FACTOR, len(part), 1 << 64) + int(np.dot(part, _powers()[-len(part) :]))) & _WRAP
    return (total * _FACTOR + int.from_bytes(x[whole:].tobytes(), "little")) & _WRAP


@functools.cache
def _powers() -> npt.NDArray[np.uint64]:
    """f^(n - 1), ..., f, 1, modulo 2^64."""
    factors = np.full(_CHAIN, _FACTOR, np.uint64)
    factors[0] = 1
    powers: npt.NDArray[np.uint64] = np.multiply.accumulate(factors)[::-1].copy()
    return powers


@functools.cache
def _weights() -> npt.NDArray[np.uint64]:
    draws = np.random.default_rng(64).integers(0, 1 << 63, (2, _BLOCK // 8), dtype=np.uint64)
    odd: npt.NDArray[np.uint64] = draws * np.uint64(2) + np.uint64(1)
    return odd
