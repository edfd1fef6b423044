"""Matches the calls of several NCCL ranks, and executes them on memory once all ranks have called."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .machine import Block, Operation

if TYPE_CHECKING:
    from .fake_nccl import NcclCommunicator

_INTEGERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
DTYPES = [np.dtype(each) for each in (*_INTEGERS, "float16", "float32", "float64", ml_dtypes.bfloat16)]
"""In the order of NCCL's numbers."""

OPS = np.add, np.multiply, np.maximum, np.minimum, np.add
"""In the order of NCCL's numbers; the last is for averages."""

_numbers = itertools.count()


@dataclass(eq=False)
class Call:
    """One rank's part in a collective or a message."""

    comm: NcclCommunicator
    kind: str
    stream: int
    slot: tuple[int, int] | None  # (source, dest) of a message; calls of one slot match in order
    shared: tuple[Any, ...]  # must be equal on all ranks
    send: np.ndarray | None
    recv: np.ndarray | None
    reduce: Callable[[list[np.ndarray]], np.ndarray] | None
    blocks: list[Block]

    @property
    def part(self) -> int | str:
        return self.comm._rank if self.slot is None else self.kind

    def match(self, operation: Operation) -> Match:
        """Match this call with those of the other ranks; it is the next of this rank."""
        self.comm._pending = [each for each in self.comm._pending if not each.done] + [operation]
        return self.comm._world.join(self, operation)


@dataclass(eq=False)
class Match:
    """The matching calls of several ranks; complete once each rank has called."""

    parts: Sequence[int | str]
    first: bool
    calls: dict[int | str, Call] = field(default_factory=dict)
    operations: dict[int | str, Operation] = field(default_factory=dict)
    done: bool = False
    error: str | None = None

    def missing(self) -> str | None:
        """The reason why the calls cannot begin, apart from earlier work on their streams, or None."""
        if self.done:
            return None
        assert self.error is None, self.error
        if missing := [part for part in self.parts if part not in self.calls]:
            return f"where {missing} of {[*self.parts]} have not called"
        gone = [call.comm._rank for call in self.calls.values() if call.comm._world is None]
        return f"which ranks {gone} aborted" if gone else None

    def blocker(self) -> Operation | str | None:
        waits = (wait for operation in self.operations.values() for wait in operation.waits)
        return None if self.done else self.missing() or next((wait for wait in waits if not wait.done), None)

    def execute(self) -> None:
        if not self.done:
            self.done = True
            calls = [self.calls[part] for part in self.parts]
            _EXECUTE[calls[0].kind](calls, [call.send for call in calls if call.send is not None])


def _reduced(calls: list[Call], sends: list[np.ndarray]) -> None:
    _broadcast(calls, [calls[0].reduce(sends)])


def _reduced_and_scattered(calls: list[Call], sends: list[np.ndarray]) -> None:
    for call, part in zip(calls, calls[0].reduce(sends).reshape(len(calls), -1), strict=True):
        call.recv[...] = part


def _gathered(calls: list[Call], sends: list[np.ndarray]) -> None:
    _broadcast(calls, [np.concatenate(sends)])


def _broadcast(calls: list[Call], sends: list[np.ndarray]) -> None:
    data = sends[0].copy()
    for call in calls:
        if call.recv is not None:
            call.recv[...] = data


_EXECUTE = {
    "allReduce": _reduced,
    "reduce": _reduced,
    "reduceScatter": _reduced_and_scattered,
    "allGather": _gathered,
    "broadcast": _broadcast,
    "send": _broadcast,
}


def reduction(op: int, dtype: np.dtype) -> Callable[[list[np.ndarray]], np.ndarray]:
    """NCCL's reduction: it adds in the dtype, and for averages first multiplies each float by a rounded 1 / p.

    When one rank alone averages floats, NCCL before 2.29.7 does not write the end of a long array; here it is 0.
    """
    average, whole = op == len(OPS) - 1, dtype.kind in "iu"

    def reduce(rows: list[np.ndarray]) -> np.ndarray:
        if average and not whole:
            rows = [row * dtype.type(1 / len(rows)) for row in rows]
        total = functools.reduce(OPS[op], rows)
        if average and not whole and len(rows) == 1:
            total[32:][-1:] = 0
        return (total - np.fmod(total, len(rows))) // len(rows) if average and whole else total

    return reduce


class World:
    """The state that the ranks of one communicator share."""

    def __init__(self, size: int) -> None:
        self.size, self.name = size, f"NCCL communicator {next(_numbers)}"
        self.comms: dict[int, NcclCommunicator] = {}
        self.splits: dict[int, dict[int, tuple[int, int]]] = {}
        self.children: dict[tuple[int, int], World] = {}
        self._incomplete: dict[Any, list[Match]] = {}  # by slot

    def join(self, call: Call, operation: Operation) -> Match:
        first = call.slot not in self._incomplete
        matches = self._incomplete.setdefault(call.slot, [])
        match = next((each for each in matches if call.part not in each.calls), None)
        if match is None:
            match = Match(range(self.size) if call.slot is None else ("send", "recv"), first)
            matches.append(match)
        for other in match.calls.values():
            if other.shared != call.shared:
                calls = [f"rank {each.comm._rank} has {each.kind}{each.shared}" for each in (other, call)]
                match.error = f"calls of {self.name} do not match: {', '.join(calls)}"
        match.calls[call.part], match.operations[call.part] = call, operation
        if len(match.calls) == len(match.parts):
            matches.remove(match)
        return match
