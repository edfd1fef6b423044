"""A commit: every rank writes its copy, buddies get what is a rank's own, and then all flip.

What all ranks share is found, not declared: arrays whose checksums are equal on all ranks. The others, and
what is in an `Own`, are a rank's own. In the usual case nothing is, and a commit sends one row of numbers.

    1. write the arrays into the side that does not hold the newest commit, and prepare it
    2. compare with all ranks; where nothing is a rank's own, that all have come here says that all have prepared
    3. otherwise make room for what is the rank's own and for the copies of others, compare whether all have it,
       send, and wait until all have got theirs
    4. mark the copies as committed
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ... import arrays
from ...arrays import Array
from ...checkpoint.trees import Packed
from ...comm import Communicator
from ...errors import ArrayError, BaguaError, UnsupportedError
from .slot import Slot, offsets, views
from .snapshots import Draft, Layout, Side, digest_of

_FAILED, _LAYOUT, _TEXTS, _SUMS, _FLAG = range(5)
"""The columns of the row that ranks compare."""


class Committed(NamedTuple):
    """What a commit did."""

    nbytes: int
    """Bytes that this rank copied."""
    sent_bytes: int
    """Bytes that this rank sent to its buddy."""
    flag: bool
    """Whether any rank gave a flag."""


def commit(
    comm: Communicator,
    side: Side,
    prepare: Callable[[], Packed],
    *,
    run: str,
    version: int,
    buddies: Sequence[int],
    flag: bool = False,
) -> Committed:
    """Commit what `prepare` gives to `side`.

    Collective.

    Args:
        comm: The ranks.
        side: Where the copies go.
        prepare: Gives the tree of this rank.
        run: The name under which these ranks commit.
        version: The number of this commit.
        buddies: For every rank, the rank that keeps a copy of what is its own.
        flag: Something that all ranks learn if any of them says it.

    Raises:
        ArrayError: A rank's tree cannot be kept; on all ranks alike, and the commit before is still there.
        UnsupportedError: The same, for what no checkpoint can hold.
        CommError: A rank died, or did not come.
    """
    draft, problem = _write(comm, side, prepare, run, version)
    row = np.zeros(5, np.uint64)
    row[_FAILED], row[_FLAG] = problem is not None, flag
    if draft is not None:
        row[_LAYOUT], row[_TEXTS] = draft.layout.digest(), digest_of(draft.texts())
        row[_SUMS] = digest_of(repr(draft.sums[: len(draft.packed.shared)]))
    table = comm.allgather(row)
    if table[:, _FAILED].any() or draft is None:
        _raise_alike(comm, problem)
    assert draft is not None
    differs = (table != table[0]).any(axis=0)
    sent = 0
    if differs[[_LAYOUT, _TEXTS, _SUMS]].any() or draft.packed.own:
        private = _private(comm, draft, layouts_differ=bool(differs[_LAYOUT]), sums_differ=bool(differs[_SUMS]))
        header = draft.header(run, comm.rank, comm.size, private, texts_differ=bool(differs[_TEXTS]))
        sent, kept = _to_buddies(comm, side, draft, header, version, buddies)
        comm.barrier()
        for slot in kept:
            slot.commit()
    side.own.commit()
    return Committed(draft.size, sent, bool(table[:, _FLAG].any()))


def _write(
    comm: Communicator, side: Side, prepare: Callable[[], Packed], run: str, version: int
) -> tuple[Draft | None, Exception | None]:
    """Write this rank's own copy, as if nothing were its own."""
    try:
        packed = prepare()
        draft = side.write(packed, Layout.of(packed))
        side.own.finish(version, draft.header(run, comm.rank, comm.size, (), texts_differ=False), draft.size)
        return draft, None
    except Exception as exc:  # the other ranks wait for this one
        return None, exc


def _raise_alike(comm: Communicator, problem: Exception | None) -> None:
    """Raise on all ranks what is wrong on the first that has a problem."""
    told = None if problem is None else (isinstance(problem, UnsupportedError), _text_of(problem))
    rank, (unsupported, text) = next(
        (rank, each) for rank, each in enumerate(comm.allgather_object(told)) if each is not None
    )
    kind: type[BaguaError] = UnsupportedError if unsupported else ArrayError
    raise kind(f"commit: rank {rank}: {text}; the commit before is still there") from problem


def _text_of(exc: Exception) -> str:
    return str(exc) if isinstance(exc, BaguaError) else f"{type(exc).__name__}: {exc}"


def _private(comm: Communicator, draft: Draft, *, layouts_differ: bool, sums_differ: bool) -> list[int]:
    """The numbers of the arrays that are a rank's own; the same on all ranks, unless their layouts differ."""
    shared, total = len(draft.packed.shared), len(draft.layout.kinds)
    if layouts_differ:
        return list(range(total))
    differing: list[int] = []
    if sums_differ:
        table = comm.allgather(np.array(draft.sums[:shared], np.uint64))
        differing = np.flatnonzero((table != table[0]).any(axis=0)).tolist()
    return [*differing, *range(shared, total)]


def _to_buddies(
    comm: Communicator, side: Side, draft: Draft, header: dict[str, Any], version: int, buddies: Sequence[int]
) -> tuple[int, list[Slot]]:
    """Send what is this rank's own to its buddy, and keep what others send; the slots are prepared then."""
    private: list[int] = header["private"]
    text = np.frombuffer(json.dumps({**header, "whole": False}).encode(), np.uint8)
    sizes = comm.allgather(np.array([text.size], np.int64)).reshape(-1)
    mine, to = views(draft.data, draft.layout.kinds), buddies[comm.rank]
    guarded = [rank for rank in range(comm.size) if buddies[rank] == comm.rank and rank != comm.rank]
    texts = {rank: np.empty(int(sizes[rank]), np.uint8) for rank in guarded}
    comm.exchange([(to, text)] if to != comm.rank else [], list(texts.items()))
    copies, problem = _make_room(side, draft, header, version, texts)
    if comm.allgather(np.array([problem is not None], np.uint8)).any():
        _raise_alike(comm, problem)
    sends = [(to, arrays.as_bytes(mine[n])) for n in private if to != comm.rank and mine[n].nbytes]
    comm.exchange(sends, [(copy.rank, arrays.as_bytes(x)) for copy in copies for x in copy.arrays if x.nbytes])
    for copy in copies:
        copy.slot.finish(version, copy.header, copy.size)
    return sum(x.nbytes for _, x in sends) + (text.size if to != comm.rank else 0), [copy.slot for copy in copies]


class _Guarded(NamedTuple):
    """Room for the copy of a rank whose buddy this one is."""

    rank: int
    slot: Slot
    header: dict[str, Any]
    arrays: list[Array]
    size: int


def _make_room(
    side: Side, draft: Draft, header: dict[str, Any], version: int, texts: dict[int, npt.NDArray[np.uint8]]
) -> tuple[list[_Guarded], Exception | None]:
    """Write this rank's own header again, and make room for the copies whose headers these are."""
    copies = []
    try:
        side.own.finish(version, header, draft.size)
        for (rank, text), slot in zip(texts.items(), side.guard(len(texts)), strict=True):
            theirs = json.loads(text.tobytes())
            every = Layout.from_header(theirs).kinds
            kinds = [every[n] for n in theirs["private"]]
            _, size = offsets(kinds)
            room = slot.begin(size, text.size)
            copies.append(_Guarded(rank, slot, theirs, views(room, kinds), size))
    except Exception as exc:  # the other ranks wait for this one
        return [], exc
    return copies, None
