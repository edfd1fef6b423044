"""The records of the flight recorder, and their files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..errors import BaguaError
from .stacks import Frame, ThreadStack

VERSION = 1
"""The version of the files."""

WORLD = "world"
"""The name of the communicator of all ranks."""

LEFT_WELL = "its program ended, or it closed its communicator"
"""The reason of a rank that has left the world without an error."""

State: TypeAlias = Literal["queued", "started", "enqueued", "ended", "failed"]
"""queued: it waits on a lane. started: in progress. enqueued: the host has left it, and a device works on it.
ended, failed: it is over."""

Signature: TypeAlias = tuple[object, ...]
"""The properties that matching calls have in common."""

_UNLIKE = frozenset({"gather", "scatter", "alltoall"})
"""Collective calls whose arrays may differ between ranks if they have counts."""

COMPARED = ("codec", "average", "op", "root")
"""The arguments that all ranks must have in common."""


class FlightError(BaguaError):
    """A folder has no records of ranks, or a record cannot be read."""


def is_inside(group: str, of: str) -> bool:
    """Whether a communicator of this group was made from one of the group `of`, directly or not."""
    return group.startswith((f"{of}.", f"{of}/"))


def is_of(group: str, of: str) -> bool:
    """Whether a communicator of this group is that of the group `of`, or inside of it."""
    return group == of or is_inside(group, of)


@dataclass(frozen=True)
class Entry:
    """One call of a rank.

    Attributes:
        group: The name of the communicator, the same on all its ranks.
        number: The number of the collective call in this communicator, from 1, or of the other call; 0 if
            queued.
        collective: Whether all ranks of the communicator make it.
        name: The method.
        dtype, shape: Those of the array argument; empty without an array.
        detail: Further arguments: op, root, codec, and the like.
        bucket, step: The bucket of an engine and the training step; None outside of an engine.
        start_ns, end_ns: Its begin and end, in nanoseconds since the epoch; None before.
        enqueued: Whether the work is only enqueued on a device when the call ends.
        error: The error; None if it has not failed.
        method: The public method that made a failed call, if it is another one: `Checkpoints.save`.
    """

    group: str
    number: int
    collective: bool
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    detail: Mapping[str, Any] = field(default_factory=dict)
    bucket: int | None = None
    step: int | None = None
    start_ns: int | None = None
    end_ns: int | None = None
    enqueued: bool = False
    error: str | None = None
    method: str = ""

    @property
    def state(self) -> State:
        """The state of the call."""
        if self.error is not None:
            return "failed"
        if self.start_ns is None:
            return "queued"
        if self.end_ns is None:
            return "started"
        return "enqueued" if self.enqueued else "ended"

    @property
    def is_over(self) -> bool:
        """Whether the call has ended without an error."""
        return self.state in ("ended", "enqueued")

    @property
    def size(self) -> int:
        """The number of elements of its array."""
        return math.prod(self.shape)

    @property
    def signature(self) -> Signature:
        """The properties that are equal on all ranks that make the same call."""
        has_counts = "counts" in self.detail
        array = (self.dtype, None if has_counts and self.name in _UNLIKE else self.size) if self.dtype else ()
        others = (str(self.detail[key]) for key in COMPARED if key in self.detail)
        return (self.name, has_counts, *array, *others)

    @property
    def call(self) -> str:
        """The call with its arguments, as text."""
        parts = [f"{self.dtype}{list(self.shape)}"] if self.dtype else []
        parts += [f"{key}={value}" for key, value in self.detail.items()]
        return f"{self.name}({', '.join(parts)})"

    @property
    def short(self) -> str:
        """The call without its arguments, with its number, communicator, bucket and step."""
        return self._described(self.name)

    def __str__(self) -> str:
        return self._described(self.call)

    def _described(self, call: str) -> str:
        within = "" if self.bucket is None else f" (bucket {self.bucket}, step {self.step})"
        text = f"{numbered(call, self.number, self.group)}{within}"
        return f"{self.method} ({text})" if self.method else text


def share_counts(calls: Mapping[int, Entry], members: Sequence[int]) -> Mapping[int, Entry]:
    """The entries of one call, by rank. All have counts, of None, where the root of a gather or scatter may have.

    Args:
        calls: The entries that there are, by rank of the world; that of the root may be missing.
        members: The ranks of the communicator.
    """

    def may_have(entry: Entry) -> bool:
        root = entry.detail.get("root")
        if entry.name not in _UNLIKE or root is None:
            return False
        at_root = calls.get(members[root])
        return at_root is None or "counts" in at_root.detail

    return {
        rank: replace(entry, detail={"counts": None, **entry.detail}) if may_have(entry) else entry
        for rank, entry in calls.items()
    }


def differences(expected: Entry, found: Entry) -> str:
    """The differences between two calls of one name."""
    ways = []
    if expected.dtype != found.dtype:
        ways.append(f"dtypes differ ({expected.dtype} and {found.dtype})")
    if ("counts" in expected.detail) != ("counts" in found.detail):
        ways.append("only one has counts")
    elif expected.size != found.size:
        ways.append(f"sizes differ ({expected.size} and {found.size} elements)")
    ways += [
        f"{key} differs ({expected.detail.get(key)} and {found.detail.get(key)})"
        for key in COMPARED
        if str(expected.detail.get(key)) != str(found.detail.get(key))
    ]
    return ", ".join(ways)


def numbered(call: str, number: int, group: str) -> str:
    """A call with its number in its communicator, as all messages show it; without a number if that is 0."""
    of = f" of {group}" if group != WORLD else ""
    return f"{call} #{number}{of}" if number else f"{call}{of}"


@dataclass(frozen=True)
class RecordedFailure:
    """An error on a rank."""

    kind: str
    """The class of the error."""
    message: str
    ranks: tuple[int, ...] = ()
    """The dead ranks that the error names."""


@dataclass(frozen=True)
class RankRecord:
    """The record of one rank.

    Attributes:
        job: The name of the job, the same on all ranks.
        rank, size: The rank in the world, and the number of ranks.
        host, pid: The process of the rank.
        written_ns: The time of this record, in nanoseconds since the epoch.
        groups: The members of each communicator that it belongs to, as ranks of the world.
        entries: Its last calls, in the order in which they began.
        queued: The calls that wait on its lanes.
        failures: Its first errors, in order.
        left: The reason for leaving the world; None if it has not left.
        steps: The number of training steps that the rank has begun, by the communicator of their engine.
        stacks: The Python stacks of its threads, those with lines of the user's program first.
        plans: For each communicator whose calls follow an agreed plan, the position of its last call, from 1, and
            the number of calls.
        slow: What was slow in training, as text, with its ranks.
    """

    job: str
    rank: int
    size: int
    host: str
    pid: int
    written_ns: int
    groups: Mapping[str, tuple[int, ...]]
    entries: tuple[Entry, ...]
    queued: tuple[Entry, ...] = ()
    failures: tuple[RecordedFailure, ...] = ()
    left: str | None = None
    steps: Mapping[str, int] = field(default_factory=dict)
    stacks: tuple[ThreadStack, ...] = ()
    plans: Mapping[str, Sequence[int]] = field(default_factory=dict)
    slow: Sequence[tuple[str, Sequence[int]]] = ()

    @property
    def who(self) -> str:
        """The name of the rank in messages."""
        return f"rank {self.rank}"

    def open_call(self) -> tuple[str, float] | None:
        """The latest call that had not ended, and how many seconds it had lasted; None without one."""
        for entry in reversed(self.entries):
            if entry.start_ns is not None and not entry.is_over:
                return numbered(entry.name, entry.number, entry.group), (self.written_ns - entry.start_ns) / 1e9
        return None

    def to_json(self) -> str:
        """The content of the rank's file."""
        parts = {key: [[*vars(each).values()] for each in getattr(self, key)] for key in _ROWS}
        return json.dumps({"version": VERSION, **vars(self), **parts}, default=str)

    @classmethod
    def from_json(cls, text: str) -> RankRecord:
        """The record that `to_json` wrote.

        Raises:
            FlightError: It was not written by `to_json`, or by another version.
        """
        try:
            found = json.loads(text)
            version = found.pop("version")
            if version != VERSION:
                raise FlightError(f"the record has version {version}, expected {VERSION}")
            for key, kind in _ROWS.items():
                found[key] = tuple(kind(*map(_frozen, row)) for row in found[key])
            found["groups"] = {name: tuple(ranks) for name, ranks in found["groups"].items()}
            found["stacks"] = tuple(
                ThreadStack(name, tuple(Frame(*frame) for frame in frames)) for name, frames in found["stacks"]
            )
            return cls(**found)
        except FlightError:
            raise
        except Exception as exc:
            raise FlightError(f"this is not the record of a rank: {exc!r}") from exc


