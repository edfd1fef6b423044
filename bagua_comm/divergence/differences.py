"""How the records of one step differ between ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ..flight.batches import named
from ..topology import ranks_by
from .records import Step, Tensor


class RecordDifference(NamedTuple):
    """The difference between the records of ranks.

    Attributes:
        kind: What differs: the numbers of the steps, the bits of tensors, or only the order of the tensors.
        names: The tensors that differ, or that a rank lacks, in the order in which they were recorded.
        entries: The first of them on each rank, with its digest; None where the rank has none.
        groups: The positions of the ranks with equal steps, or equal bits of the first of these tensors; the
            largest group first.
    """

    kind: str
    names: tuple[str, ...] = ()
    entries: tuple[tuple[Tensor, bytes] | None, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()


def difference_of(rows: Sequence[Step]) -> RecordDifference | None:
    """The difference between the records of ranks; None if they are equal."""
    if len(set(rows)) == 1:
        return None
    steps = _groups_of([row.step for row in rows])
    if len(steps) > 1:
        return RecordDifference("steps", groups=steps)
    tables = [row.digest_of() for row in rows]
    every = {name: None for table in tables for name in table}
    names = tuple(name for name in every if len({table.get(name) for table in tables}) > 1)
    if not names:
        return RecordDifference("order", groups=_groups_of([row.tensors for row in rows]))
    entries = tuple(table.get(names[0]) for table in tables)
    return RecordDifference("bits", names, entries, _groups_of(entries))


def _groups_of(values: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """The positions of equal values, the largest group first; of groups as large, that of the first position."""
    return tuple(map(tuple, sorted(ranks_by(values).values(), key=lambda group: (-len(group), group[0]))))


def parted(groups: Sequence[Sequence[int]]) -> str:
    """Say which ranks differ from which, given the groups of equal ranks, the largest first.

    >>> parted([[0, 1, 3], [2]]), parted([[0], [1]])
    ('rank 2 differs from ranks 0, 1, 3', 'rank 1 differs from rank 0, and no majority agrees')
    """
    most, *rest = groups
    others = sorted(rank for group in rest for rank in group)
    verb = "differs from" if len(others) == 1 else "differ from"
    doubt = "" if len(most) > len(others) else ", and no majority agrees"
    return f"{named(others)} {verb} {named(most)}{doubt}"
