"""The file of distributed arrays, `Own(slab, "concatenate")`: each array as a whole, written by all ranks.

No rank has a whole array in memory, neither on saving nor on loading. Each rank writes its slab in place: a slab
along the first axis is one run of bytes in the file; along a later axis, one for each index of the axes before. A
slab has one CRC. A rank that loads a part of a slab reads the whole slab, piece by piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import BinaryIO, NamedTuple

import numpy as np

from .. import arrays
from ..arrays import Array
from ..errors import CheckpointError
from ..topology import share
from . import tensorfile
from .slices import cover
from .trees import Json, Slab, shortened, slab_text

FILE = "concatenated.safetensors"


class Whole(NamedTuple):
    """A distributed array, with the slabs of the ranks that save it."""

    name: str
    dtype: str
    shape: list[int]
    axis: int
    lengths: list[int]
    """The length of each rank's slab along the axis."""

    @property
    def runs_per_slab(self) -> int:
        """The number of runs of bytes of a slab in the file."""
        return math.prod(self.shape[: self.axis])

    @property
    def width(self) -> int:
        """The bytes of a run of a slab of length 1."""
        return math.prod(self.shape[self.axis + 1 :]) * arrays.dtype_named(self.dtype).itemsize

    def runs(self, rank: int) -> Iterator[int]:
        """Where the runs of a rank's slab begin in the array, in bytes."""
        begin, step = (length * self.width for length in (sum(self.lengths[:rank]), sum(self.lengths)))
        return (begin + n * step for n in range(self.runs_per_slab))


def wholes_of(slabs: Sequence[Slab], lengths: Sequence[Sequence[int]]) -> list[Whole]:
    """The arrays of these slabs, from the lengths of each rank's slabs along their axes."""
    wholes = []
    for slab, column in zip(slabs, zip(*lengths, strict=True), strict=True):
        shape, dtype = list(slab.array.shape), arrays.dtype_name(slab.array.dtype)
        shape[slab.axis] = sum(column)
        wholes.append(Whole(slab.path, dtype, shape, slab.axis, list(column)))
    return wholes


def entry(whole: Whole, slab: Array, rank: int) -> tensorfile.Entry:
    """The slab that this rank writes of an array, in NumPy and contiguous."""
    rows = arrays.as_bytes(slab).reshape(whole.runs_per_slab, whole.lengths[rank] * whole.width)
    return tensorfile.Entry(whole.name, whole.dtype, whole.shape, zip(whole.runs(rank), rows, strict=True))


def manifest_entry(wholes: Sequence[Whole], files: Sequence[tensorfile.WrittenFile]) -> dict[str, Json] | None:
    """The entry of the file in the manifest, from what each rank knows of it; None without one."""
    if not files:
        return None
    rows = zip(wholes, zip(*(file.places for file in files), strict=True), strict=True)
    return {"bytes": files[0].nbytes, "head": [files[0].head, files[0].head_crc], "arrays": list(rows)}


def lengths_for(whole: Whole, given: Sequence[tuple[str, int] | None]) -> list[int]:
    """The lengths of the slabs of the ranks that load an array.

    Args:
        whole: The array.
        given: The `slab_text` and the length of each rank's slab in `like`; if all are None, the slabs are even.

    Raises:
        CheckpointError: They do not make the array that was saved.
    """
    ranks, total = len(given), whole.shape[whole.axis]
    if not any(given):
        return [len(share(total, rank, ranks)) for rank in range(ranks)]
    kind = slab_text(whole.dtype, whole.shape, whole.axis)
    kinds, lengths = zip(*(each or ("no slab", 0) for each in given), strict=True)
    sums = f"{' + '.join(map(str, lengths))} = {sum(lengths)} along axis {whole.axis}"
    wrong = next((f"{each} on rank {rank}" for rank, each in enumerate(kinds) if each != kind), sums)
    if wrong != sums or sum(lengths) != total:
        raise CheckpointError(
            f"{shortened(whole.name)} is {kind} from each rank, with {total} along axis {whole.axis} in all, and "
            f"`like` has {wrong}: give such slabs on all ranks, or none on any"
        )
    return list(lengths)


def read(
    file: BinaryIO,
    whole: Whole,
    places: Sequence[tuple[int, int]],
    begin: int,
    end: int,
    note: Callable[[], None],
) -> Array:
    """Read the part of an array between two indices of its axis, from all slabs that overlap it.

    Args:
        file: The file.
        whole: The array.
        places: For each rank that saved it, the offset of the array and the CRC of the slab.
        begin: The first index.
        end: The index after the last.
        note: Called after every piece.

    Raises:
        CheckpointError: A slab is damaged.
    """
    shape: list[int] = [*whole.shape]
    shape[whole.axis] = end - begin
    out = np.empty(shape, arrays.dtype_named(whole.dtype))
    width = whole.width
    rows = arrays.as_bytes(out).reshape(whole.runs_per_slab, (end - begin) * width)
    scratch = np.empty(tensorfile.CHUNK_BYTES, np.uint8)

    def skipped(at: int, count: int) -> Iterator[tuple[int, Array]]:
        return ((at + done, scratch[: count - done]) for done in range(0, count, scratch.size))

    def run(at: int, before: int, row: Array, after: int) -> Iterable[tuple[int, Array]]:
        return chain(skipped(at, before), [(at + before, row)], skipped(at + before + row.size, after))

    saved = list(pairwise(accumulate(whole.lengths, initial=0)))
    for rank, low, high in cover(begin, end, saved):
        (first, last), (offset, crc) = saved[rank], places[rank]
        before, after = (low - first) * width, (last - high) * width
        parts = rows[:, (low - begin) * width : (high - begin) * width]
        runs = (run(offset + at, before, row, after) for at, row in zip(whole.runs(rank), parts, strict=True))
        what = f"rank {rank}'s slab of {shortened(whole.name)} in {FILE}"
        tensorfile.read_runs(file, chain.from_iterable(runs), crc, what, note)
    return out
