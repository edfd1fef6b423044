"""The snapshots that a process holds: its own, and the private state of ranks whose buddy it is.

There are two buffers, A and B. A commit writes the one that does not hold the newest commit, so that a death in
the middle of it leaves the other one intact everywhere.

A process has its own parts with a rule, such as slabs, once only, in `OwnParts`. They are written last, when all
ranks have prepared the commit: then the buddies have them in both buffers. Until then the arrays of the program
stand for them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...arrays import Array
from ...checkpoint.trees import Json, Packed, Rule, Slab
from .slot import COMMITTED, ArraySpec, Header, Slot, SlotContent, checksum, copy_into, offsets, on_host, views


class SnapshotInfo(NamedTuple):
    """Description of a snapshot, as its holder reports it to the other processes."""

    run: str
    """The run of training in which it was committed. A new run begins whenever training is entered."""
    version: int
    rank: int
    """The rank, at the commit, whose state it holds."""
    ranks: int
    whole: bool
    """Whether it has the shared state; a buddy holds only the private state of the rank."""
    committed: bool
    private: bool
    """Whether the rank has any private state."""
    has_private: bool
    """Whether it has all of that."""


@dataclass(frozen=True)
class Layout:
    """The arrays of a commit: first those outside of any `Own`, then those inside, then slabs."""

    specs: tuple[ArraySpec, ...]
    rules: tuple[Rule | None, ...]
    """For each array the rule of its `Own`; None outside of an `Own`, "concatenate" for slabs."""

    @classmethod
    def of(cls, packed: Packed) -> Layout:
        """The layout of a packed tree."""
        leaves = packed.leaves
        return cls(tuple(ArraySpec.of(leaf.array) for leaf in leaves), tuple(leaf.rule for leaf in leaves))

    @classmethod
    def from_header(cls, header: Header) -> Layout:
        """The layout that a header describes."""
        specs = tuple(ArraySpec(name, tuple(shape)) for name, shape, _ in header["arrays"])
        return cls(specs, tuple(rule for _, _, rule in header["arrays"]))

    @property
    def shared(self) -> Layout:
        """The arrays outside of any `Own`: inside, ranks may have different ones."""
        return self._first(sum(rule is None for rule in self.rules))

    @property
    def unsharded(self) -> Layout:
        """All arrays but slabs, of which ranks may have longer and shorter ones."""
        return self._first(sum(rule != "concatenate" for rule in self.rules))

    def _first(self, count: int) -> Layout:
        return Layout(self.specs[:count], self.rules[:count])

    def as_json(self) -> list[Json]:
        """The layout as it is written into a header."""
        return [[spec.dtype, list(spec.shape), rule] for spec, rule in zip(self.specs, self.rules, strict=True)]

    def digest(self) -> int:
        """A hash of 64 bits; equal on ranks whose arrays have the same dtypes, shapes and rules."""
        return digest_of(json.dumps(self.as_json()))


def digest_of(text: str) -> int:
    """A hash of 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Snapshot(NamedTuple):
    """A snapshot in a slot: its header, and its arrays by number."""

    version: int
    committed: bool
    whole: bool
    header: Header
    arrays: dict[int, Array]
    """Views of the slot's memory; a buddy's snapshot has only the private arrays."""

    @property
    def key(self) -> tuple[str, int, int]:
        """The run, the commit, and the rank whose state it is."""
        return self.header["run"], self.version, self.header["rank"]

    @property
    def has_private(self) -> bool:
        """Whether it has all private arrays."""
        return self.arrays.keys() >= {*self.header["private"]}

    @property
    def info(self) -> SnapshotInfo:
        """The description for the other processes."""
        header = self.header
        return SnapshotInfo(
            header["run"],
            self.version,
            header["rank"],
            header["ranks"],
            self.whole,
            self.committed,
            bool(header["private"] or header["texts_differ"]),
            self.has_private,
        )


