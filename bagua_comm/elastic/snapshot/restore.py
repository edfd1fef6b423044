"""Restoring a commit: from the snapshots of the living processes to the state of the next trainers.

    newest          find the newest commit that can be reconstructed, and who holds which part of it
    Restore         gives all next trainers the shared state, and private state according to its rules

If as many ranks train as committed, each receives the private state of its rank, wherever a snapshot of it is
left. On another number of ranks the rules of `Own` apply. Unmarked arrays of floats that differ have the rule
"mean", all other unmarked values the rule "first". Of a sharded array each rank receives an even slab, in
pieces from the processes that hold them.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ... import arrays
from ...arrays import Array
from ...checkpoint.trees import Own, Rule, Slab, Unpacker
from ...comm import Communicator
from ...errors import CommAborted
from . import parts
from .shards import Held, LostStateError, even, redistribute
from .slot import ArraySpec, Header, checksum
from .snapshots import Layout, Snapshot, SnapshotInfo, slabs_of

_log = logging.getLogger(__name__)

INITIAL = 0
"""The number of the commit that holds the initial state, that of rank 0, without the `Own` parts."""
PIECE = 1 << 22
"""Bytes of one message."""


@dataclass(frozen=True)
class Sources:
    """A commit, and the processes that hold it, as ranks of the communicator of all living processes."""

    run: str
    version: int
    ranks: int
    """The number of ranks that committed."""
    complete: tuple[int, ...]
    """The processes with a complete snapshot."""
    holders: Mapping[int, Sequence[int]]
    """For every rank of the commit, the processes that hold its private state; the first one gives it."""
    missing: tuple[int, ...] = ()
    """Ranks of the commit whose private state is lost."""


def newest(rows: Sequence[Sequence[SnapshotInfo]]) -> Sources | None:
    """The newest commit that can be reconstructed; otherwise the newest whose shared state is left.

    A commit that has lost private state is better than `INITIAL`, which has none: the other ranks would keep
    what they have changed in a step that is undone.

    Args:
        rows: The snapshots of every living process.
    """
    found = {(each.version, each.run) for row in rows for each in row if each.committed}
    partial: Sources | None = None
    for version, run in sorted(found, reverse=True):
        sources = _sources(rows, version, run)
        if sources is not None and not sources.missing and (version != INITIAL or partial is None):
            return sources
        partial = partial or sources
    return partial


def _sources(rows: Sequence[Sequence[SnapshotInfo]], version: int, run: str) -> Sources | None:
    infos = [(process, each) for process, row in enumerate(rows) for each in row]
    infos = [(process, each) for process, each in infos if (each.version, each.run) == (version, run)]
    # A prepared snapshot is as good: no rank commits before all have prepared.
    complete = tuple(sorted({process for process, each in infos if each.whole}))
    committed = [each for _, each in infos if each.committed]
    if not complete or not committed:
        return None
    holders: dict[int, list[int]] = {}
    for process, each in sorted(infos, key=lambda pair: (not pair[1].whole, pair[0])):
        if each.has_private and process not in holders.setdefault(each.rank, []):
            holders[each.rank].append(process)
    ranks = committed[0].ranks
    needed = range(ranks) if any(each.private for each in committed) else ()
    return Sources(run, version, ranks, complete, holders, tuple(r for r in needed if r not in holders))


class Content(NamedTuple):
    """A restored commit, for the rank that loads it."""

    header: Header
    """The header of a snapshot, with the tree and the trees of its `Own` parts."""
    arrays: list[Array | None]
    """None for dropped arrays."""
    slabs: list[Slab]
    """This rank's slabs of sharded arrays."""
    dropped: bool
    """Whether the parts with rule "drop" are lost."""

    def tree(self) -> Any:
        """The tree, with its `Own` parts and slabs. Its arrays are copies, which objects may keep."""
        shared = len(Layout.from_header(self.header).shared.specs)

        def array_at(number: int) -> Array:
            found = self.arrays[number]
            assert found is not None
            return found.copy()

        def own(number: int, rule: Rule | None, path: str) -> Own:
            if rule == "drop" and self.dropped:
                return Own(None, rule)
            inner = Unpacker(lambda n: array_at(shared + n), from_array=parts.restored)
            return Own(inner.unpack(self.header["own_trees"][number]), rule)

        def slab_at(number: int) -> Array:
            slab = self.slabs[number]
            return slab._replace(array=slab.array.copy())

        return Unpacker(array_at, own, parts.restored, slab_at).unpack(self.header["tree"])


