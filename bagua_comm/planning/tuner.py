"""A search for the bucket size, average and codec block that train fastest, on the steps of training itself.

All ranks train a few steps with the same settings and agree on how long these took; the slowest rank's time
counts. Rank 0 decides what to try next, and all ranks go on with that. Steps are noisy, so the fastest few
settings are measured again, in turn, and the best of them stay. `Search` decides and knows nothing of ranks;
`Tuner` measures.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import random
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from ..algorithms import Algorithm, DiLoCo
from ..algorithms.base import (
    check_algorithm_argument,
    check_average_argument,
    check_integer,
    phases_of,
    runs_in_rounds,
)
from ..algorithms.combinators import After, Every
from ..averages import Average, ErrorFeedback, Hierarchical
from ..bucket import DEFAULT_BUCKET_BYTES, Plan, TensorSpec
from ..codecs import MinMaxUInt8
from ..comm import Communicator
from ..engine import check_fit
from ..errors import ArrayError, BaguaError, CommMismatch, UnsupportedError
from ..files import write_at_once
from ..logs import log_on_root

BUCKET_BYTES = tuple(2**exponent for exponent in range(20, 28))
"""The bucket sizes that are tried: 1 MiB to 128 MiB."""

BLOCKS = (128, 256, 512, 1024, 2048)
"""The blocks of MinMaxUInt8 that are tried, in elements."""

FINALISTS, ROUNDS = 3, 3
"""How many settings are measured again at the end, and how often each."""

UNTIMED_STEPS = 1
"""Steps that are not timed after settings have changed, because they touch new memory for the first time."""

T = TypeVar("T")

_log = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------------------------
# What can be chosen
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Settings to train with."""

    bucket_bytes: int
    algorithm: Algorithm

    def plain(self) -> dict[str, Any]:
        """The settings as a number and a string, for traces and files."""
        return {"bucket_bytes": self.bucket_bytes, "algorithm": repr(self.algorithm)}


@dataclass(frozen=True)
class Trial:
    """Settings and the seconds of a step with them: the median over steps of the slowest rank's time."""

    settings: Settings
    seconds: float


Cell: TypeAlias = tuple[int, int, int]
"""The place of settings in a grid: the indices of the bucket size, of the average, and of the block."""


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
        """The cell of these settings, with the algorithm given by its repr; None if there is no such cell."""
        matches = (
            p for p in self if self[p].bucket_bytes == bucket_bytes and repr(self[p].algorithm) == algorithm
        )
        return next(matches, None)

    def neighbours(self, cell: Cell) -> list[Cell]:
        """The cells with the next smaller or larger bucket size or block, or with another average."""
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
    """All settings that can be chosen for these tensors, with the settings that training begins with among them.

    Raises:
        ArrayError: `averages` or `blocks` are given, but the algorithm has no average or block that they could
            replace; or bucket sizes are to be chosen, but the state of the algorithm cannot move to other
            buckets.
    """
    families = _families(algorithm, averages, blocks)
    sizes = {own_bytes, *(BUCKET_BYTES if bucket_bytes is None else bucket_bytes)}
    whole = [a for family in families for a in family if _state_is_whole(a)]
    if whole:
        if bucket_bytes or len(families) == len(families[0]) == 1:
            raise ArrayError(
                f"Tuner: the bucket size of {whole[0]} cannot be searched for: ErrorFeedback inside Hierarchical "
                "keeps a residual for each bucket, which cannot move to another bucket; leave bucket_bytes out, "
                "and let the tuner choose among averages or blocks"
            )
        sizes = {own_bytes}
    distinct = {Plan.pack(specs, bucket_bytes=size): size for size in [*sorted(sizes, reverse=True), own_bytes]}
    return Grid(tuple(sorted(distinct.values())), families)


def _families(
    algorithm: Algorithm, averages: Sequence[Average] | None, blocks: Sequence[int] | None
) -> tuple[tuple[Algorithm, ...], ...]:
    """`algorithm` with its own average and with each of `averages`, each of these with all `blocks`."""
    with_averages = [algorithm]
    if averages and not any(map(_has_average, _parts(algorithm))):
        raise ArrayError(
            f"Tuner: averages are given, but {algorithm} has no average to replace; leave averages out"
        )
    for average in averages or ():
        other = _changed(algorithm, "average", average, _has_average)
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
        families.append(tuple(_changed(each, "block", block, _has_block) for block in tried) or (each,))
    return tuple(families)


# An algorithm is a tree of frozen dataclasses: with its average, the codec of this, and so on. Of `after`, only
# the algorithm that stays is part of the tree, because the search begins when the first one has ended.