def slabs_of(header: Header, arrays_of: Mapping[int, Array] | Sequence[Array | None]) -> list[Slab]:
    """The slabs of a snapshot, from its arrays by number."""
    first = len(header["arrays"]) - len(header["slabs"])
    pairs = enumerate(header["slabs"], first)
    return [Slab(path, arrays_of[n], *rest) for n, (path, *rest) in pairs]


def snapshot_of(content: SlotContent) -> Snapshot:
    """The snapshot in a slot."""
    header = content.header
    specs = Layout.from_header(header).specs
    found = dict(zip(header["held"], views(content.data, [specs[n] for n in header["held"]]), strict=True))
    return Snapshot(content.version, content.state == COMMITTED, header["whole"], header, found)


def joined(found: Sequence[Snapshot], parts: Sequence[Snapshot]) -> Sequence[Snapshot]:
    """The snapshots of a process; those with the shared state get the arrays of the same commit among `parts`."""
    arrays = {each.key: each.arrays for each in reversed(parts)}
    return [
        each._replace(arrays={**each.arrays, **arrays.get(each.key, {})}) if arrays and each.whole else each
        for each in found
    ]


class OwnParts:
    """The parts of this process with a rule, in one slot, which is written when all ranks have prepared a commit.

    Args:
        folder: The folder of the file; None for memory of this process.
        number: The number of this process.
    """

    def __init__(self, folder: Path | None, number: int) -> None:
        self.slot = Slot(None if folder is None else folder / f"slot-{number}-parts")
        self.live: Snapshot | None = None
        """The parts of a commit that not all ranks may have prepared, in arrays of the program."""

    def prepare(self, pending: PendingSnapshot, header: Header, version: int) -> None:
        """Provide the memory for the parts of a commit. The arrays of the program stand for them until `settle`.

        Raises:
            OSError: There is not enough memory.
        """
        held = [*range(pending.count, len(pending.arrays))]
        self.live = Snapshot(
            version, False, False, {**header, "whole": False, "held": held}, {n: pending.arrays[n] for n in held}
        )
        self.slot.reserve(offsets(pending.layout.specs[pending.count :])[1], len(json.dumps(header)))

    def settle(self, version: int, run: str) -> None:
        """Write the parts that were prepared for this commit, as all ranks have prepared it; forget others."""
        live, self.live = self.live, None
        if live is None or (live.version, live.header["run"]) != (version, run):
            return
        specs = [ArraySpec.of(x) for x in live.arrays.values()]
        _, size = offsets(specs)
        for out, x in zip(views(self.slot.begin(size), specs), live.arrays.values(), strict=True):
            out[...] = x
        self.slot.finish(version, live.header, size)
        self.slot.commit()

    def snapshots(self) -> list[Snapshot]:
        """Those parts, as far as they can be read."""
        content = self.slot.read()
        found = [] if content is None else [snapshot_of(content)]
        return found if self.live is None else [self.live, *found]


class Buffer:
    """One of the two buffers: the snapshot of this process, and those of the ranks whose buddy it is.

    Args:
        name: "a" or "b".
        folder: The folder of the files of its slots; None for memory of this process.
        number: The number of this process.
        own: The parts with a rule of this process, of the newest commit in both buffers.
    """

    def __init__(self, name: str, folder: Path | None, number: int, own: OwnParts) -> None:
        self.own = own
        self._stem = None if folder is None else folder / f"slot-{number}-{name}"
        self.local = Slot(self._path("own"))
        self.peers: list[Slot] = []
        while (path := self._path(f"for-{len(self.peers)}")) is not None and path.exists():
            self.peers.append(Slot(path))  # of a process of this number before a restart

    def _path(self, role: str) -> Path | None:
        return None if self._stem is None else self._stem.with_name(f"{self._stem.name}-{role}")

    def _slots(self) -> list[Slot]:
        return [self.local, *self.peers]

    def peer_slots(self, count: int) -> list[Slot]:
        """Slots for the snapshots of `count` other ranks."""
        while len(self.peers) < count:
            self.peers.append(Slot(self._path(f"for-{len(self.peers)}")))
        return self.peers[:count]

    def snapshots(self) -> list[Snapshot]:
        """All readable snapshots in this buffer."""
        found = [slot.read() for slot in self._slots()]
        return [*joined([snapshot_of(each) for each in found if each is not None], self.own.snapshots())]

    def confirm(self, version: int, run: str) -> None:
        """Mark the snapshots prepared for a commit as committed: one rank has committed, so all had prepared."""
        for slot in self._slots():
            content = slot.read()
            if content is not None and (content.version, content.header["run"]) == (version, run):
                slot.commit()
        self.own.settle(version, run)

    def write(self, packed: Packed, count: int) -> PendingSnapshot:
        """Copy the first `count` arrays of a packed tree into the local slot.

        Raises:
            OSError: There is not enough memory.
        """
        layout, leaves = Layout.of(packed), [leaf.array for leaf in packed.leaves]
        _, size = offsets(layout.specs[:count])
        copies, live = views(self.local.begin(size), layout.specs[:count]), [*map(on_host, leaves[count:])]
        sums = [copy_into(out, x) for out, x in zip(copies, leaves, strict=False)]
        return PendingSnapshot(packed, layout, [*sums, *map(checksum, live)], [*copies, *live], count, size)

    def close(self) -> None:
        """Free all slots, and remove their files."""
        for slot in (*self._slots(), self.own.slot):
            slot.close()


