"""The grid of a tuner: all settings that can be chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...algorithms import Algorithm
from ...algorithms.base import pack
from ...algorithms.combinators import After, Every
from ...averages import Average, ErrorFeedback, Hierarchical
from ...bucket import TensorSpec
from ...codecs import MinMaxUInt8
from ...errors import ArrayError

BUCKET_BYTES = tuple(2**exponent for exponent in range(20, 28))
"""Bucket sizes to try: 1 MiB to 128 MiB."""

BLOCKS = (128, 256, 512, 1024, 2048)
"""Blocks of MinMaxUInt8 to try, in elements."""


@dataclass(frozen=True)
class Settings:
    """Settings to train with."""

    bucket_bytes: int
    algorithm: Algorithm

    def plain(self) -> dict[str, object]:
        """The settings as a number and a string, for traces and files."""
        return {"bucket_bytes": self.bucket_bytes, "algorithm": repr(self.algorithm)}


@dataclass(frozen=True)
class Trial:
    """Settings and the seconds of a step with them: the median over steps of the time of the slowest rank."""

    settings: Settings
    seconds: float


Cell: TypeAlias = tuple[int, int, int]
"""The indices of settings in a grid: of the bucket size, of the average, and of the block."""


@dataclass(frozen=True)
class Grid:
    """All settings that can be chosen.

    >>> grid = Grid((1, 2, 4), (("exact",), ("128", "256")))
    >>> grid[2, 1, 0]
    Settings(bucket_bytes=4, algorithm='128')
    >>> grid.neighbours((2, 1, 0))
    [(1, 1, 0), (2, 1, 1), (2, 0, 0)]
    """

    bucket_bytes: tuple[int, ...]
    families: tuple[tuple[Algorithm, ...], ...]
    """For each average, the algorithm with this average and each of the blocks."""

    def __iter__(self) -> Iterator[Cell]:
        for i in range(len(self.bucket_bytes)):
            for j, family in enumerate(self.families):
                yield from ((i, j, k) for k in range(len(family)))

    def __len__(self) -> int:
        return len(self.bucket_bytes) * sum(map(len, self.families))

    def __getitem__(self, cell: Cell) -> Settings:
        i, j, k = cell
        return Settings(self.bucket_bytes[i], self.families[j][k])

    def cell_of(self, bucket_bytes: int, algorithm: str) -> Cell | None:
        """The cell of these settings, the algorithm given by its repr; None if there is none."""
        matches = (
            p for p in self if self[p].bucket_bytes == bucket_bytes and repr(self[p].algorithm) == algorithm
        )
        return next(matches, None)

    def neighbours(self, cell: Cell) -> list[Cell]:
        """Cells with the next smaller or larger bucket size or block, or with another average."""
        i, j, k = cell
        beside = [(i - 1, j, k), (i + 1, j, k), (i, j, k - 1), (i, j, k + 1)]
        others = [self.nearest(i, other, k) for other in range(len(self.families)) if other != j]
        return [cell for cell in (*beside, *others) if cell in self]

    def nearest(self, bucket: int, average: int, block: int) -> Cell:
        """The cell at these indices; if the average has fewer blocks, the one at its last block."""
        return bucket, average, min(block, len(self.families[average]) - 1)


def make_grid(
    algorithm: Algorithm,
    specs: Sequence[TensorSpec],
    own_bytes: int,
    bucket_bytes: Sequence[int] | None,
    averages: Sequence[Average] | None,
    blocks: Sequence[int] | None,
) -> Grid:
    """Make the grid of all settings for these tensors; it includes the settings that training begins with.

    Raises:
        ArrayError: `averages` or `blocks` are given, but the algorithm has no average or block to replace; or
            bucket sizes are given, but the state of the algorithm cannot move to other buckets.
    """
    families = _families(algorithm, averages, blocks)
    sizes = {own_bytes, *(BUCKET_BYTES if bucket_bytes is None else bucket_bytes)}
    whole = [a for family in families for a in family if _state_is_per_bucket(a)]
    if whole:
        if bucket_bytes or len(families) == len(families[0]) == 1:
            raise ArrayError(
                f"Tuner: the bucket size of {whole[0]} cannot be searched for: ErrorFeedback inside Hierarchical "
                "keeps a residual for each bucket, which cannot move to another bucket; leave bucket_bytes out, "
                "and let the tuner choose among averages or blocks"
            )
        sizes = {own_bytes}
    falling = [*sorted(sizes, reverse=True), own_bytes]
    distinct = {pack(algorithm, specs, bucket_bytes=size): size for size in falling}
    return Grid(tuple(sorted(distinct.values())), families)


def _families(
    algorithm: Algorithm, averages: Sequence[Average] | None, blocks: Sequence[int] | None
) -> tuple[tuple[Algorithm, ...], ...]:
    """`algorithm` with its average and with each of `averages`, each of these with all `blocks`."""
    with_averages = [algorithm]
    if averages and not any(map(_has_average, _parts(algorithm))):
        raise ArrayError(
            f"Tuner: averages are given, but {algorithm} has no average to replace; leave averages out"
        )
    for average in averages or ():
        other = _replaced(algorithm, "average", average, _has_average)
        if other not in with_averages:
            with_averages.append(other)
    if blocks and not any(_has_block(part) for each in with_averages for part in _parts(each)):
        raise ArrayError(
            f"Tuner: blocks are given, but {algorithm} sends no blocks of MinMaxUInt8; leave blocks out"
        )
    families = []
    for each in with_averages:
        own = {part.block for part in _parts(each) if _has_block(part)}
        tried = sorted(own | set(BLOCKS if blocks is None else blocks)) if own else []
        families.append(tuple(_replaced(each, "block", block, _has_block) for block in tried) or (each,))
    return tuple(families)


# An algorithm is a tree of frozen dataclasses: the algorithm, its average, the codec of the average, and so on.
# Of `after`, only the last algorithm is part of the tree, because the search begins when the first has ended.


def _fields(part: object) -> list[str]:
    """The fields of a part that may hold further parts; no fields if it is not a dataclass."""
    if not dataclasses.is_dataclass(part):
        return []
    if isinstance(part, ErrorFeedback):  # its other codec encodes nothing that is sent
        return ["inner"]
    return ["then"] if isinstance(part, After) else [f.name for f in dataclasses.fields(part) if f.init]


def _parts(tree: object) -> Iterator[Any]:
    """All parts of a tree, from the root."""
    yield tree
    for name in _fields(tree):
        yield from _parts(getattr(tree, name))


def _replaced(tree: Any, field: str, value: object, where: Callable[[object], bool]) -> Any:
    """A copy of a tree, with `value` in this field of all parts for which `where` is true."""
    fields = {name: _replaced(getattr(tree, name), field, value, where) for name in _fields(tree)}
    if where(tree):
        fields[field] = value
    return dataclasses.replace(tree, **fields) if fields else tree


def _has_average(part: object) -> bool:
    return "average" in _fields(part)


def _has_block(part: object) -> bool:
    """Whether this is a codec whose block may change; `MinMaxUInt8.bagua()` always has a whole chunk."""
    return isinstance(part, MinMaxUInt8) and part.block is not None


def _state_is_per_bucket(algorithm: Algorithm) -> bool:
    """Whether its state has arrays of other lengths than the bucket, which cannot move to other buckets."""
    levels = (part for part in _parts(algorithm) if isinstance(part, Hierarchical))
    return any(isinstance(part, ErrorFeedback) for level in levels for part in _parts(level))


def warmup_of(algorithm: Algorithm) -> int:
    """Number of training steps before the algorithm's last phase: those of `after`, and all `warmup_steps`."""
    parts = _parts(algorithm)
    return sum(part.steps if isinstance(part, After) else getattr(part, "warmup_steps", 0) for part in parts)


def period_of(algorithm: Algorithm) -> int:
    """The number of steps of which the algorithm communicates in one.

    >>> from bagua_comm import Decentralized, DiLoCo, GradientAllReduce
    >>> period_of(DiLoCo(8)), period_of(Every(4, Decentralized())), period_of(GradientAllReduce())
    (8, 4, 1)
    """
    period = 1
    for part in _parts(algorithm):
        period *= part.n if isinstance(part, Every) else getattr(part, "local_steps", 1)
    return period