class Restore:
    """Gives a commit to the next trainers.

    Args:
        everyone: All living processes.
        sources: The commit; see `newest`.
        snapshots: The snapshots of this process.
        trainers: The ranks in `everyone` of the next trainers, by their next ranks.
        hosts: The hosts of all living processes.
    """

    def __init__(
        self,
        everyone: Communicator,
        sources: Sources,
        snapshots: Sequence[Snapshot],
        trainers: Sequence[int],
        hosts: Sequence[Hashable],
    ) -> None:
        self._comm, self._trainers, self._hosts = everyone, list(trainers), hosts
        holders = {  # each rank's own copy first
            rank: sorted(each, key=lambda process: process not in trainers[rank : rank + 1])
            for rank, each in sources.holders.items()
        }
        self._sources = replace(sources, holders=holders)
        held = [
            each for each in snapshots if (each.version, each.header["run"]) == (sources.version, sources.run)
        ]
        self._complete = next((each for each in held if each.whole and _has_intact_shared(each)), None)
        self._copies: dict[int, list[Snapshot]] = {}
        """The snapshots of each rank; the first one is used."""
        for each in sorted((each for each in held if each.has_private), key=lambda each: not each.whole):
            self._copies.setdefault(each.header["rank"], []).append(each)
        self._new_rank = self._trainers.index(everyone.rank) if everyone.rank in self._trainers else None

    def run(self) -> Content | None:
        """Return the content of the commit for this process; None if it does not train.

        Collective among all living processes.

        Raises:
            CommError: A process died meanwhile, or a message is damaged; then all processes repeat this.
            LostStateError: No process holds a part of a sharded array, or any private state that can replace what
                is lost, or an intact copy of the shared state; on all processes.
        """
        comm = self._comm
        intact = comm.allgather_object(self._complete is not None)
        if not any(intact):
            raise LostStateError(f"the shared state in commit {self._sources.version}: all copies are damaged")
        complete = tuple(process for process, has in enumerate(intact) if has)
        sources = self._sources = replace(self._sources, complete=complete)
        first, (source, *_) = min(sources.holders.items(), default=(0, sources.complete))
        mine = next(iter(self._copies.get(first, [])), self._complete)
        header = comm.broadcast_object(None if mine is None else mine.header, root=source)
        self._header = header
        self._specs = Layout.from_header(header).specs
        self._private = set(header["private"])
        found = self._restore_shared()
        same_size, lost = sources.ranks == len(self._trainers), sources.missing
        if self._private:
            sources = self._sources = self._without_damaged()
        dropped, slabs = not same_size, None
        if self._private or header["texts_differ"]:
            if not same_size or sources.missing:
                slabs = self._reshard(lost) if header["slabs"] else []
                self._combine(found, same_size=same_size)
            if same_size:
                header = self._restore_private(found)
                dropped = self._new_rank in sources.missing
        if self._new_rank is None:
            return None
        return Content(header, found, slabs_of(header, found) if slabs is None else slabs, dropped=dropped)

    # Sharded state ----------------------------------------------------------------------------------

    def _reshard(self, lost: Sequence[int]) -> list[Slab]:
        """Give every trainer an even slab of each sharded array; no process has those of `lost`. Collective."""
        count, kinds = len(self._header["slabs"]), slabs_of(self._header, [*map(_empty, self._specs)])
        held: list[list[Held]] = [[] for _ in range(count)]
        for snapshot in (each for copies in self._copies.values() for each in copies):
            sums = snapshot.header["sums"][-count:]
            for has, slab, expected in zip(held, slabs_of(snapshot.header, snapshot.arrays), sums, strict=False):
                has.append((slab, expected))
        ranks, rank = len(self._trainers), self._new_rank
        wanted = None if rank is None else [even(each.total, ranks)[rank] for each in kinds]
        try:
            return redistribute(self._comm, kinds, held, wanted)
        except LostStateError as exc:
            cause = f"which ranks {[*lost]} held" if lost else "all copies are damaged"
            raise LostStateError(f"{exc}, in commit {self._sources.version}; {cause}") from None

    # Shared state -----------------------------------------------------------------------------------

    def _restore_shared(self) -> list[Array | None]:
        """The shared arrays, from a snapshot of this process, or else from the nearest holder."""
        numbers = [n for n in range(len(self._specs)) if n not in self._private]
        found: list[Array | None] = [None] * len(self._specs)
        mine, receivers = self._complete, [each for each in self._trainers if each not in self._sources.complete]
        for n in numbers:
            if mine is not None:
                found[n] = mine.arrays[n]
            elif self._new_rank is not None:
                found[n] = _empty(self._specs[n])
        moves = [(self._nearest(process), process) for process in receivers]
        local = [x for n in numbers if (x := found[n]) is not None]
        self._move(moves, local, local)
        if self._comm.rank in receivers:
            self._check(numbers, found, self._header["sums"])
        return found

    def _nearest(self, process: int) -> int:
        """The holder that sends shared state to a process: on its host if possible, and each in turn."""
        hosts, holders = self._hosts, self._sources.complete
        near = [holder for holder in holders if hosts[holder] == hosts[process]] or list(holders)
        return near[process % len(near)]

    def _move(self, moves: Sequence[tuple[int, int]], out: Sequence[Array], into: Sequence[Array]) -> None:
        """Send arrays in pieces for every (source, dest): `out` on the source, to `into` on the destination."""
        rank = self._comm.rank
        for source, dest in moves:
            if rank == source and source != dest:
                for piece in _pieces(out):
                    self._comm.send(piece, dest=dest)
            elif rank == dest and source != dest:
                for piece in _pieces(into):
                    self._comm.recv(piece, source=source)

    def _check(self, numbers: Sequence[int], found: Sequence[Array | None], sums: Sequence[int]) -> None:
        for n in numbers:
            x = found[n]
            if x is not None and checksum(x) != sums[n]:
                raise CommAborted(f"array {n} of commit {self._sources.version} arrived damaged")

    # Private state ----------------------------------------------------------------------------------

    def _without_damaged(self) -> Sources:
        """The commit without damaged copies of private state, in whose place the next are used. Collective."""
        holders = unchecked = self._sources.holders
        while unchecked:
            mine = [n for n, processes in unchecked.items() if processes[0] == self._comm.rank]
            damaged = [n for n in mine if not self._has_intact(n)]
            found = {n for row in self._comm.allgather_object(damaged) for n in row}
            unchecked = {n: holders[n][1:] for n in found if len(holders[n]) > 1}
            holders = {n: each for n, each in holders.items() if n not in found} | unchecked
        missing = {*self._sources.missing, *(self._sources.holders.keys() - holders.keys())}
        return replace(self._sources, holders=holders, missing=tuple(sorted(missing)))

    def _has_intact(self, rank: int) -> bool:
        """Whether this process has a copy of the private state of a rank with its checksums; drops the others."""
        copies = self._copies[rank]
        while copies and not _is_intact(copies[0], copies[0].header["private"]):
            del copies[0]
        return bool(copies)

    def _restore_private(self, found: list[Array | None]) -> Header:
        """Give every rank its private state, unless it is lost; returns the header of this rank."""
        comm, sources = self._comm, self._sources
        header = self._header
        for rank, process in enumerate(self._trainers):
            if rank in sources.missing:
                continue
            source = sources.holders[rank][0]
            if comm.rank == source == process:
                snapshot = self._copies[rank][0]
                header = snapshot.header
                found += [None] * len(header["arrays"])  # it may have more than others
                for n in header["private"]:
                    found[n] = snapshot.arrays[n]
            elif comm.rank == source:
                snapshot = self._copies[rank][0]
                comm.send_object(snapshot.header, dest=process)
                self._move([(source, process)], [snapshot.arrays[n] for n in snapshot.header["private"]], ())
            elif comm.rank == process:
                header = comm.recv_object(source=source)
                specs = Layout.from_header(header).specs
                into = {n: _empty(specs[n]) for n in header["private"]}
                self._move([(source, process)], (), list(into.values()))
                found += [None] * len(specs)
                for n, x in into.items():
                    found[n] = x
                self._check(list(into), found, header["sums"])
        return header

    def _combine(self, found: list[Array | None], *, same_size: bool) -> None:
        """Merge the private arrays of all ranks, by the rule of each.

        Args:
            found: Receives the merged arrays.
            same_size: Whether they are only for ranks whose private state is lost; the others keep theirs.
        """
        comm, sources = self._comm, self._sources
        ranks, layout = sorted(sources.holders), Layout.from_header(self._header)
        private = [n for n in sorted(self._private) if layout.rules[n] != "concatenate"]
        if sources.missing and (private or self._header["texts_differ"]):
            _log.warning(
                "the private state of ranks %s in commit %d is lost; %s",
                list(sources.missing),
                sources.version,
                "they get that of the other ranks, merged"
                if same_size
                else "that of the other ranks replaces it",
            )
        held = {rank: self._copies[rank][0] for rank in ranks if sources.holders[rank][0] == comm.rank}
        layouts = [Layout.from_header(snapshot.header) for snapshot in held.values()]
        flags = [
            all(each.unsharded == layout.unsharded for each in layouts),
            all(each.shared == layout.shared for each in layouts),
        ]
        all_alike, shared_alike = comm.allreduce(np.array(flags, np.uint8), op="min").astype(bool).tolist()
        for n in private:
            spec, rule = self._specs[n], layout.rules[n]
            if rule == "drop":
                continue
            # Arrays of different dtypes or shapes cannot be merged: then all are those of one rank.
            alike = shared_alike if rule is None else all_alike
            first = ranks[0] if alike and ranks else int(self._header["rank"])
            if first not in ranks:
                raise LostStateError(f"the private state of rank {first} in commit {sources.version}")
            if rule is None:
                rule = "mean" if _is_inexact(spec) else "first"
            if rule == "first" or not alike or not _is_inexact(spec):
                x = held[first].arrays[n].copy() if first in held else _empty(spec)
                for piece in _pieces([x]):
                    comm.broadcast(piece, root=sources.holders[first][0])
            elif rule == "sum" and same_size:
                x = np.zeros_like(_empty(spec))  # the other ranks keep the remaining sum
            else:
                addends = [snapshot.arrays[n] for snapshot in held.values()]
                x = _total(comm, spec, addends, len(ranks) if rule == "mean" else len(self._trainers))
            found[n] = x


