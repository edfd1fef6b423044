"""Layouts: the tensors of a bucket, or a part of it, to which an array of a state belongs that is saved whole.

A part depends on the rank and on the nodes: `by_node` and `Hierarchical` cut a bucket into chunks, and ranks of a
node own one each. Where ranks have other nodes, the rank of the same number owns another part.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

from ..bucket import BucketSpec
from ..comm import Communicator
from ..errors import ArrayError

Layout: TypeAlias = list[object]
"""The size of a bucket, the description of a part if it is of one, and the names of the tensors.

A name is followed by the order of its elements in memory, if that is not the order of their indices."""

PER_BUCKET = " of"
"""Suffix of the path under which the layout is saved, for an array that is saved whole."""

_PART = "part of the bucket: "
_ALONE = "all elements, each rank on a node of its own"


def layout_of(spec: BucketSpec) -> Layout:
    """The layout of a whole bucket."""
    return [spec.size, *(f"{t.name}, {t.memory}" if t.memory else t.name for t in spec.tensors)]


def layout_of_part(chunk: bool | str, spec: BucketSpec, comm: Communicator) -> Layout | None:
    """The layout of this rank's part of a bucket; None if the part is the whole bucket.

    It pins the nodes: if no rank has another local rank, or a node of another number, all nodes are the same.

    Args:
        chunk: The metadata of a field; see `base.CHUNK`.
        spec: The bucket.
        comm: The ranks.
    """
    sizes = comm.node_sizes
    if not chunk or (chunk == "of nodes" and max(sizes) == 1):
        return None
    size, *names = layout_of(spec)
    if comm.size == 1:
        return [size, *names]
    count = -(-spec.size // min(sizes)) if comm.local_rank < min(sizes) else 0
    first = comm.local_rank * count
    elements = f"elements {first} to {first + count - 1}" if count else "no elements"
    nodes = ", ".join(f"{len([*same])} of {ranks}" for ranks, same in itertools.groupby(sizes))
    return [size, f"{_PART}{elements}, rank {comm.local_rank} of node {comm.node}, nodes: {nodes}", *names]


def described(layout: Sequence[object]) -> str:
    """The description of the part in a layout; "" if there is none."""
    return next((str(x).removeprefix(_PART) for x in layout[1:2] if str(x).startswith(_PART)), "")


def without_part(layout: Sequence[object]) -> Layout:
    """The layout of the whole bucket."""
    return [*layout[:1], *layout[2 if described(layout) else 1 :]]


def check_part(path: str, tensor: str, found: Sequence[Layout], part: Layout | None, spec: BucketSpec) -> None:
    """Raise unless an array that was saved with the layouts `found`, one or none, is of this rank's part.

    Raises:
        ArrayError: It is of another part, or of another bucket.
    """
    if [*found] == ([] if part is None else [part]):
        return
    if found and without_part(found[0]) != layout_of(spec):
        raise not_movable(path, tensor)
    there = next(filter(None, map(described, found)), "an earlier version did not note it" if found else _ALONE)
    raise ArrayError(
        f"{path!r} of {tensor!r} is of a part of its bucket, which depends on the nodes. Saved: {there}. Here: "
        f"{(described(part) or 'one rank') if part else _ALONE}. Place ranks on nodes as they were, or load the "
        "weights alone, into the module itself (`.module` of the wrapper)"
    )


def not_movable(path: str, tensor: str) -> ArrayError:
    """The error for an array of another bucket."""
    return ArrayError(f"{path!r} of {tensor!r} belongs to its bucket as a whole, and cannot move to another")
