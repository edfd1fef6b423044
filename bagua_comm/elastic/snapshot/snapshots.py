"""The copies of commits that a process keeps: its own, and what is the own of ranks whose buddy it is.

There are two sides, A and B. A commit writes the one that does not hold the newest commit, so that a death in the
middle leaves the other one whole everywhere.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays import Array
from ...checkpoint.trees import Json, Packed, Rule
from .slot import COMMITTED, Kind, Slot, Written, checksum, copy_into, offsets, views


class Held(NamedTuple):
    """A copy that a process holds, as it tells the others."""

    run: str
    """The name under which its ranks committed. It changes whenever training is entered."""
    version: int
    rank: int
    """Whose copy it is: a rank of those that committed."""
    ranks: int
    whole: bool
    """Whether everything is in it; a buddy holds only what is the rank's own."""
    committed: bool
    private: bool
    """Whether anything in it is the rank's own."""


@dataclass(frozen=True)
class Layout:
    """What the arrays of a commit are: first those that all ranks share, then those inside of `Own`."""

    kinds: tuple[Kind, ...]
    rules: tuple[Rule | None, ...]
    """For each array the rule of its `Own`; None if all ranks share it."""

    @classmethod
    def of(cls, packed: Packed) -> Layout:
        """The layout of a tree that was packed."""
        rules: list[Rule | None] = [None] * (len(packed.shared) + len(packed.own))
        for rule, node in zip(rules_of(packed.tree), packed.own_trees, strict=True):
            for number in _arrays_in(node):
                rules[len(packed.shared) + number] = rule
        return cls(tuple(Kind.of(leaf.array) for leaf in (*packed.shared, *packed.own)), tuple(rules))

    @classmethod
    def from_header(cls, header: dict[str, Any]) -> Layout:
        """The layout that a header tells."""
        kinds = tuple(Kind(name, tuple(shape)) for name, shape, _ in header["arrays"])
        return cls(kinds, tuple(rule for _, _, rule in header["arrays"]))

    def as_json(self) -> list[list[Any]]:
        """What goes into the header."""
        return [[kind.dtype, list(kind.shape), rule] for kind, rule in zip(self.kinds, self.rules, strict=True)]

    def digest(self) -> int:
        """Equal on ranks whose arrays are of the same kinds, in the same order."""
        return digest_of(json.dumps(self.as_json()))


def digest_of(text: str) -> int:
    """A number of 64 bits that tells texts apart."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def rules_of(tree: Json) -> list[Rule | None]:
    """The rules of the `Own` parts of a packed tree, in their order."""
    found: dict[int, Rule | None] = {}
    for node in _dicts_in(tree):
        if "own" in node and "reshape" in node:
            found[node["own"]] = node["reshape"]
    return [found[number] for number in sorted(found)]


def _arrays_in(tree: Json) -> list[int]:
    """The numbers of the arrays in a packed tree."""
    return [node[tag] for node in _dicts_in(tree) for tag in ("array", "scalar", "tensor") if tag in node]


def _dicts_in(node: Json) -> Iterator[dict[str, Any]]:
    """Every node of a packed tree that has a tag."""
    if isinstance(node, list):
        for item in node:
            yield from _dicts_in(item)
    elif isinstance(node, dict):
        yield node
        for item in node.values():
            if isinstance(item, list):
                yield from _dicts_in(item)


class Copy(NamedTuple):
    """A copy in a slot: its header, and its arrays by number."""

    version: int
    committed: bool
    whole: bool
    header: dict[str, Any]
    arrays: dict[int, Array]
    """Views of the slot's memory; of a buddy's copy only the arrays that are the rank's own."""

    @property
    def held(self) -> Held:
        """What the others are told of it."""
        header = self.header
        return Held(
            header["run"],
            self.version,
            header["rank"],
            header["ranks"],
            self.whole,
            self.committed,
            bool(header["private"] or header["texts_differ"]),
        )

    def is_sound(self) -> bool:
        """Whether every array still has the checksum that it was written with."""
        sums = self.header["sums"]
        return all(checksum(np.ascontiguousarray(x)) == sums[n] for n, x in self.arrays.items())


