"""The files of a `DivergenceRecorder`: what they contain, and reading them.

Each rank writes `rank_0.steps`, a line of JSON for each event, and at the first difference `rank_0.npz`:

    {"format": "bagua_comm.divergence", "version": 1, "run": "5f0c...", "rank": 0, "size": 4}
    {"list": 0, "tensors": [["weight", "float32", [3, 4]], ...]}      written once
    {"step": 0, "list": 0, "digests": "..."}               16 bytes for each tensor of the list, in base64
    {"step": 12, "kept": ["weight"]}                       they are arr_0, arr_1, ... in rank_0.npz
"""

from __future__ import annotations

import base64
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from .. import arrays
from ..arrays import Array
from ..errors import BaguaError

FORMAT = "bagua_comm.divergence"
VERSION = 1
DIGEST_BYTES = 16


class DivergenceError(BaguaError):
    """A folder has no records of steps, or they cannot be read or compared."""


class Tensor(NamedTuple):
    """A tensor of a step, without its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name!r} ({self.dtype}{list(self.shape)})"


class Step(NamedTuple):
    """A call of `DivergenceRecorder.record` on one rank."""

    step: int
    tensors: tuple[Tensor, ...]
    digests: bytes

    def digest_of(self) -> dict[str, tuple[Tensor, bytes]]:
        """The digest of each tensor, by name."""
        cut = range(0, len(self.digests), DIGEST_BYTES)
        digests = (self.digests[i : i + DIGEST_BYTES] for i in cut)
        return {tensor.name: (tensor, digest) for tensor, digest in zip(self.tensors, digests, strict=True)}


class RecordWriter:
    """The file of one rank, to which lines are appended as soon as they are complete.

    Args:
        folder: The folder; it is made if it is missing.
        rank, size: The rank, and the number of ranks.
        run: A text that differs from run to run, the same on all ranks.

    Raises:
        DivergenceError: The folder has records of this rank already.
        OSError: The file cannot be made.
    """

    def __init__(self, folder: Path, rank: int, size: int, run: str) -> None:
        self._folder, self._rank = folder, rank
        self._lists: dict[tuple[Tensor, ...], int] = {}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / steps_name(rank)
        try:
            self._file: BinaryIO = open(path, "xb", buffering=0)  # noqa: SIM115 - `close` closes it
        except FileExistsError:
            raise DivergenceError(
                f"{path} exists already; give each run a folder of its own, or remove the files of the last run"
            ) from None
        self._write({"format": FORMAT, "version": VERSION, "run": run, "rank": rank, "size": size})

    def add(self, step: Step) -> None:
        """Append the digests of a step.

        Raises:
            OSError: The file cannot be written.
        """
        number = self._lists.get(step.tensors)
        if number is None:
            number = self._lists[step.tensors] = len(self._lists)
            self._write({"list": number, "tensors": step.tensors})
        self._write({"step": step.step, "list": number, "digests": base64.b64encode(step.digests).decode()})

    def keep(self, step: int, tensors: Mapping[str, Array]) -> None:
        """Write tensors of a step, as NumPy arrays.

        Raises:
            OSError: A file cannot be written.
        """
        path = self._folder / arrays_name(self._rank)
        bits = [x.view(np.uint16) if arrays.dtype_name(x.dtype) == "bfloat16" else x for x in tensors.values()]
        np.savez(path, *bits)
        self._write({"step": step, "kept": list(tensors)})

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        self._file.close()

    def _write(self, line: Mapping[str, object]) -> None:
        data = memoryview(json.dumps(line).encode() + b"\n")
        while data:
            data = data[self._file.write(data) :]


def steps_name(rank: int) -> str:
    """The name of a rank's file of digests."""
    return f"rank_{rank}.steps"


def arrays_name(rank: int) -> str:
    """The name of a rank's file of tensors."""
    return f"rank_{rank}.npz"