@dataclass
class PendingSnapshot:
    """A local snapshot that is being written: its arrays are in the slot, its header is not."""

    packed: Packed
    layout: Layout
    sums: list[int]
    arrays: list[Array]
    """The first `count` are views of the slot, the others those of the program, if they are on the host."""
    count: int
    size: int
    """Bytes of data in the slot."""

    def texts(self) -> str:
        """Everything in the tree except arrays."""
        return json.dumps([self.packed.tree, self.packed.own_trees])

    def header(self, run: str, rank: int, ranks: int, private: Sequence[int], *, texts_differ: bool) -> Header:
        """The header of the snapshot.

        Args:
            run: The run of training.
            rank: This rank.
            ranks: The number of ranks.
            private: The numbers of the private arrays: in an `Own`, slabs, and those that differ between ranks.
            texts_differ: Whether anything except arrays differs between ranks.
        """
        return {
            "run": run,
            "rank": rank,
            "ranks": ranks,
            "whole": True,
            "held": [*range(self.count)],
            "tree": self.packed.tree,
            "own_trees": self.packed.own_trees,
            "arrays": self.layout.as_json(),
            "slabs": [[each.path, each.axis, each.begin, each.total] for each in self.packed.slabs],
            "sums": self.sums,
            "private": list(private),
            "texts_differ": texts_differ,
        }


_log = logging.getLogger(__name__)

_NAME = re.compile(r"slot-(\d+)-(parts|[ab]-own|[ab]-for-\d+)")


def _slot_files(folder: Path) -> Iterator[tuple[Path, int]]:
    """The files of slots in a folder, and the number of the process to which each belongs."""
    for path in sorted(folder.glob("slot-*")):
        name = _NAME.fullmatch(path.name)
        if name is not None:
            yield path, int(name[1])


def snapshots_in(folder: Path, except_of: int) -> list[Snapshot]:
    """The snapshots in a folder that other processes have written, dead ones included.

    Those that this process cannot open are left out, with a warning: others may have the same commit.

    Args:
        folder: The folder of the slots of all processes of this host.
        except_of: The number of this process, whose slots are skipped.
    """
    found: dict[int, list[Snapshot]] = {}
    for path, number in _slot_files(folder):
        if number != except_of:
            try:
                content = Slot(path).read()
            except OSError as exc:  # too many open files, say
                _log.warning("the snapshot %s cannot be read, and is left out: %s", path, exc)
                continue
            if content is not None:
                found.setdefault(number, []).append(snapshot_of(content))
    return [each for of_process in found.values() for each in joined(of_process, of_process)]


def remove_slots(folder: Path, except_of: Collection[int]) -> None:
    """Remove the slots of all processes but these from a folder. Whoever has mapped one can still use it."""
    for path, number in _slot_files(folder):
        if number not in except_of:
            path.unlink(missing_ok=True)
