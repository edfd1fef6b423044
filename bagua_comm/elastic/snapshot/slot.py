"""Memory for a snapshot, which is reused by every other commit, and can be checked for completeness.

A slot is a block of memory: of this process, or of a file in /dev/shm that outlives it.

    head      64 bytes: a magic number, the state, the version, both sizes, and the checksum of the header
    data      the arrays, each aligned to 64 bytes
    header    JSON: a description of the arrays

The state is set to WRITING before the first byte changes, and to PREPARED after the last one. COMMITTED means
that all ranks have prepared their snapshots. A process that dies in between leaves WRITING.
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
from typing import NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from ... import arrays, kernels
from ...arrays import Array
from ...checkpoint.trees import Json

WRITING, PREPARED, COMMITTED = 0, 1, 2
"""The states of a slot."""

_MAGIC = b"bagua-s1"
_HEAD = struct.Struct("<8sQQQQQ")
_STATE = struct.Struct("<Q")
_STATE_AT = 8
_DATA_AT = 64
_ALIGNMENT = 64
_BLOCK = 1 << 13
"""Bytes of a block. Its weights, twice as many bytes, fit into the first-level cache, so that computing the
checksum hardly slows down a copy."""
_CHAIN = 1 << 12
"""Number of block sums that are combined at once."""
_WRAP = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15


class ArraySpec(NamedTuple):
    """The dtype and the shape of an array."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        return math.prod(self.shape) * arrays.dtype_named(self.dtype).itemsize

    @classmethod
    def of(cls, x: Array) -> ArraySpec:
        """The dtype and the shape of `x`."""
        return cls(arrays.dtype_name(x.dtype), tuple(int(n) for n in x.shape))


class Header(TypedDict):
    """The description of a snapshot, as JSON.

    `arrays` are the dtype, the shape and the rule of each array. The last ones are slabs of sharded arrays, and
    `slabs` the path, the axis, the first index and the length of the whole of each. `held` are the numbers of
    those in the slot.
    """

    run: str
    rank: int
    ranks: int
    whole: bool
    held: list[int]
    tree: Json
    own_trees: list[Json]
    arrays: list[Json]
    slabs: list[Json]
    sums: list[int]
    private: list[int]
    texts_differ: bool


class SlotContent(NamedTuple):
    """The content of a slot."""

    version: int
    state: int
    header: Header
    data: npt.NDArray[np.uint8]
    """A view of the slot's memory."""


class Slot:
    """Memory for one snapshot, allocated only when it has to grow.

    Args:
        path: The file that holds it; None for memory of this process.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        if path is not None and path.exists() and path.stat().st_size >= _DATA_AT:
            self._memory = _mapped(path, path.stat().st_size)

    def begin(self, data_bytes: int, text_bytes: int = 0) -> npt.NDArray[np.uint8]:
        """Discard the content, and return the memory for `data_bytes` of new data.

        Args:
            data_bytes: The size of the data.
            text_bytes: The size of the header, which is reserved too; 0 if it is not known yet.

        Raises:
            OSError: There is not enough memory.
        """
        if self._memory.size >= _DATA_AT:
            self._set_state(WRITING)
        self._reserve(_file_size(data_bytes, text_bytes), keep=0)
        self._set_state(WRITING)
        return self._memory[_DATA_AT : _DATA_AT + data_bytes]

    def reserve(self, data_bytes: int, text_bytes: int) -> None:
        """Provide the memory for a later `begin`, and keep the content.

        Raises:
            OSError: There is not enough memory.
        """
        self._reserve(_file_size(data_bytes, text_bytes), keep=self._memory.size)

    def finish(self, version: int, header: Header, data_bytes: int) -> None:
        """Write the header after the data, and mark the slot as prepared. May be repeated with another header.

        Raises:
            OSError: There is not enough memory for the header.
        """
        text = np.frombuffer(json.dumps(header).encode(), np.uint8)
        end = _DATA_AT + data_bytes
        self._set_state(WRITING)
        if self._memory.size < end + text.size:
            self._reserve(end + 2 * text.size, keep=end)
        self._memory[end : end + text.size] = text
        head = _HEAD.pack(_MAGIC, WRITING, version, data_bytes, text.size, checksum(text))
        self._memory[: len(head)] = np.frombuffer(head, np.uint8)
        self._set_state(PREPARED)

    def commit(self) -> None:
        """Mark the prepared content as committed."""
        self._set_state(COMMITTED)

    def read(self) -> SlotContent | None:
        """The content of the slot; None if it is empty, incomplete, or damaged."""
        if self._memory.size < _DATA_AT:
            return None
        head = self._memory[: _HEAD.size].tobytes()
        magic, state, version, data_bytes, text_bytes, text_sum = _HEAD.unpack(head)
        end = _DATA_AT + data_bytes
        if magic != _MAGIC or state not in (PREPARED, COMMITTED) or end + text_bytes > self._memory.size:
            return None
        # A copy: a process that is only believed to be dead may still write.
        text = self._memory[end : end + text_bytes].copy()
        if checksum(text) != text_sum:
            return None
        return SlotContent(version, state, json.loads(text.tobytes()), self._memory[_DATA_AT:end])

    def close(self) -> None:
        """Free the memory, and remove the file."""
        self._memory = np.empty(0, np.uint8)
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _set_state(self, state: int) -> None:
        self._memory[_STATE_AT : _STATE_AT + _STATE.size] = np.frombuffer(_STATE.pack(state), np.uint8)

    def _reserve(self, size: int, keep: int) -> None:
        """Provide at least `size` bytes of memory, and preserve the first `keep`."""
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


def offsets(specs: Iterable[ArraySpec]) -> tuple[list[int], int]:
    """The offsets of arrays in the data, and the size of the data in bytes."""
    begins, end = [], 0
    for spec in specs:
        begins.append(end)
        end += -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT
    return begins, end


def views(data: npt.NDArray[np.uint8], specs: Sequence[ArraySpec]) -> list[Array]:
    """Views of the arrays in the data."""
    begins, _ = offsets(specs)
    return [
        data[at : at + spec.nbytes].view(arrays.dtype_named(spec.dtype)).reshape(spec.shape)
        for at, spec in zip(begins, specs, strict=True)
    ]


def _file_size(data_bytes: int, text_bytes: int) -> int:
    """The size of a slot with room for another header."""
    return _DATA_AT + data_bytes + max(1 << 16, data_bytes >> 6, 2 * text_bytes)


def copy_into(out: npt.NDArray[np.generic], x: Array) -> int:
    """Copy a host or device array into `out`, on the host; returns its checksum.

    A contiguous host array is read once, for the copy and the checksum.
    """
    return _checksum(arrays.as_bytes(on_host(x)), arrays.as_bytes(out))


def on_host(x: Array) -> npt.NDArray[np.generic]:
    """A contiguous array on the host with the values of `x`: `x` itself, if it is one."""
    return np.asarray(x if isinstance(x, np.ndarray) else x.get(), order="C")


def checksum(x: npt.NDArray[np.generic]) -> int:
    """A checksum of 64 bits of a contiguous array: s <- f s + sum_i (v_i x_i + w_i floor(x_i / 2^32)), per block.

    The x are 64-bit words, and sums wrap. The weights are random odd numbers, which detect exchanged values as
    well as changed ones. The second term protects the upper half of each word: multiplied by any odd weight, its
    highest bit, often a sign, gives the same value, so that two changed signs would cancel. The checksum is not
    cryptographic.
    """
    return _checksum(arrays.as_bytes(x), None)


def _checksum(x: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8] | None) -> int:
    """The checksum of `x`, which is also copied to `out`, if given."""
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