_ROWS: dict[str, type[Entry | RecordedFailure]] = {"entries": Entry, "queued": Entry, "failures": RecordedFailure}
"""The fields of a record that are lists of objects; in the file each object is the list of its values."""


def _frozen(value: object) -> Any:
    return tuple(value) if isinstance(value, list) else value


def file_name(rank: int) -> str:
    """The name of a rank's file in the folder of its job."""
    return f"rank_{rank}.json"


def read_folder(folder: Path) -> list[RankRecord]:
    """The records of all ranks in a folder, in rank order.

    Args:
        folder: The folder of a job, or its parent: then the records of the latest job are read.

    Raises:
        FlightError: There is no such folder, it has no record, or a record cannot be read.
    """
    found = _records_in(folder)
    if not found:
        jobs = sorted((path for path in _inside(folder) if path.is_dir() and _records_in(path)), key=_written)
        if not jobs:
            raise FlightError(f"{folder} has no records of ranks, files such as {file_name(0)}")
        found = _records_in(jobs[-1])
    records = []
    for path in found:
        try:
            records.append(RankRecord.from_json(path.read_text()))
        except (OSError, UnicodeDecodeError, FlightError) as exc:
            raise FlightError(f"{path}: {exc}") from exc
    return sorted(records, key=lambda record: record.rank)


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as exc:
        raise FlightError(f"{folder} cannot be read: {exc.strerror or exc}") from exc


def _records_in(folder: Path) -> list[Path]:
    return [path for path in _inside(folder) if re.fullmatch(r"rank_\d+\.json", path.name)]


def _written(folder: Path) -> float:
    return max(path.stat().st_mtime for path in _records_in(folder))
