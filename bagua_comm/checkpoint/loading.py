"""Loading of one checkpoint: only the arrays that the tree needs are read."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .. import arrays
from ..arrays import Array
from ..errors import BaguaError, CheckpointError
from . import slabs, tensorfile
from .folders import Manifest, file_name
from .trees import RULES, FromArray, Json, Rule, Unpacker, shortened

_OPEN = 32
"""How many files are kept open."""


class Reader:
    """Reader of a checkpoint for one rank; a context manager that closes the files.

    Args:
        path: Its folder.
        manifest: Its manifest.
        rank: This rank.
        given: The kinds and lengths of the slabs that each rank asks for, by their paths.
        from_array: See `trees.FromArray`.
        note: Called after every piece read.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        rank: int,
        given: Sequence[dict[str, tuple[str, int]]],
        from_array: FromArray,
        note: Callable[[], None],
    ) -> None:
        self._note = note
        self._path, self._manifest, self._from_array = path, manifest, from_array
        self._rank, self._ranks, self._given = rank, len(given), given
        self._world: int = manifest["world"]
        self._open: dict[str, BinaryIO] = {}

    def read(self) -> object:
        """Read the tree for this rank.

        Raises:
            CheckpointError: A file is missing or damaged, or a value cannot be loaded on this number of ranks.
        """
        try:
            for rank in range(self._rank, self._world, self._ranks):  # so that the ranks together open all files
                self._file(rank)
            self._check_given()
            unpacker = Unpacker(self._shared, self._own, self._from_array, self._slab)
            return unpacker.unpack(self._manifest["plan"]["tree"])
        except (BaguaError, MemoryError):
            raise
        except OSError as exc:
            raise CheckpointError(f"it cannot be read: {exc}") from exc
        except Exception as exc:
            raise CheckpointError(f"its manifest does not make sense: {exc!r}") from exc

    # Arrays -----------------------------------------------------------------------------------------

    @functools.cached_property
    def _slices(self) -> list[list[tuple[int, int, int, int, int]]]:
        """The slices of every shared array, in order: (rank, begin, end, offset, CRC)."""
        found: list[list[tuple[int, int, int, int, int]]] = [[] for _ in self._manifest["plan"]["shared"]]
        for rank, file in enumerate(self._manifest["files"]):
            for number, begin, end, offset, crc in file["shared"]:
                found[number].append((rank, begin, end, offset, crc))
        return [sorted(slices, key=lambda each: each[1:3]) for slices in found]

    def _shared(self, number: int) -> Array:
        out = _empty(self._manifest["plan"]["shared"][number])
        flat, reached = out.reshape(-1), 0
        for rank, begin, end, offset, crc in self._slices[number]:
            if begin != reached:
                break
            what = f"an array in {file_name(rank)}"
            tensorfile.read_runs(self._file(rank), [(offset, flat[begin:end])], crc, what, self._note)
            reached = end
        if reached != flat.size or not self._slices[number]:
            raise CheckpointError(f"an array of {flat.size} elements ends after {reached}")
        return out

    def _array_of(self, rank: int, number: int) -> Array:
        out = _empty(self._manifest["plan"]["own"][rank]["arrays"][number])
        ((_, offset, crc),) = (row for row in self._manifest["files"][rank]["own"] if row[0] == number)
        what = f"an array in {file_name(rank)}"
        tensorfile.read_runs(self._file(rank), [(offset, out)], crc, what, self._note)
        return out

    def _file(self, rank: int) -> BinaryIO:
        return self._named_file(file_name(rank), self._manifest["files"][rank])

    def _named_file(self, name: str, entry: Manifest) -> BinaryIO:
        if name not in self._open:
            if len(self._open) == _OPEN:
                self._open.pop(next(iter(self._open))).close()
            head, crc = entry["head"]
            self._open[name] = tensorfile.open_checked(self._path / name, entry["bytes"], head, crc)
        return self._open[name]

    # Distributed arrays -----------------------------------------------------------------------------

    def _check_given(self) -> None:
        saved = [whole[0] for whole, _ in (self._manifest.get("concatenated") or {"arrays": ()})["arrays"]]
        if unknown := sorted({name for row in self._given for name in row} - set(saved)):
            raise CheckpointError(
                f"`like` has a slab at {shortened(unknown[0])}, and the checkpoint has slabs at: "
                f"{', '.join(map(shortened, saved)) or 'no place'}"
            )

    def _slab(self, number: int) -> Array:
        entry = self._manifest["concatenated"]
        fields, places = entry["arrays"][number]
        whole = slabs.Whole(*fields)
        lengths = slabs.lengths_for(whole, [each.get(whole.name) for each in self._given])
        begin = sum(lengths[: self._rank])
        file = self._named_file(slabs.FILE, entry)
        return slabs.read(file, whole, places, begin, begin + lengths[self._rank], self._note)

    # What is a rank's own ---------------------------------------------------------------------------

    def _own(self, number: int, rule: Rule | None, path: str) -> object:
        if self._world == self._ranks:
            return self._own_of(self._rank, number)
        path = shortened(path)
        if rule == "drop":
            return None
        if rule == "first":
            return self._own_of(0, number)
        if rule is None:
            raise CheckpointError(
                f"{path} is a rank's own, and was saved by {self._world} ranks, but {self._ranks} load it; load "
                'it on as many, or save it with a rule: Own(value, reshape="first"), or another of '
                f"{', '.join(map(repr, RULES))}"
            )
        return self._combined(number, rule, path)

    def _own_of(self, rank: int, number: int) -> object:
        node = self._manifest["plan"]["own"][rank]["trees"][number]
        read = functools.partial(self._array_of, rank)
        return Unpacker(read, from_array=self._from_array).unpack(node)

    def _combined(self, number: int, rule: Rule, path: str) -> object:
        nodes = [own["trees"][number] for own in self._manifest["plan"]["own"]]
        places: list[list[int]] = [[] for _ in nodes]
        skeletons = [_skeleton(node, found) for node, found in zip(nodes, places, strict=True)]
        for rank, skeleton in enumerate(skeletons):
            if skeleton != skeletons[0]:
                raise CheckpointError(
                    f"{path} holds other values on rank {rank} than on rank 0, so there is no {rule} of them for "
                    f"another number of ranks: it was saved by {self._world}, and {self._ranks} load it"
                )
        rows = dict(zip(places[0], zip(*places, strict=True), strict=True))
        combined = functools.partial(self._combined_array, rows, rule, path)
        return Unpacker(combined, from_array=self._from_array).unpack(nodes[0])

    def _combined_array(self, rows: dict[int, tuple[int, ...]], rule: Rule, path: str, number: int) -> Array:
        numbers = rows[number]
        first = self._array_of(0, numbers[0])
        alike, inexact = True, arrays.dtype_name(first.dtype) in arrays.FLOATS | arrays.COMPLEX
        wide = np.complex128 if first.dtype.kind == "c" else np.float64
        total = first.astype(wide)
        for rank in range(1, self._world):
            x = self._array_of(rank, numbers[rank])
            if (x.shape, x.dtype) != (first.shape, first.dtype):
                raise CheckpointError(
                    f"{path} has an array {x.dtype}{x.shape} on rank {rank} and {first.dtype}{first.shape} on "
                    f"rank 0, so there is no {rule} of them for another number of ranks"
                )
            alike = alike and x.tobytes() == first.tobytes()
            if not inexact and not alike:
                raise CheckpointError(
                    f"{path} has an array of {x.dtype} that differs between rank 0 and rank {rank}, so there is "
                    f"no {rule} of it for another number of ranks: it was saved by {self._world}, and "
                    f"{self._ranks} load it"
                )
            total += x.astype(wide)
        if alike and (rule == "mean" or not inexact):
            return first
        return np.asarray(total / (self._world if rule == "mean" else self._ranks)).astype(first.dtype)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        while self._open:
            self._open.popitem()[1].close()


def _empty(kind: Sequence[Json]) -> Array:
    name, shape = kind
    if name not in arrays.MOVABLE or math.prod(shape) < 0:
        raise ValueError(f"array of {name}{shape}")
    return np.empty(tuple(shape), arrays.dtype_named(name))


def _skeleton(node: Json, places: list[int]) -> Json:
    """`node` without the numbers of its arrays, which are added to `places`."""
    if isinstance(node, list):
        return [_skeleton(item, places) for item in node]
    if not isinstance(node, dict):
        return node
    tag, content = next(iter(node.items()))
    if tag in ("array", "scalar", "tensor"):
        places.append(content)
        return {tag: None}
    return {tag: _skeleton(content, places)} if isinstance(content, list) else node