@dataclass
class RankSteps:
    """The records of one rank, read one after another.

    Attributes:
        path: The file.
        rank, size: The rank, and the number of ranks.
        run: The text of the run.
        kept: The names of the tensors that it kept, by step, as far as the file has been read.
        torn: Whether the file ends within a line, as that of a process that was killed may.
    """

    path: Path
    rank: int
    size: int
    run: str
    lines: Iterator[tuple[int, Any]] = field(repr=False)
    kept: dict[int, list[str]] = field(default_factory=dict)
    torn: bool = False

    def steps(self) -> Iterator[Step]:
        """The records in the order in which they were written; it can be read once.

        Raises:
            DivergenceError: A line is damaged, other than a last one that was not finished.
        """
        lists: dict[int, tuple[Tensor, ...]] = {}
        for number, line in self.lines:
            if line is None:
                self.torn = True
                return
            try:
                if "tensors" in line:
                    rows = line["tensors"]
                    lists[line["list"]] = tuple(Tensor(name, dtype, tuple(shape)) for name, dtype, shape in rows)
                elif "kept" in line:
                    self.kept[line["step"]] = list(line["kept"])
                else:
                    digests = base64.b64decode(line["digests"], validate=True)
                    step = Step(int(line["step"]), lists[line["list"]], digests)
                    if len(digests) != DIGEST_BYTES * len(step.tensors):
                        raise ValueError(f"{len(digests)} bytes of digests for {len(step.tensors)} tensors")
                    yield step
            except (KeyError, TypeError, ValueError) as exc:
                raise DivergenceError(f"line {number} of {self.path} is damaged: {exc!r}") from exc

    def tensor(self, step: int, tensor: Tensor) -> Array:
        """A tensor that was kept; call it when `steps` has been read to its end.

        Raises:
            DivergenceError: It was not kept, or its file is missing or damaged.
        """
        path = self.path.with_name(arrays_name(self.rank))
        if tensor.name not in self.kept.get(step, ()):
            raise DivergenceError(f"rank {self.rank} has not kept its tensors of step {step}")
        try:
            with open(path, "rb") as content, np.load(content, allow_pickle=False) as file:
                found = file[f"arr_{self.kept[step].index(tensor.name)}"]
            x = found.view(arrays.dtype_named(tensor.dtype)) if tensor.dtype == "bfloat16" else found
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as exc:
            raise DivergenceError(f"{path} cannot be read: {exc}") from exc
        if (arrays.dtype_name(x.dtype), x.shape) != (tensor.dtype, tensor.shape):
            raise DivergenceError(f"{path} has other tensors than {self.path.name} says")
        return x


def open_folder(folder: Path) -> tuple[list[RankSteps], list[int]]:
    """Open the records of all ranks in a folder.

    Returns:
        Those of the ranks that have some, in rank order, and the ranks that have none.

    Raises:
        DivergenceError: The folder cannot be read, has records of fewer than two ranks or of several runs, or a
            file is none of `DivergenceRecorder` or one of another version.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if re.fullmatch(r"rank_\d+\.steps", path.name))
    except OSError as exc:
        raise DivergenceError(f"{folder} cannot be read: {exc.strerror or exc}") from exc
    if not paths:
        raise DivergenceError(
            f"{folder} has no records of steps, files such as {steps_name(0)}; DivergenceRecorder(comm, FOLDER) "
            "writes them"
        )
    ranks = sorted((_open(path) for path in paths), key=lambda each: each.rank)
    first = ranks[0]
    for other in ranks[1:]:
        if (other.run, other.size) != (first.run, first.size):
            raise DivergenceError(
                f"{first.path} and {other.path} are of different runs; use one folder for each run"
            )
    if len(ranks) < 2:
        raise DivergenceError(
            f"{folder} has only the records of rank {first.rank} of {first.size}: nothing to compare; copy the "
            "files of all hosts into one folder"
        )
    return ranks, sorted({*range(first.size)} - {each.rank for each in ranks})


def _open(path: Path) -> RankSteps:
    lines = _lines(path)
    _, header = next(lines, (1, None))
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise DivergenceError(f"{path} was not written by DivergenceRecorder, or its first line is not complete")
    if header.get("version") != VERSION:
        raise DivergenceError(
            f"{path} has version {header.get('version')!r}, expected {VERSION}: read it with the version of "
            "bagua_comm that wrote it"
        )
    rank, size, run = (header.get(key) for key in ("rank", "size", "run"))
    if type(rank) is not int or type(size) is not int or path.name != steps_name(rank):
        raise DivergenceError(f"{path} has the records of rank {rank!r} of {size!r}: was it renamed?")
    return RankSteps(path, rank, size, str(run), lines)


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The lines with their numbers; None for a last one that is not complete."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    yield number, None
                    return
                try:
                    yield number, json.loads(line)
                except ValueError as exc:
                    raise DivergenceError(f"line {number} of {path} is damaged: {exc}") from exc
    except OSError as exc:
        raise DivergenceError(f"{path} cannot be read: {exc.strerror or exc}") from exc
