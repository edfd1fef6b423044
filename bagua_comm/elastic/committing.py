"""A commit: every rank writes its copy, buddies get what is a rank's own, and then all flip.

What all ranks share is found, not declared: arrays whose checksums are equal on all ranks. The others, and
what is in an `Own`, are a rank's own. In the usual case nothing is, and a commit sends one row of numbers.

    1. write the arrays into the side that does not hold the newest commit, and prepare it
    2. compare with all ranks; where nothing is a rank's own, that all have come here says that all have prepared
    3. otherwise send what is the rank's own to its buddy, and wait until all have got theirs
    4. mark the copies as committed
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import arrays
from ..checkpoint.trees import Packed
from ..comm import Communicator
from ..errors import ArrayError, BaguaError, UnsupportedError
from .copies import Draft, Layout, Side, digest_of
from .slots import Slot, offsets, views

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
    draft, problem = _write(side, prepare)
    row = np.zeros(5, np.uint64)
    row[_FAILED], row[_FLAG] = problem is not None, flag
    if draft is not None:
        row[_LAYOUT], row[_TEXTS] = draft.layout.digest(), digest_of(draft.texts())
        row[_SUMS] = digest_of(repr(draft.sums[: len(draft.packed.shared)]))
        header = draft.header(run, comm.rank, comm.size, (), texts_differ=False)
        side.own.finish(version, header, draft.size)
    table = comm.allgather(row)
    if table[:, _FAILED].any() or draft is None:
        _raise_alike(comm, problem)
    assert draft is not None
    differs = (table != table[0]).any(axis=0)
    sent = 0
    if differs[[_LAYOUT, _TEXTS, _SUMS]].any() or draft.packed.own:
        private = _private(comm, draft, layouts_differ=bool(differs[_LAYOUT]), sums_differ=bool(differs[_SUMS]))
        header = draft.header(run, comm.rank, comm.size, private, texts_differ=bool(differs[_TEXTS]))
        side.own.finish(version, header, draft.size)
        sent, kept = _to_buddies(comm, side, draft, header, version, buddies)
        comm.barrier()
        for slot in kept:
            slot.commit()
    side.own.commit()
    return Committed(draft.size, sent, bool(table[:, _FLAG].any()))


def _write(side: Side, prepare: Callable[[], Packed]) -> tuple[Draft | None, Exception | None]:
    try:
        packed = prepare()
        return side.write(packed, Layout.of(packed)), None
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
    header = {**header, "whole": False}
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    sizes = comm.allgather(np.array([text.size], np.int64)).reshape(-1)
    mine, to = views(draft.data, draft.layout.kinds), buddies[comm.rank]
    guarded = [rank for rank in range(comm.size) if buddies[rank] == comm.rank and rank != comm.rank]
    texts = {rank: np.empty(int(sizes[rank]), np.uint8) for rank in guarded}
    comm.exchange([(to, text)] if to != comm.rank else [], list(texts.items()))
    sends = [(to, arrays.as_bytes(mine[n])) for n in private if to != comm.rank and mine[n].nbytes]
    recvs: list[tuple[int, Any]] = []
    kept = side.guard(len(guarded))
    ends = []
    for rank, slot in zip(guarded, kept, strict=True):
        theirs = json.loads(texts[rank].tobytes())
        every = Layout.from_header(theirs).kinds
        kinds = [every[n] for n in theirs["private"]]
        _, size = offsets(kinds)
        room = slot.begin(size)
        recvs += [(rank, arrays.as_bytes(x)) for x in views(room, kinds) if x.nbytes]
        ends.append((slot, theirs, size))
    comm.exchange(sends, recvs)
    for slot, theirs, size in ends:
        slot.finish(version, theirs, size)
    return sum(x.nbytes for _, x in sends) + (text.size if to != comm.rank else 0), kept