def _fields(part: Any) -> list[str]:
    """The fields of a part that may hold further parts; no fields if it is not a dataclass."""
    if not dataclasses.is_dataclass(part):
        return []
    return ["then"] if isinstance(part, After) else [f.name for f in dataclasses.fields(part) if f.init]


def _parts(tree: Any) -> Iterator[Any]:
    """All parts of a tree, from the root."""
    yield tree
    for name in _fields(tree):
        yield from _parts(getattr(tree, name))


def _changed(tree: Any, field: str, value: Any, where: Callable[[Any], bool]) -> Any:
    """A copy of a tree, with `value` in this field of those parts for which `where` is true."""
    fields = {name: _changed(getattr(tree, name), field, value, where) for name in _fields(tree)}
    if where(tree):
        fields[field] = value
    return dataclasses.replace(tree, **fields) if fields else tree


def _has_average(part: Any) -> bool:
    return "average" in _fields(part)


def _has_block(part: Any) -> bool:
    """Whether this is a codec whose block may change; that of `MinMaxUInt8.bagua()`, a whole chunk, may not."""
    return isinstance(part, MinMaxUInt8) and part.block is not None


def _state_is_whole(algorithm: Algorithm) -> bool:
    """Whether its state has arrays of other lengths than the buckets', which cannot move to other buckets."""
    levels = (part for part in _parts(algorithm) if isinstance(part, Hierarchical))
    return any(isinstance(part, ErrorFeedback) for level in levels for part in _parts(level))


def _warmup_of(algorithm: Algorithm) -> int:
    """How many steps of training pass before the algorithm does what it goes on doing to the end.

    These are the steps of `after`, and the `warmup_steps` of every part that has some.
    """
    parts = _parts(algorithm)
    return sum(part.steps if isinstance(part, After) else getattr(part, "warmup_steps", 0) for part in parts)


def period_of(algorithm: Algorithm) -> int:
    """The algorithm communicates in one of this many steps.

    >>> from bagua_comm import Decentralized, GradientAllReduce
    >>> period_of(DiLoCo(8)), period_of(Every(4, Decentralized())), period_of(GradientAllReduce())
    (8, 4, 1)
    """
    period = 1
    for part in _parts(algorithm):
        period *= part.n if isinstance(part, Every) else part.local_steps if isinstance(part, DiLoCo) else 1
    return period


# ---------------------------------------------------------------------------------------------------
# Which settings to measure next
# ---------------------------------------------------------------------------------------------------


class Search:
    """Says in `cell` which cell of a grid to measure next, and is told by `tell` how long a step took there.

    It climbs: from `start` it moves to the first neighbour that is faster, and so on until no neighbour is; the
    neighbour in the direction of the last move comes first. Then it begins anew at a cell drawn at random from
    those not yet measured. This part measures each cell at most once and ends after `trials` cells. It cannot run
    in circles, whatever the noise: a cell's seconds stay as measured, and each move makes them smaller.

    At the end the fastest few cells are measured again, in turn, and the medians of these measurements decide.

    Args:
        grid: All settings that can be chosen.
        start: The first cell to measure.
        trials: How many cells to measure at most, before the fastest are measured again.
        seed: Seed of the cells at which climbs begin anew.
    """

    def __init__(self, grid: Grid, start: Cell, *, trials: int, seed: int) -> None:
        self._grid = grid
        self._seconds: dict[Cell, float] = {}
        self.best = start
        """The fastest cell known."""
        self._measurements = self._measure(islice(self._climbs(start, seed), trials))
        self.cell: Cell | None = next(self._measurements)
        """The cell to measure next; None if the search has ended."""

    def tell(self, seconds: float) -> None:
        """Give the seconds that a step took at `cell`, and go on to the next cell."""
        try:
            self.cell = self._measurements.send(seconds)
        except StopIteration:
            self.cell = None

    def _measure(self, cells: Iterable[Cell]) -> Generator[Cell, float, None]:
        """Yield these cells and then the fastest of them again, and receive the seconds of each."""
        for cell in cells:
            self._seconds[cell] = yield cell
            self.best = min(self._seconds, key=self._seconds.__getitem__)

        finalists = sorted(self._seconds, key=self._seconds.__getitem__)[:FINALISTS]
        again: dict[Cell, list[float]] = {cell: [] for cell in finalists}
        for cell in finalists * ROUNDS:
            again[cell].append((yield cell))
        self.best = min(again, key=lambda cell: float(np.median(again[cell])))

    def _climbs(self, start: Cell, seed: int) -> Iterator[Cell]:
        """All cells of the grid, each once, in the order of one climb after another."""
        chance = random.Random(seed)
        yield from self._climb(start)
        while unknown := [cell for cell in self._grid if cell not in self._seconds]:
            yield from self._climb(chance.choice(unknown))

    def _climb(self, at: Cell) -> Iterator[Cell]:
        """The unknown cells on the way from `at` to a local optimum; each is measured before the next comes."""
        seconds, before = self._seconds, at
        yield at
        while True:
            ahead = tuple(2 * here - there for here, there in zip(at, before, strict=True))
            for cell in sorted(self._grid.neighbours(at), key=lambda cell: cell != ahead):
                if cell not in seconds:
                    yield cell
                if seconds[cell] < seconds[at]:
                    before, at = at, cell
                    break
            else:
                return


