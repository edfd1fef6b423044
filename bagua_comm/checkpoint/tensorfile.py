"""Files of arrays in the safetensors format, written and read piece by piece, with a CRC-32 of every array.

    8 bytes     length n of the header, little endian
    n bytes     JSON: {name: {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}, ...}
    the rest    the arrays, without gaps; offsets count from here

The format: https://github.com/huggingface/safetensors. Complex numbers are written as pairs of real ones. CRC-32
finds damage; it does not protect from forgery.
"""

from __future__ import annotations

import io
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from .. import arrays
from ..arrays import Array
from ..errors import CheckpointError
from .trees import shortened

CHUNK_BYTES = 4 << 20
"""The number of bytes written or read at a time."""

_FORMAT_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "F32",
    "complex128": "F64",
}


class WrittenFile(NamedTuple):
    """Sizes and checksums of a written file."""

    nbytes: int
    head: int
    """The number of bytes before the arrays."""
    head_crc: int
    places: list[tuple[int, int]]
    """The offset in the file and the CRC-32 of every array."""


class Entry(NamedTuple):
    """An array of a file, and the part of its bytes that is written here."""

    name: str
    dtype: str
    shape: Sequence[int]
    """The shape of the whole array."""
    runs: Iterable[tuple[int, Array]]
    """Bytes, and where they are in the array."""


def whole(name: str, x: Array) -> Entry:
    """The entry of a contiguous NumPy array that is written whole."""
    return Entry(name, arrays.dtype_name(x.dtype), x.shape, [(0, arrays.as_bytes(x))])


def write(
    path: Path, entries: Sequence[Entry], note: Callable[[], None], *, is_shared: bool = False
) -> WrittenFile:
    """Write a new file, or a part of one that others write, too; wait until it is on the disk.

    Args:
        path: The file. Unless it `is_shared`, it must not exist.
        entries: The arrays of the file, by distinct names. Arrays of larger elements come first in the file, so
            that all are aligned.
        note: Called after every piece.
        is_shared: Whether other ranks write parts of the file.

    Raises:
        CheckpointError: Two arrays have one name, or one has the name that the format reserves.
        OSError: The file cannot be written, such as for want of space.
    """
    dtypes = [arrays.dtype_named(each.dtype) for each in entries]
    order = sorted(range(len(entries)), key=lambda n: -dtypes[n].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "bagua_comm"}}
    offsets, end = [0] * len(entries), 0
    for n in order:
        name, dtype, shape, _ = entries[n]
        if name in header:
            raise CheckpointError(
                f"{path.name} would have two entries named {shortened(name)!r}, expected names that differ"
            )
        offsets[n], begin, end = end, end, end + math.prod(shape) * dtypes[n].itemsize
        shape = [*shape, 2] if dtypes[n].kind == "c" else list(shape)
        header[name] = {"dtype": _FORMAT_NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    crcs = [0] * len(entries)
    with open(path, "wb" if is_shared else "xb", buffering=0, opener=_open_whole) as file:
        note()  # which ends here a save that was given up while the disk did not answer
        _write_all(file, memoryview(head))
        for n in order:
            for offset, run in entries[n].runs:
                file.seek(len(head) + offsets[n] + offset)
                data = memoryview(run)
                for start in range(0, len(data), CHUNK_BYTES):
                    chunk = data[start : start + CHUNK_BYTES]
                    crcs[n] = zlib.crc32(chunk, crcs[n])
                    _write_all(file, chunk)
                    note()
        os.fsync(file.fileno())
    places = [(len(head) + offset, crc) for offset, crc in zip(offsets, crcs, strict=True)]
    return WrittenFile(len(head) + end, len(head), zlib.crc32(head), places)


def _open_whole(path: str, flags: int) -> int:
    """Open a file without losing what others have written to it."""
    return os.open(path, flags & ~os.O_TRUNC, 0o666)


def _write_all(file: io.FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def open_checked(path: Path, nbytes: int, head: int, head_crc: int) -> BinaryIO:
    """Open a file after a check of its size and header.

    Raises:
        CheckpointError: They differ from what was written, or the file is missing.
    """
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - the caller closes it
    except OSError as exc:
        raise CheckpointError(f"{path.name} cannot be opened: {exc}") from exc
    try:
        found = os.fstat(file.fileno()).st_size
        if found != nbytes:
            raise CheckpointError(f"{path.name} has {found} bytes, expected {nbytes}: it is truncated or foreign")
        if head > nbytes or zlib.crc32(file.read(head)) != head_crc:
            raise CheckpointError(f"the header of {path.name} is damaged")
    except BaseException:
        file.close()
        raise
    return file


def read_runs(
    file: BinaryIO, runs: Iterable[tuple[int, Array]], crc: int, what: str, note: Callable[[], None]
) -> None:
    """Fill contiguous NumPy arrays from a file.

    Args:
        file: The file.
        runs: Offsets in the file, with the array to fill from there on.
        crc: The CRC-32 of all bytes, in this order.
        what: What is read, for messages.
        note: Called after every piece.

    Raises:
        CheckpointError: The bytes differ from what was written.
    """
    found = 0
    for offset, out in runs:
        file.seek(offset)
        data = memoryview(arrays.as_bytes(out))
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            filled = 0
            while filled < len(chunk):
                count = file.readinto(chunk[filled:])  # type: ignore[attr-defined]
                if not count:
                    raise CheckpointError(f"{what} is truncated")
                filled += count
            found = zlib.crc32(chunk, found)
            note()
    if found != crc:
        raise CheckpointError(f"{what} is damaged: its checksum is {found:08x}, expected {crc:08x}")


def checksum(x: Array) -> int:
    """The CRC-32 of a contiguous NumPy array."""
    return zlib.crc32(memoryview(arrays.as_bytes(x)))
