"""A commit: every rank writes its snapshot, buddies receive private state, and then all commit together.

Shared state is detected, not declared: arrays whose checksums are equal on all ranks. All other arrays, those in
an `Own`, and slabs of sharded arrays are private. Usually none are, and a commit exchanges one row of numbers.

    1. Write the arrays without a rule into the buffer that does not hold the newest commit, and prepare it.
    2. Compare with all ranks. If no rank has private state, this also shows that all have prepared.
    3. Otherwise reserve memory for the snapshots of other ranks, compare whether all could, send private state to
       the buddies, and wait until all have received it.
    4. Mark the snapshots as committed. Then each rank writes its own arrays with a rule, slabs say, over those
       of the commit before. If it dies meanwhile, its buddy has them; if others die, it finishes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from ... import arrays
from ...arrays import Array
from ...checkpoint.trees import Packed
from ...comm import Communicator
from ...comm.outcomes import named_error, raise_first
from ...errors import ArrayError
from .slot import Header, Slot, offsets, views
from .snapshots import Buffer, Layout, PendingSnapshot, digest_of

_FAILED, _LAYOUT, _TEXTS, _SUMS = range(4)
"""The columns of the row that ranks compare."""


class Committed(NamedTuple):
    """The result of a commit."""

    nbytes: int
    """Bytes that this rank copied."""
    sent_bytes: int
    """Bytes that this rank sent to its buddy."""


def commit(
    comm: Communicator,
    buffer: Buffer,
    prepare: Callable[[], Packed],
    *,
    run: str,
    version: int,
    buddies: Sequence[int],
) -> Committed:
    """Commit the tree that `prepare` returns to `buffer`.

    Collective.

    Args:
        comm: The ranks.
        buffer: Where the snapshots are written.
        prepare: Returns the tree of this rank.
        run: Identifies the run of training in which these ranks commit.
        version: The number of this commit.
        buddies: For every rank, the rank that holds a snapshot of its private state.

    Raises:
        ArrayError: The tree of a rank cannot be saved; on all ranks. The previous commit is still valid.
        UnsupportedError: The same, for values that no checkpoint can hold.
        CommError: A rank died, or did not take part.
    """
    buffer.own.live = None  # of a commit that failed
    pending, problem = _write(comm, buffer, prepare, run, version)
    row = np.zeros(4, np.uint64)
    row[_FAILED] = problem is not None
    if pending is not None:
        row[_LAYOUT], row[_TEXTS] = pending.layout.shared.digest(), digest_of(pending.texts())
        row[_SUMS] = digest_of(repr(pending.sums[: len(pending.packed.shared)]))
    table = comm.allgather(row)
    if table[:, _FAILED].any() or pending is None:
        _raise_on_all(comm, problem)
    differs = (table != table[0]).any(axis=0)
    sent_bytes = 0
    if differs[[_LAYOUT, _TEXTS, _SUMS]].any() or pending.packed.own or pending.packed.slabs:
        layouts_differ, sums_differ = bool(differs[_LAYOUT]), bool(differs[_SUMS])
        private = _private(comm, pending, layouts_differ=layouts_differ, sums_differ=sums_differ)
        header = pending.header(run, comm.rank, comm.size, private, texts_differ=bool(differs[_TEXTS]))
        sent_bytes, received = _exchange_private(comm, buffer, pending, header, version, buddies)
        comm.barrier()
        for slot in received:
            slot.commit()
    buffer.local.commit()
    buffer.own.settle(version, run)
    return Committed(offsets(pending.layout.specs)[1], sent_bytes)


def _write(
    comm: Communicator, buffer: Buffer, prepare: Callable[[], Packed], run: str, version: int
) -> tuple[PendingSnapshot | None, Exception | None]:
    """Write the snapshot of this rank, as if it had no private state."""
    try:
        packed = prepare()
        pending = buffer.write(packed, len(packed.shared))
        header = pending.header(run, comm.rank, comm.size, (), texts_differ=False)
        buffer.local.finish(version, header, pending.size)
        return pending, None
    except Exception as exc:  # the other ranks wait for this one
        return None, exc


def _raise_on_all(comm: Communicator, problem: Exception | None) -> NoReturn:
    """Raise the error of the first rank that has one on all ranks. Collective."""
    rows = comm.allgather_object(named_error(problem, ArrayError))
    raise_first("commit", rows, problem, end="; the commit before is still there")


def _private(
    comm: Communicator, pending: PendingSnapshot, *, layouts_differ: bool, sums_differ: bool
) -> list[int]:
    """The numbers of the private arrays: all if layouts differ outside of the `Own` parts and of slabs."""
    shared, total = len(pending.packed.shared), len(pending.layout.specs)
    if layouts_differ:
        return list(range(total))
    differing: list[int] = []
    if sums_differ:
        table = comm.allgather(np.array(pending.sums[:shared], np.uint64))
        differing = np.flatnonzero((table != table[0]).any(axis=0)).tolist()
    return [*differing, *range(shared, total)]


def _exchange_private(
    comm: Communicator,
    buffer: Buffer,
    pending: PendingSnapshot,
    header: Header,
    version: int,
    buddies: Sequence[int],
) -> tuple[int, list[Slot]]:
    """Send private state to the buddy, and prepare the snapshots that this rank receives.

    Collective. Returns the bytes sent, and the slots of the received snapshots.
    """
    private = header["private"]
    text = np.frombuffer(json.dumps({**header, "whole": False, "held": private}).encode(), np.uint8)
    sizes = comm.allgather(np.array([text.size], np.int64)).reshape(-1)
    buddy = buddies[comm.rank]
    sources = [rank for rank in range(comm.size) if buddies[rank] == comm.rank]  # a rank that is alone is its own
    texts = {rank: np.empty(int(sizes[rank]), np.uint8) for rank in sources}
    comm.exchange([(buddy, text)], list(texts.items()))
    received, problem = _reserve(buffer, pending, header, version, texts)
    if comm.allgather(np.array([problem is not None], np.uint8)).any():
        _raise_on_all(comm, problem)
    sends = [(buddy, arrays.as_bytes(pending.arrays[n]), str(i)) for i, n in enumerate(private)]
    recvs = [(each.rank, arrays.as_bytes(x), str(i)) for each in received for i, x in enumerate(each.arrays)]
    comm.exchange(sends, recvs)
    for each in received:
        each.slot.finish(version, each.header, each.size)
    sent_bytes = sum(x.nbytes for _, x, _ in sends) + text.size
    return 0 if buddy == comm.rank else sent_bytes, [each.slot for each in received]


class _PeerSnapshot(NamedTuple):
    """Memory for the snapshot of a rank whose buddy this one is."""

    rank: int
    slot: Slot
    header: Header
    arrays: list[Array]
    size: int


def _reserve(
    buffer: Buffer,
    pending: PendingSnapshot,
    header: Header,
    version: int,
    texts: dict[int, npt.NDArray[np.uint8]],
) -> tuple[list[_PeerSnapshot], Exception | None]:
    """Rewrite the header of this rank, and reserve memory for the snapshots with the headers `texts`, by rank."""
    reserved = []
    try:
        buffer.local.finish(version, header, pending.size)
        if header["rank"] not in texts:
            buffer.own.prepare(pending, header, version)
        for (rank, text), slot in zip(texts.items(), buffer.peer_slots(len(texts)), strict=True):
            peer_header = json.loads(text.tobytes())
            specs = Layout.from_header(peer_header).specs
            private = [specs[n] for n in peer_header["private"]]
            _, size = offsets(private)
            data = slot.begin(size, text.size)
            reserved.append(_PeerSnapshot(rank, slot, peer_header, views(data, private), size))
    except Exception as exc:  # the other ranks wait for this one
        return [], exc
    return reserved, None
