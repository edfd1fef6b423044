"""The report: the first step and tensor whose bits differ between ranks, from the files of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

from ..flight.batches import more, named
from .differences import RecordDifference, difference_of, parted
from .elements import ElementDifference, first_difference
from .records import DivergenceError, RankSteps, Step, Tensor, open_folder

SHOWN = 8
"""The number of groups and of tensors that a text names."""


_NONE = "no such tensor"


@dataclass(frozen=True)
class Group:
    """Ranks that have the same bits in the tensor.

    Attributes:
        ranks: The ranks.
        tensor: The name, dtype and shape of the tensor on these ranks, as text; None if they have no such tensor.
        difference: The first element that differs from that of the largest group, the value of that group first.
            None if it is not known.
        reason: Why it is not known; "" if it is, and for the largest group.
    """

    ranks: tuple[int, ...]
    tensor: str | None
    difference: ElementDifference | None = None
    reason: str = ""

    def against(self, most: Group) -> str:
        """How these ranks differ from the largest group."""
        if self.tensor is None or most.tensor is None or self.tensor != most.tensor:
            return f"{named(self.ranks)}: {self.tensor or _NONE} against {most.tensor or _NONE}"
        if self.difference is None:
            return f"{named(self.ranks)}: the element is not known: {self.reason}"
        return f"rank {self.ranks[0]} against rank {most.ranks[0]}: {_turned(self.difference)}"


def _turned(found: ElementDifference) -> str:
    """The text of a difference, the value of the other ranks first."""
    first, second = found.values
    return str(ElementDifference(**{**vars(found), "values": (second, first)}))


@dataclass(frozen=True)
class Divergence:
    """The first difference between the records of ranks.

    Attributes:
        records: The number of records that were compared before it, each of one step or a part of one.
        last_equal_step: The step of the last of them; None if there is none.
        step: The step of the first difference; None if nothing differs.
        tensor: The name of the first tensor that differs, in the order in which they were recorded; None if the
            ranks recorded different steps, or nothing differs.
        groups: The ranks by the bits of this tensor, the largest group first.
        others: The names of further tensors of the record that differ.
        steps: Where ranks recorded different steps under one number, the step of each rank; else empty.
        notes: What the records lack: ranks without a file, and files that end early.
    """

    records: int
    last_equal_step: int | None
    step: int | None = None
    tensor: str | None = None
    groups: tuple[Group, ...] = ()
    others: tuple[str, ...] = ()
    steps: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*self._lines(), *(f"note: {note}" for note in self.notes)])

    def _lines(self) -> Iterator[str]:
        if self.last_equal_step is not None:
            count = "1 record" if self.records == 1 else f"{self.records} records"
            yield f"The ranks are equal up to step {self.last_equal_step} ({count})."
        elif self.step is None:
            yield "Nothing was recorded."
        if self.steps:
            found = [f"rank {rank} step {step}" for rank, step in self.steps[:SHOWN]]
            yield f"Then they recorded different steps: {', '.join(found)}{more(self.steps[SHOWN:])}."
        elif self.groups and self.tensor is None:
            names = parted([group.ranks for group in self.groups])
            yield f"In step {self.step} they recorded the same tensors in different orders: {names}."
        elif self.groups:
            most, *rest = self.groups
            names = parted([group.ranks for group in self.groups])
            yield f"They differ in step {self.step}, tensor {self.tensor!r}: {names}."
            yield from (f"  {group.against(most)}" for group in rest[:SHOWN])
            if self.others:
                names = ", ".join(map(repr, self.others[:SHOWN]))
                yield f"Further tensors of this record differ: {names}{more(self.others[SHOWN:])}."

    def as_dict(self) -> dict[str, object]:
        """The report for JSON."""
        return asdict(self)


def compare_folder(folder: str | Path) -> Divergence:
    """Compare the records of all ranks in a folder, and return the first difference.

    Args:
        folder: The folder of a `DivergenceRecorder`, with the files of at least two ranks.

    Raises:
        DivergenceError: The records cannot be read, or are of different runs.
    """
    ranks, missing = open_folder(Path(folder))
    notes = [f"{named(missing)} left no records here"] if missing else []
    with ExitStack() as ends:
        steps = [each.steps() for each in ranks]
        for iterator in steps:
            ends.enter_context(closing(iterator))  # type: ignore[type-var]
        return _compare(ranks, steps, notes)


def _compare(ranks: list[RankSteps], steps: list[Iterator[Step]], notes: list[str]) -> Divergence:
    count, last, running = 0, None, list(range(len(ranks)))
    while True:
        found = {i: next(steps[i], None) for i in running}
        rows = {i: row for i, row in found.items() if row is not None}
        for i in found.keys() - rows.keys():
            if rows or ranks[i].torn:
                where = ", within a line" if ranks[i].torn else ""
                notes.append(f"the records of rank {ranks[i].rank} end after {_after(last)}{where}")
        if len(rows) < 2:
            return Divergence(count, last, notes=tuple(notes))
        running = list(rows)
        difference = difference_of(list(rows.values()))
        if difference is not None:
            for i in running:
                next(steps[i], None)  # what a rank kept of a step follows it in the file
            found_in = [ranks[i] for i in running]
            return _explain(found_in, list(rows.values()), difference, count, last, tuple(notes))
        count, last = count + 1, rows[running[0]].step


def _after(step: int | None) -> str:
    return "their first line" if step is None else f"step {step}"


def _explain(
    ranks: list[RankSteps],
    rows: list[Step],
    difference: RecordDifference,
    count: int,
    last: int | None,
    notes: tuple[str, ...],
) -> Divergence:
    if difference.kind == "steps":
        steps = tuple((rank.rank, row.step) for rank, row in zip(ranks, rows, strict=True))
        return Divergence(count, last, min(step for _, step in steps), steps=steps, notes=notes)
    step, (first, *others) = rows[0].step, difference.names or ("",)
    most = difference.groups[0][0]
    if difference.kind == "order":
        groups = tuple(Group(tuple(ranks[i].rank for i in group), None) for group in difference.groups)
    else:
        groups = tuple(_group(ranks, step, group, difference.entries, most) for group in difference.groups)
    return Divergence(count, last, step, first or None, groups, tuple(others), notes=notes)


def _group(
    ranks: list[RankSteps],
    step: int,
    members: Sequence[int],
    entries: Sequence[tuple[Tensor, bytes] | None],
    most: int,
) -> Group:
    mine, other = entries[members[0]], entries[most]
    numbers = tuple(ranks[i].rank for i in members)
    if mine is None or other is None or mine[0] != other[0] or members[0] == most:
        return Group(numbers, None if mine is None else str(mine[0]))
    try:
        values = [ranks[i].tensor(step, entry[0]) for i, entry in ((most, other), (members[0], mine))]
    except DivergenceError as exc:
        return Group(numbers, str(mine[0]), None, str(exc))
    difference = first_difference(*values)
    reason = "" if difference else "the tensors that were kept are equal"
    return Group(numbers, str(mine[0]), difference, reason)