def _total(comm: Communicator, spec: ArraySpec, addends: Sequence[Array], divisor: int) -> Array:
    """The sum of all processes' addends divided by `divisor`, in double precision, in pieces. Collective."""
    out = _empty(spec)
    wide = np.complex128 if out.dtype.kind == "c" else np.float64
    flat, rows = out.reshape(-1), [x.reshape(-1) for x in addends]
    for begin in range(0, flat.size, PIECE // 8):
        part = flat[begin : begin + PIECE // 8]
        total = np.zeros(part.size, wide)
        for row in rows:
            total += row[begin : begin + part.size].astype(wide)
        comm.allreduce(total, out=total)
        part[...] = (total / divisor).astype(out.dtype)
    return out


def _has_intact_shared(snapshot: Snapshot) -> bool:
    """Whether the shared arrays of a snapshot have their checksums."""
    return _is_intact(snapshot, {*snapshot.header["held"]} - {*snapshot.header["private"]})


def _is_intact(snapshot: Snapshot, numbers: Iterable[int]) -> bool:
    """Whether these arrays of a snapshot have their checksums."""
    sums = snapshot.header["sums"]
    return all(checksum(snapshot.arrays[n]) == sums[n] for n in numbers)


def _is_inexact(spec: ArraySpec) -> bool:
    return spec.dtype in arrays.FLOATS | arrays.COMPLEX


def _empty(spec: ArraySpec) -> Array:
    return np.empty(spec.shape, arrays.dtype_named(spec.dtype))


def _pieces(xs: Sequence[Array]) -> list[Array]:
    """The bytes of contiguous arrays, as views of at most `PIECE` bytes."""
    rows = [arrays.as_bytes(x) for x in xs]
    return [row[at : at + PIECE] for row in rows for at in range(0, row.size, PIECE)]
