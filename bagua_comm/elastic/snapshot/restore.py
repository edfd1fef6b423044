"""From the copies that the living hold to the state of a commit on those who train next.

    newest          the newest commit that can be put together, and who holds which part of it
    restore         bring it to everybody who trains: what is shared, and what is a rank's own by its rule

Where as many ranks train as committed, each gets what was the own of its rank, wherever a copy of it is left. On
another number of ranks the rules of `Own` say what becomes of it. What differs without being marked is as "mean"
if it is an array of floats, else as "first".
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ... import arrays
from ...arrays import Array
from ...checkpoint.trees import Own, Rule, Unpacker
from ...comm import Communicator
from ...errors import CommAborted
from . import parts
from .slot import Kind, checksum
from .snapshots import Copy, Held, Layout

_log = logging.getLogger(__name__)

PIECE = 1 << 22
"""Bytes of one message."""


@dataclass(frozen=True)
class Sources:
    """A commit, and who holds what of it. Places are those in the list of all living processes."""

    run: str
    version: int
    ranks: int
    whole: tuple[int, ...]
    """The places of those with a whole copy."""
    own_of: Mapping[int, int]
    """For every rank of the commit, the place of a process that holds what is its own."""
    missing: tuple[int, ...] = ()
    """Ranks of which nobody has a copy, though there is something of their own."""


def newest(rows: Sequence[Sequence[Held]]) -> Sources | None:
    """The newest commit that can be put together; else the newest of which at least the shared part is left.

    Args:
        rows: What every living process holds.
    """
    found = {(each.version, each.run) for row in rows for each in row if each.committed}
    partial: Sources | None = None
    for version, run in sorted(found, reverse=True):
        sources = _sources(rows, version, run)
        if sources is not None and not sources.missing:
            return sources
        partial = partial or sources
    return partial


def _sources(rows: Sequence[Sequence[Held]], version: int, run: str) -> Sources | None:
    held = [(place, each) for place, row in enumerate(rows) for each in row]
    held = [(place, each) for place, each in held if (each.version, each.run) == (version, run)]
    # A copy that was prepared is as good: no rank commits before all have prepared.
    best = {(place, each.rank): each for place, each in sorted(held, key=lambda pair: pair[1].committed)}
    whole = tuple(sorted({place for (place, _), each in best.items() if each.whole}))
    committed = [each for each in best.values() if each.committed]
    if not whole or not committed:
        return None
    own_of: dict[int, int] = {}
    for place, rank in sorted(best, key=lambda key: (not best[key].whole, key)):
        own_of.setdefault(rank, place)
    ranks = committed[0].ranks
    needed = range(ranks) if any(each.private for each in committed) else ()
    return Sources(run, version, ranks, whole, own_of, tuple(r for r in needed if r not in own_of))


class Content(NamedTuple):
    """What a commit holds, as the rank that loads it finds it."""

    header: dict[str, Any]
    """The texts of it: the tree, and the trees of `Own` parts."""
    arrays: list[Array | None]
    """None for what was dropped."""
    dropped: bool
    """Whether the parts with rule "drop" are gone."""

    def tree(self) -> Any:
        """The tree, with its `Own` parts as such. Its arrays are copies: objects may keep them."""
        layout = Layout.from_header(self.header)
        shared = sum(rule is None for rule in layout.rules)

        def array_at(number: int) -> Array:
            found = self.arrays[number]
            assert found is not None
            return found.copy()

        def own(number: int, rule: Rule | None, path: str) -> Any:
            if rule == "drop" and self.dropped:
                return Own(None, rule)
            inner = Unpacker(lambda n: array_at(shared + n), from_array=parts.restored)
            return Own(inner.unpack(self.header["own_trees"][number]), rule)

        return Unpacker(array_at, own, parts.restored).unpack(self.header["tree"])


def restore(
    everyone: Communicator,
    sources: Sources,
    copies: Sequence[Copy],
    members: Sequence[int],
    hosts: Sequence[Hashable],
) -> Content | None:
    """Bring a commit to those who train next.

    Collective among all living processes.

    Args:
        everyone: All living processes.
        sources: The commit; see `newest`.
        copies: What this process holds.
        members: The places of those who train, by rank.
        hosts: The hosts of all living processes.

    Returns:
        The content of the commit for this process; None if it does not train.

    Raises:
        CommError: A process died meanwhile, or a copy is damaged; then all come here again.
    """
    mine = [each for each in copies if (each.version, each.header["run"]) == (sources.version, sources.run)]
    return _Restore(everyone, sources, mine, members, hosts).run()


class _Restore:
    def __init__(
        self,
        everyone: Communicator,
        sources: Sources,
        mine: Sequence[Copy],
        members: Sequence[int],
        hosts: Sequence[Hashable],
    ) -> None:
        self._hosts = hosts
        self._comm, self._sources, self._members = everyone, sources, list(members)
        self._whole = next((each for each in mine if each.whole), None)
        self._copy_of = {each.header["rank"]: each for each in sorted(mine, key=lambda each: each.whole)}
        self._new_rank = self._members.index(everyone.rank) if everyone.rank in self._members else None

    def run(self) -> Content | None:
        comm, sources = self._comm, self._sources
        first = sources.own_of[min(sources.own_of)]
        source = first if first in sources.whole else sources.whole[0]
        # A committed header says what is a rank's own; one that was only prepared may not know it yet.
        header = comm.broadcast_object(None if self._whole is None else self._whole.header, root=source)
        self._header = header
        self._kinds = Layout.from_header(header).kinds
        self._private = set(header["private"])
        found = self._shared()
        same = sources.ranks == len(self._members)
        lost = not same
        if self._private or header["texts_differ"]:
            if not same or sources.missing:
                self._combine(found, same=same)
            if same:
                header = self._own_of_my_rank(found)
                lost = self._new_rank in sources.missing
        return None if self._new_rank is None else Content(header, found, dropped=lost)

    # What is shared ---------------------------------------------------------------------------------

    def _shared(self) -> list[Array | None]:
        """The arrays that all ranks share; from this process's own copy, or from the nearest holder."""
        numbers = [n for n in range(len(self._kinds)) if n not in self._private]
        found: list[Array | None] = [None] * len(self._kinds)
        lacking = [place for place in self._members if place not in self._sources.whole]
        if self._whole is not None:
            for n in numbers:
                found[n] = self._whole.arrays[n]
        elif self._new_rank is not None:
            for n in numbers:
                found[n] = _empty(self._kinds[n])
        moves = [(self._nearest(place), place) for place in lacking]
        here = [x for n in numbers if (x := found[n]) is not None]
        self._move(moves, here, here)
        if self._comm.rank in lacking:
            self._check(numbers, found, self._header["sums"])
        return found

    def _nearest(self, place: int) -> int:
        """The holder from which a process takes what is shared: on its host if possible, and each in turn."""
        hosts, holders = self._hosts, self._sources.whole
        near = [holder for holder in holders if hosts[holder] == hosts[place]] or list(holders)
        return near[place % len(near)]

    def _move(self, moves: Sequence[tuple[int, int]], out: Sequence[Array], into: Sequence[Array]) -> None:
        """Send arrays from place to place, in pieces: `out` where this process is the source, else `into`."""
        me = self._comm.rank
        for source, dest in moves:
            if me == source and source != dest:
                for piece in _pieces(out):
                    self._comm.send(piece, dest=dest)
            elif me == dest and source != dest:
                for piece in _pieces(into):
                    self._comm.recv(piece, source=source)

    def _check(self, numbers: Sequence[int], found: Sequence[Array | None], sums: Sequence[int]) -> None:
        for n in numbers:
            x = found[n]
            if x is not None and checksum(x) != sums[n]:
                raise CommAborted(f"array {n} of commit {self._sources.version} arrived damaged")

    # What is a rank's own ---------------------------------------------------------------------------

    def _own_of_my_rank(self, found: list[Array | None]) -> dict[str, Any]:
        """Give every rank its own again, unless it is lost; returns the header of this one."""
        comm, sources = self._comm, self._sources
        header: dict[str, Any] = self._header
        for rank, place in enumerate(self._members):
            if rank in sources.missing:
                continue
            source = sources.own_of[rank]
            copy = self._copy_of.get(rank)
            if comm.rank == source == place:
                assert copy is not None
                header = copy.header
                for n in sorted(self._private):
                    found[n] = copy.arrays[n]
            elif comm.rank == source:
                assert copy is not None
                comm.send_object(copy.header, dest=place)
                self._move([(source, place)], [copy.arrays[n] for n in sorted(self._private)], ())
            elif comm.rank == place:
                header = comm.recv_object(source=source)
                kinds = Layout.from_header(header).kinds
                into = {n: _empty(kinds[n]) for n in sorted(self._private)}
                self._move([(source, place)], (), list(into.values()))
                for n, x in into.items():
                    found[n] = x
                self._check(sorted(self._private), found, header["sums"])
        return header

    def _combine(self, found: list[Array | None], *, same: bool) -> None:
        """Find what the ranks' own parts make together, by their rules.

        Args:
            found: Where it goes.
            same: Whether it is only for ranks whose own is lost, while the others keep theirs.
        """
        comm, sources = self._comm, self._sources
        ranks = sorted(sources.own_of)
        if sources.missing:
            _log.warning(
                "of commit %d, what was the own of ranks %s is lost; %s",
                sources.version,
                list(sources.missing),
                "they get what the others' own makes together" if same else "the others' is taken for it",
            )
        mine = [rank for rank in ranks if sources.own_of[rank] == comm.rank]
        layout = Layout.from_header(self._header)
        alike = all(Layout.from_header(self._copy_of[rank].header) == layout for rank in mine)
        alike = bool(comm.allreduce(np.array([alike], np.uint8), op="min")[0])
        # Arrays that are not of the same kinds make nothing together: then all is that of one rank.
        first = ranks[0] if alike else int(self._header["rank"])
        for n in sorted(self._private):
            kind, rule = self._kinds[n], layout.rules[n]
            if rule == "drop":
                continue
            if rule is None:
                rule = "mean" if _is_inexact(kind) else "first"
            if rule == "first" or not alike or not _is_inexact(kind):
                x = self._copy_of[first].arrays[n].copy() if first in mine else _empty(kind)
                for piece in _pieces([x]):
                    comm.broadcast(piece, root=sources.own_of[first])
            elif rule == "sum" and same:
                x = np.zeros_like(_empty(kind))  # the others keep what is left of it
            else:
                addends = [self._copy_of[rank].arrays[n] for rank in mine]
                x = _total(comm, kind, addends, len(ranks) if rule == "mean" else len(self._members))
            found[n] = x


def _total(comm: Communicator, kind: Kind, addends: Sequence[Array], parts_of: int) -> Array:
    """The sum over all processes' addends divided by `parts_of`, in double precision, in pieces. Collective."""
    out = _empty(kind)
    wide = np.complex128 if out.dtype.kind == "c" else np.float64
    flat, rows = out.reshape(-1), [x.reshape(-1) for x in addends]
    for begin in range(0, flat.size, PIECE // 8):
        part = flat[begin : begin + PIECE // 8]
        total = np.zeros(part.size, wide)
        for row in rows:
            total += row[begin : begin + part.size].astype(wide)
        comm.allreduce(total, out=total)
        part[...] = (total / parts_of).astype(out.dtype)
    return out


def _is_inexact(kind: Kind) -> bool:
    return kind.dtype in arrays.FLOATS | arrays.COMPLEX


def _empty(kind: Kind) -> Array:
    return np.empty(kind.shape, arrays.dtype_named(kind.dtype))


def _pieces(xs: Sequence[Array]) -> list[Array]:
    """The bytes of contiguous arrays, as views of at most `PIECE` bytes."""
    rows = [arrays.as_bytes(x) for x in xs]
    return [row[at : at + PIECE] for row in rows for at in range(0, row.size, PIECE)]