def copy_in(written: Written) -> Copy:
    """The copy that a slot holds."""
    header = written.header
    kinds = Layout.from_header(header).kinds
    numbers = range(len(kinds)) if header["whole"] else header["private"]
    there = views(written.data, [kinds[n] for n in numbers])
    found = dict(zip(numbers, there, strict=True))
    return Copy(written.version, written.mark == COMMITTED, header["whole"], header, found)


class Side:
    """One of the two sides: this process's own copy, and those of the ranks whose buddy it is.

    Args:
        name: "a" or "b".
        folder: Where the files of its slots lie; None for memory of this process.
        number: The number of this process.
    """

    def __init__(self, name: str, folder: Path | None, number: int) -> None:
        self._stem = None if folder is None else folder / f"slot-{number}-{name}"
        self.own = self._slot("own")
        self.guarded: list[Slot] = []
        while (path := self._path(f"for-{len(self.guarded)}")) is not None and path.exists():
            self.guarded.append(Slot(path))  # of a process of this number before a restart

    def _path(self, role: str) -> Path | None:
        return None if self._stem is None else self._stem.with_name(f"{self._stem.name}-{role}")

    def _slot(self, role: str) -> Slot:
        return Slot(self._path(role))

    def guard(self, count: int) -> list[Slot]:
        """Slots for the copies of so many ranks."""
        while len(self.guarded) < count:
            self.guarded.append(self._slot(f"for-{len(self.guarded)}"))
        return self.guarded[:count]

    def copies(self) -> list[Copy]:
        """All whole copies on this side."""
        found = [slot.read() for slot in (self.own, *self.guarded)]
        return [copy_in(each) for each in found if each is not None]

    def confirm(self, version: int, run: str) -> None:
        """Mark what was prepared for a commit as committed: a rank has committed it, so all had prepared it."""
        for slot in (self.own, *self.guarded):
            written = slot.read()
            if written is not None and (written.version, written.header["run"]) == (version, run):
                slot.commit()

    def version(self) -> int:
        """The version of the own copy, if it is committed; else -1."""
        found = self.own.read()
        return found.version if found is not None and found.mark == COMMITTED else -1

    def write(self, packed: Packed, layout: Layout) -> Draft:
        """Copy the arrays of a tree into this process's own slot.

        Raises:
            OSError: There is no room for them.
        """
        _, size = offsets(layout.kinds)
        data = self.own.begin(size)
        leaves = (*packed.shared, *packed.own)
        sums = [copy_into(out, leaf.array) for out, leaf in zip(views(data, layout.kinds), leaves, strict=True)]
        return Draft(packed, layout, sums, data, size)

    def close(self) -> None:
        """Let go of all slots."""
        for slot in (self.own, *self.guarded):
            slot.close()


@dataclass
class Draft:
    """An own copy that is being written: its arrays are in the slot, its header is not."""

    packed: Packed
    layout: Layout
    sums: list[int]
    data: npt.NDArray[np.uint8]
    size: int

    def texts(self) -> str:
        """Everything in the tree that is no array."""
        return json.dumps([self.packed.tree, self.packed.own_trees])

    def header(
        self, run: str, rank: int, ranks: int, private: Sequence[int], *, texts_differ: bool
    ) -> dict[str, Any]:
        """The header.

        Args:
            run: The name under which the ranks commit.
            rank: This rank.
            ranks: The number of ranks.
            private: The numbers of the arrays that are a rank's own: those in an `Own`, and those that differ.
            texts_differ: Whether what is no array differs between ranks.
        """
        return {
            "run": run,
            "rank": rank,
            "ranks": ranks,
            "whole": True,
            "tree": self.packed.tree,
            "own_trees": self.packed.own_trees,
            "arrays": self.layout.as_json(),
            "sums": self.sums,
            "private": list(private),
            "texts_differ": texts_differ,
        }


_NAME = re.compile(r"slot-(\d+)-[ab]-(own|for-\d+)")


def left_in(folder: Path, besides: int) -> list[Copy]:
    """The copies in a folder that other processes have written, also those that are gone.

    Args:
        folder: Where the slots of the processes of this host lie.
        besides: The number of this process, whose slots are left out.
    """
    found = []
    for path in sorted(folder.glob("slot-*")):
        name = _NAME.fullmatch(path.name)
        if name is not None and int(name[1]) != besides:
            written = Slot(path).read()
            if written is not None:
                found.append(copy_in(written))
    return found