# ---------------------------------------------------------------------------------------------------
# Among ranks
# ---------------------------------------------------------------------------------------------------


class Tuner:
    """Searches for the settings that train fastest, while training goes on; then training stays with them.

    It measures whole training steps on all ranks; the slowest rank's time counts. From the settings that training
    begins with it goes to neighbouring ones for as long as they are faster, and begins anew elsewhere while
    trials are left. In the end it measures the fastest three again, three times in turn, and chooses the best of
    them. A search takes at most (trials + 9) * (steps_per_trial + 1) steps, all of which train.

    Give a tuner to `bagua_torch.DistributedDataParallel`; with an `Engine` of your own, call `start` once and
    `step` after every training step. All ranks make an equal tuner. A tuner serves one training.

    It chooses among bucket sizes only, unless the algorithm already sends blocks of MinMaxUInt8 or `averages` are
    given. So an exact algorithm stays exact, and has the same results wherever transports add in the order of
    ranks (NCCL does not). A larger block is coarser; `blocks=()` keeps the algorithm's own, and
    MinMaxUInt8.bagua() always stays as it is. The settings that training begins with are among the choices.

    When settings change, the state of the algorithm moves to the new buckets; at that moment the old buckets and
    the new ones are both in memory. The search begins when the warm-up of the algorithm (`after`, `warmup_steps`)
    has ended.

    Args:
        bucket_bytes: The bucket sizes to choose from, in bytes; 1 MiB to 128 MiB if None. Sizes that make the
            same buckets count as one.
        averages: The averages to choose from, besides the algorithm's own.
        blocks: The blocks of MinMaxUInt8 to choose from, in elements; 128 to 2048 if None.
        trials: How many different settings to measure at most.
        steps_per_trial: How many steps to time with the same settings; their median counts. With an algorithm
            that communicates in one of n steps, n times as many steps, and the median of the means of n.
        warmup_steps: How many steps to train before the search begins.
        seed: Seed of the settings at which the search begins anew.
        profile: The file that keeps the best settings found. If it has an entry for the same tensors, ranks,
            nodes, transports, algorithm and choices, training uses this entry and does not search. Rank 0 reads
            and writes it.

    Raises:
        ArrayError: An argument is out of range.
    """

    def __init__(
        self,
        *,
        bucket_bytes: Sequence[int] | None = None,
        averages: Sequence[Average] | None = None,
        blocks: Sequence[int] | None = None,
        trials: int = 15,
        steps_per_trial: int = 5,
        warmup_steps: int = 3,
        seed: int = 0,
        profile: str | os.PathLike[str] | None = None,
    ) -> None:
        for name, sizes in (("bucket_bytes", bucket_bytes), ("blocks", blocks)):
            for size in sizes or ():
                check_integer("Tuner", name, size, least=1)
        for average in averages or ():
            check_average_argument("Tuner", average)
        check_integer("Tuner", "trials", trials, least=1)
        check_integer("Tuner", "steps_per_trial", steps_per_trial, least=1)
        check_integer("Tuner", "warmup_steps", warmup_steps, least=0)
        check_integer("Tuner", "seed", seed, least=0)
        self._choices = (bucket_bytes, averages, blocks)
        self._numbers = (trials, steps_per_trial, warmup_steps, seed)
        if profile is not None and not isinstance(profile, (str, os.PathLike)):
            raise ArrayError(f"Tuner: profile is {profile!r}, expected the path of a file")
        self._profile = Path(profile) if profile is not None else None
        self._comm: Communicator | None = None
        self._search: Search | None = None
        self.searching = False
        """Whether the search is still going on."""
        self.history: list[Trial] = []
        """All measurements, in order; at the end come those of the fastest settings, measured again."""
        self.best: Settings
        """The best settings known; before any measurement, those that training begins with."""

    def start(
        self,
        comm: Communicator,
        algorithm: Algorithm,
        specs: Iterable[TensorSpec],
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> Settings:
        """Begin, and return the settings to train with: the given ones, or the best ones if the profile has them.

        Collective.

        Args:
            comm: The ranks.
            algorithm: The algorithm that training begins with.
            specs: The tensors, in the order in which plans are packed.
            bucket_bytes: The bucket size that training begins with, in bytes.

        Raises:
            ArrayError: This tuner was started before; the algorithm has no average or block to replace with those
                given; its state cannot move to other buckets; or the profile was not written by a Tuner.
            CommMismatch: Ranks have different tuners, tensors or algorithms.
            UnsupportedError: An algorithm among the choices does not support a tensor, or cannot be timed.
        """
        if self._comm is not None:
            raise ArrayError(
                "Tuner: this tuner was started before, and a tuner serves one training; make another one"
            )
        check_algorithm_argument("Tuner", "algorithm", algorithm)
        check_integer("Tuner", "bucket_bytes", bucket_bytes, least=1)
        last = phases_of(algorithm)[-1]
        if runs_in_rounds(last):
            raise UnsupportedError(
                f"Tuner: no step waits for {last}, so the time of a step does not tell how fast it is; train "
                "with it without a tuner"
            )
        specs = list(specs)
        grid = make_grid(algorithm, specs, bucket_bytes, *self._choices)
        for family in grid.families:
            check_fit(family[0], Plan.pack(specs), comm.size)
        start = grid.cell_of(bucket_bytes, repr(algorithm))
        assert start is not None
        about = self._compare(comm, algorithm, specs, grid)

        trials, self._steps_per_trial, warmup_steps, seed = self._numbers
        self._comm, self._grid, self._about = comm, grid, about
        self._period = period_of(algorithm)
        self._untimed = max(warmup_steps, _warmup_of(algorithm))
        self._seconds: list[float] = []

        def look_up() -> Cell | None:
            known = _read_profile(self._profile, _key_of(about), grid) if self._profile is not None else None
            if known is None and len(grid) > 1:
                self._search = Search(grid, start, trials=trials, seed=seed)
            return known

        known = _on_root(comm, look_up)
        self.searching = known is None and len(grid) > 1
        self._go_to(start if known is None else known)
        self.best = grid[self._cell]
        return self.best

    @property
    def choices(self) -> list[Settings]:
        """All settings that the tuner can choose."""
        return [self._grid[cell] for cell in self._grid]

    def algorithm_named(self, name: str) -> Algorithm | None:
        """The algorithm among the choices with this repr, as checkpoints have it; None if no choice has it."""
        return {repr(choice.algorithm): choice.algorithm for choice in self.choices}.get(name)

    def step(self, seconds: float) -> Settings | None:
        """Tell how long a step took on this rank; returns the settings to go on with, or None to keep them.

        Collective while `searching`. Returns the same on all ranks.
        """
        if not self.searching:
            return None
        if self._untimed:
            self._untimed -= 1
            self._began_ns = time.perf_counter_ns()
            return None
        self._seconds.append(seconds)
        if len(self._seconds) < self._steps_per_trial * self._period:
            return None

        before = self._cell
        self._end_trial()
        return None if self._cell == before else self._grid[self._cell]

    def _end_trial(self) -> None:
        """Agree on the seconds of the trial that ends here, and on the settings to go on with. Collective."""
        assert self._comm is not None
        comm, search, grid = self._comm, self._search, self._grid
        mine = np.reshape(self._seconds, (self._steps_per_trial, self._period)).mean(axis=1)
        seconds = float(np.median(comm.allreduce(mine, op="max")))
        self.history.append(Trial(grid[self._cell], seconds))
        detail = {**grid[self._cell].plain(), "seconds": seconds}
        comm.tracer.add("tuner: trial", self._began_ns, time.perf_counter_ns(), detail)

        def decide() -> tuple[Cell | None, Cell]:
            assert search is not None  # on rank 0
            search.tell(seconds)
            return search.cell, search.best

        cell, best = _on_root(comm, decide)
        self.best, self.searching = grid[best], cell is not None
        self._go_to(cell or best)
        self._seconds, self._untimed = [], UNTIMED_STEPS
        profile = self._profile
        if cell is None and profile is not None:
            _on_root(comm, lambda: _write_profile(profile, _key_of(self._about), self._entry()))

    def _go_to(self, cell: Cell) -> None:
        """Train with the settings of this cell from now on, and say so in the trace."""
        assert self._comm is not None
        self._cell, self._began_ns = cell, time.perf_counter_ns()
        what = "tuner: try" if self.searching else "tuner: stay with"
        self._comm.tracer.add(what, self._began_ns, self._began_ns, self._grid[cell].plain())
        if self.searching:
            _log.debug("%s %s", what, self._grid[cell])
        else:
            done = "%s %s after %d measurements; %d settings to choose from"
            log_on_root(_log, self._comm.rank, done, what, self._grid[cell], len(self.history), len(self._grid))

    def _compare(
        self, comm: Communicator, algorithm: Algorithm, specs: Sequence[TensorSpec], grid: Grid
    ) -> dict[str, Any]:
        """Check that all ranks search alike; returns all that a profile's entry is valid for. Collective."""
        about = {
            "tensors": hashlib.blake2b(repr(specs).encode(), digest_size=16).hexdigest(),
            "bytes": sum(spec.nbytes for spec in specs),
            "algorithm": repr(algorithm),
            "choices": [list(grid.bucket_bytes), [[repr(each) for each in family] for family in grid.families]],
            "transports": [transport.name for transport in comm.transports],
            "on": "host" if comm.device is None else "device",
        }
        rows = comm.allgather_object((about, self._numbers, comm.node))
        for rank, (theirs, numbers, _) in enumerate(rows):
            if (theirs, numbers) != (about, self._numbers):
                different = [name for name in about if theirs[name] != about[name]] or ["trials, steps or seed"]
                raise CommMismatch(
                    f"Tuner: rank {comm.rank} and rank {rank} have different {', '.join(different)}; give all "
                    "ranks the same model and algorithm, and equal tuners"
                )
        return {**about, "nodes": [node for _, _, node in rows]}

    def _entry(self) -> dict[str, Any]:
        """The entry of a profile: what it is valid for, the best settings, and all measurements."""
        history = [{**trial.settings.plain(), "seconds": trial.seconds} for trial in self.history]
        return {"about": self._about, "best": self.best.plain(), "history": history}


def _on_root(comm: Communicator, function: Callable[[], T]) -> T:
    """Call `function` on rank 0 only; all ranks return what it returns there, or raise what it raises there.

    Collective.

    Raises:
        BaguaError: `function` raised it, or another exception that it stands for, so that no rank waits for one
            that has left.
    """
    outcome: tuple[T | None, BaguaError | None] = (None, None)
    if comm.rank == 0:
        try:
            outcome = (function(), None)
        except BaguaError as exc:
            outcome = (None, exc)
        except Exception as exc:
            outcome = (None, BaguaError(f"Tuner: rank 0 cannot go on: {exc!r}"))
    told: Any = comm.broadcast_object(outcome, root=0)
    value, error = told
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------------
# Profiles
# ---------------------------------------------------------------------------------------------------

_FORMAT = "bagua_comm.tuner 1"


def _key_of(about: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16).hexdigest()


def _read_entries(path: Path) -> dict[str, Any]:
    """All entries of a profile, by key; no entries if the file does not exist yet."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("expected a file, found a folder or a device")
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, expected {_FORMAT!r}")
        entries: dict[str, Any] = dict(content["entries"])
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ArrayError(
                f"Tuner: profile {str(path)!r} cannot be written: its folder does not exist; make it first"
            ) from None
        return {}
    except Exception as exc:  # e.g. RecursionError from deeply nested brackets
        raise ArrayError(
            f"Tuner: profile {str(path)!r} was not written by a Tuner: {exc!r}; give the path of another file"
        ) from exc
    return entries


def _read_profile(path: Path, key: str, grid: Grid) -> Cell | None:
    """The best cell of the grid according to the profile; None if it has no entry with this key."""
    entries = _read_entries(path)
    if key not in entries:
        if entries:
            warnings.warn(
                f"Tuner: profile {str(path)!r} has entries for other trainings, but not for this one; searching",
                stacklevel=2,
            )
        return None
    try:
        cell = grid.cell_of(entries[key]["best"]["bucket_bytes"], entries[key]["best"]["algorithm"])
    except (TypeError, KeyError):
        cell = None
    if cell is None:
        raise ArrayError(
            f"Tuner: profile {str(path)!r}: the best settings of entry {key} are not among the choices; delete "
            "the entry to search again"
        )
    return cell


def _write_profile(path: Path, key: str, entry: dict[str, Any]) -> None:
    """Add an entry, or replace it; a reader finds the file as it was before or as it is after, never half."""
    try:
        entries = {**_read_entries(path), key: entry}
        text = json.dumps({"format": _FORMAT, "entries": entries}, indent=1) + "\n"
        write_at_once(path, text.encode())
    except Exception as exc:  # training goes on
        warnings.warn(
            f"Tuner: profile {str(path)!r} was not written, so the next training will search again: {exc}",
            stacklevel=2,
        )
