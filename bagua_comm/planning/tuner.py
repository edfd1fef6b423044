"""Searching for the bucket size, average and codec block that train fastest, on the steps of training itself.

All ranks train some steps with the same settings and agree on what they took, the slowest rank's time counting;
rank 0 asks Optuna what to try next, and all go on with that. The fastest few are measured once more, in turn,
because steps are noisy, and the best of them stays. `Search` is the part without ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from ..algorithms import Algorithm, DiLoCo, QAdam
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

BUCKET_BYTES = tuple(2**exponent for exponent in range(20, 28))
"""Sizes of buckets that are tried: 1 MiB to 128 MiB."""

BLOCKS = (128, 256, 512, 1024, 2048)
"""Blocks of MinMaxUInt8 that are tried."""

RANDOM_TRIALS = 5
"""Trials before Optuna's sampler has seen enough to judge."""

FINALISTS, ROUNDS = 3, 3
"""How many settings are measured once more at the end, and how often."""

UNTIMED_STEPS = 1
"""After settings have changed, in whose memory nothing has been yet."""

T = TypeVar("T")

# ---------------------------------------------------------------------------------------------------
# What can be chosen
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What to train with."""

    bucket_bytes: int
    algorithm: Algorithm

    def plain(self) -> dict[str, Any]:
        """The same as a number and a string, for traces and files."""
        return {"bucket_bytes": self.bucket_bytes, "algorithm": repr(self.algorithm)}


@dataclass(frozen=True)
class Trial:
    """Settings, and the seconds that a step took with them: the median of the slowest ranks'."""

    settings: Settings
    seconds: float


Cell: TypeAlias = tuple[int, int, int]
"""Where settings lie in a grid: the numbers of the bucket size, of the average, and of the block."""


@dataclass(frozen=True)
class Grid:
    """All that can be chosen.

    >>> grid = Grid((1, 2, 4), (("exact",), ("128", "256")))
    >>> grid[2, 1, 0]
    Settings(bucket_bytes=4, algorithm='128')
    >>> grid.neighbours((2, 1, 0))
    [(1, 1, 0), (2, 1, 1), (2, 0, 0)]
    """

    bucket_bytes: tuple[int, ...]
    families: tuple[tuple[Algorithm, ...], ...]
    """For each average the algorithm with it, in all blocks."""

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
        """Where settings lie, the algorithm given by its repr; None if nowhere."""
        matches = (
            p for p in self if self[p].bucket_bytes == bucket_bytes and repr(self[p].algorithm) == algorithm
        )
        return next(matches, None)

    def neighbours(self, cell: Cell) -> list[Cell]:
        """Cells one step away: in the bucket size, in the block, or with another average."""
        i, j, k = cell
        beside = [(i - 1, j, k), (i + 1, j, k), (i, j, k - 1), (i, j, k + 1)]
        others = [self.nearest(i, other, k) for other in range(len(self.families)) if other != j]
        return [cell for cell in (*beside, *others) if cell in self]

    def nearest(self, bucket: int, average: int, block: int) -> Cell:
        """The cell with these numbers; an average that has fewer blocks, with its last."""
        return bucket, average, min(block, len(self.families[average]) - 1)


def make_grid(
    algorithm: Algorithm,
    specs: Sequence[TensorSpec],
    own_bytes: int,
    bucket_bytes: Sequence[int] | None,
    averages: Sequence[Average] | None,
    blocks: Sequence[int] | None,
) -> Grid:
    """What can be chosen for these tensors; what training began with is among it.

    Raises:
        ArrayError: Something is to be chosen that the algorithm does not have, or there is no choice.
    """
    families = _families(algorithm, averages, blocks)
    sizes = {own_bytes, *(BUCKET_BYTES if bucket_bytes is None else bucket_bytes)}
    whole = [a for family in families for a in family if _state_is_whole(a)]
    if whole:
        if bucket_bytes or len(families) == len(families[0]) == 1:
            raise ArrayError(
                f"Tuner: in {whole[0]} ErrorFeedback, inside Hierarchical, keeps what belongs to a bucket as "
                "a whole and cannot move to another one, so their size cannot be searched for"
            )
        sizes = {own_bytes}
    distinct = {Plan.pack(specs, bucket_bytes=size): size for size in [*sorted(sizes, reverse=True), own_bytes]}
    return Grid(tuple(sorted(distinct.values())), families)


def _families(
    algorithm: Algorithm, averages: Sequence[Average] | None, blocks: Sequence[int] | None
) -> tuple[tuple[Algorithm, ...], ...]:
    """`algorithm` with its own average and with each of `averages`, and these in all `blocks`."""
    with_averages = [algorithm]
    if averages and not any(map(_has_average, _parts(algorithm))):
        raise ArrayError(f"Tuner: averages are given, but {algorithm} has no average to choose")
    for average in averages or ():
        other = _changed(algorithm, "average", average, _has_average)
        if other not in with_averages:
            with_averages.append(other)
    if blocks and not any(_has_block(part) for each in with_averages for part in _parts(each)):
        raise ArrayError(f"Tuner: blocks are given, but {algorithm} sends no blocks of MinMaxUInt8")
    families = []
    for each in with_averages:
        own = {part.block for part in _parts(each) if _has_block(part)}
        tried = sorted(own | set(BLOCKS if blocks is None else blocks)) if own else []
        families.append(tuple(_changed(each, "block", block, _has_block) for block in tried) or (each,))
    return tuple(families)


# Settings are trees of frozen dataclasses. Of `after`, it is the algorithm at the end that is searched for.


def _inner(settings: Any) -> list[str]:
    """The fields of a part of settings that are searched; none of what is no dataclass."""
    if not dataclasses.is_dataclass(settings):
        return []
    return ["then"] if isinstance(settings, After) else [f.name for f in dataclasses.fields(settings) if f.init]


def _parts(settings: Any) -> Iterator[Any]:
    """All that is in a tree of settings, from the root."""
    yield settings
    for name in _inner(settings):
        yield from _parts(getattr(settings, name))


def _changed(settings: Any, field: str, value: Any, where: Callable[[Any], bool]) -> Any:
    """A copy of a tree of settings, with another value in one field of the parts that `where` says."""
    fields = {name: _changed(getattr(settings, name), field, value, where) for name in _inner(settings)}
    if where(settings):
        fields[field] = value
    return dataclasses.replace(settings, **fields) if fields else settings


def _has_average(part: Any) -> bool:
    return "average" in _inner(part)


def _has_block(part: Any) -> bool:
    """Whether this is a codec with a block; one block for each chunk, as Bagua has it, stays."""
    return isinstance(part, MinMaxUInt8) and part.block is not None


def _state_is_whole(algorithm: Algorithm) -> bool:
    """Whether it keeps arrays that are not as long as their buckets."""
    levels = (part for part in _parts(algorithm) if isinstance(part, Hierarchical))
    return any(isinstance(part, ErrorFeedback) for level in levels for part in _parts(level))


def _warmup_of(algorithm: Algorithm) -> int:
    """Steps of training before the algorithm does what it does to the end."""
    steps = 0
    for part in _parts(algorithm):
        steps += part.steps if isinstance(part, After) else part.warmup_steps if isinstance(part, QAdam) else 0
    return steps


def period_of(algorithm: Algorithm) -> int:
    """In one of how many steps the algorithm communicates.

    >>> from bagua_comm import Decentralized, GradientAllReduce
    >>> period_of(DiLoCo(8)), period_of(Every(4, Decentralized())), period_of(GradientAllReduce())
    (8, 4, 1)
    """
    period = 1
    for part in _parts(algorithm):
        period *= part.n if isinstance(part, Every) else part.local_steps if isinstance(part, DiLoCo) else 1
    return period


# ---------------------------------------------------------------------------------------------------
# Ask and tell
# ---------------------------------------------------------------------------------------------------


class Search:
    """Says which cell of a grid to measure next, and is told the seconds.

    The first `trials` cells are each another one. Optuna's TPE sampler proposes them, some at random to
    begin with; where it comes back to one that is known, a neighbour of the best that is not takes its turn. Then
    the best few are measured again, in turn.

    Args:
        grid: What can be chosen: two cells at least.
        start: The first cell to measure.
        trials: How many cells to measure at most, before the best are measured again.
        seed: Of the sampler.

    Raises:
        UnsupportedError: Optuna is not installed.
    """

    def __init__(self, grid: Grid, start: Cell, *, trials: int, seed: int) -> None:
        self._grid, self._trials = grid, min(trials, len(grid))
        self.best = start
        """The fastest cell known."""
        self._measurements = self._search(start, seed)
        with _quiet():
            self.cell: Cell | None = next(self._measurements)
            """What to measure next; None if the search has ended."""

    def tell(self, seconds: float) -> None:
        """Give the seconds that a step took at `cell`, and go on to the next one."""
        with _quiet():
            try:
                self.cell = self._measurements.send(seconds)
            except StopIteration:
                self.cell = None

    def _search(self, start: Cell, seed: int) -> Generator[Cell, float, None]:
        """Yields cells, and receives their seconds."""
        optuna = _import_optuna()
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=RANDOM_TRIALS, multivariate=True)
        study = optuna.create_study(sampler=sampler)
        known: dict[Cell, float] = {}
        trial = self._enqueued(study, start)
        while True:
            cell = self._cell_of(trial)
            if cell not in known:
                known[cell] = yield cell
            study.tell(trial, known[cell])
            ranking = sorted(known, key=lambda cell: known[cell])
            self.best = ranking[0]
            if len(known) == self._trials:
                break
            trial = study.ask()
            if self._cell_of(trial) in known:
                study.tell(trial, known[self._cell_of(trial)])
                near = (other for cell in ranking for other in self._grid.neighbours(cell))
                trial = self._enqueued(study, next(other for other in near if other not in known))

        again: dict[Cell, list[float]] = {cell: [] for cell in ranking[:FINALISTS]}
        for cell in list(again) * ROUNDS:
            again[cell].append((yield cell))
        self.best = min(again, key=lambda cell: float(np.median(again[cell])))

    def _cell_of(self, trial: Any) -> Cell:
        """The cell that a trial of Optuna's is about."""
        bucket = trial.suggest_int("bucket", 0, len(self._grid.bucket_bytes) - 1)
        average = trial.suggest_categorical("average", list(range(len(self._grid.families))))
        block = trial.suggest_int("block", 0, max(map(len, self._grid.families)) - 1)
        return self._grid.nearest(bucket, average, block)

    def _enqueued(self, study: Any, cell: Cell) -> Any:
        """A trial about this cell."""
        study.enqueue_trial(dict(zip(("bucket", "average", "block"), cell, strict=True)))
        return study.ask()


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError as exc:
        raise UnsupportedError(
            "Tuner: searching needs Optuna, which is not installed: pip install 'bagua-comm[tune]'"
        ) from exc
    return optuna


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to itself what Optuna logs and warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging = _import_optuna().logging
        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.ERROR)
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)


# ---------------------------------------------------------------------------------------------------
# Among ranks
# ---------------------------------------------------------------------------------------------------


class Tuner:
    """Searches for the settings that train fastest, while training goes on; then they stay.

    What is measured are whole steps on all ranks, the slowest of which counts. A search takes at most
    (trials + 9) * (steps_per_trial + 1) steps, all of which train. Give it to
    `bagua_torch.DistributedDataParallel`; with an `Engine` of your own, call `start` once and `step` after every
    step. All ranks make an equal one. It serves one training.

    Only bucket sizes are searched for, unless the algorithm sends blocks of MinMaxUInt8 already or `averages`
    are given: an exact algorithm stays exact, with the same results wherever transports add in the order of ranks
    (NCCL doesn't). A larger block is coarser; `blocks=()` leaves it as it is, and MinMaxUInt8.bagua() always
    stays. What training begins with is among the choices, and measured first.

    What algorithms keep moves along whenever settings change, and for that moment there is memory for old buckets
    and new. The search begins when the warm-up of the algorithm (`after`, QAdam) has ended.

    Args:
        bucket_bytes: Sizes of buckets to choose from, 1 MiB to 128 MiB if None. Sizes that make the same
            buckets count as one.
        averages: Averages to choose from, besides the algorithm's own.
        blocks: Blocks of MinMaxUInt8 to choose from; 128 to 2048 if None.
        trials: How many different settings to measure, at most.
        steps_per_trial: Steps whose median is the time of a trial; for an algorithm that communicates in one of n
            steps, n times as many.
        warmup_steps: Steps of training before the search.
        seed: Of the search.
        profile: A file that remembers what was found. If it has an entry for the same tensors, ranks, nodes,
            transports, algorithm and choices, that is used, and nothing searched for. It is written by rank 0.

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
        """Whether the search goes on."""
        self.history: list[Trial] = []
        """What was measured, in order; the last are those that were measured again."""
        self.best: Settings
        """The best settings known; those that training began with, at first."""

    def start(
        self,
        comm: Communicator,
        algorithm: Algorithm,
        specs: Iterable[TensorSpec],
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> Settings:
        """Begin; returns what to train with: these settings, or what the profile knows to be best.

        Collective.

        Args:
            comm: The ranks.
            algorithm: The algorithm that training begins with.
            specs: The tensors, in the order in which plans are packed.
            bucket_bytes: The size of buckets that training begins with.

        Raises:
            ArrayError: This tuner was started before, the algorithm does not have what is to be chosen, or the
                profile is no file of a tuner's.
            CommMismatch: Ranks have different tuners, tensors or algorithms.
            UnsupportedError: An algorithm among the choices cannot carry a tensor, or cannot be timed; or Optuna
                is not installed.
        """
        if self._comm is not None:
            raise ArrayError("Tuner: it serves one training, and was started before; make another")
        check_algorithm_argument("Tuner", "algorithm", algorithm)
        check_integer("Tuner", "bucket_bytes", bucket_bytes, least=1)
        last = phases_of(algorithm)[-1]
        if runs_in_rounds(last):
            raise UnsupportedError(f"Tuner: no step waits for {last}, so steps don't tell how fast it is")
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
        """All that there is to choose from."""
        return [self._grid[cell] for cell in self._grid]

    def algorithm_named(self, name: str) -> Algorithm | None:
        """The algorithm among the choices whose repr this is, as a checkpoint has it; None if there is none."""
        return {repr(choice.algorithm): choice.algorithm for choice in self.choices}.get(name)

    def step(self, seconds: float) -> Settings | None:
        """Tell what a training step took on this rank; returns settings to go on with, None for the same.

        Collective while `searching`: it returns the same on all ranks.
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
        """Agree on what was measured, and on how to go on. Collective."""
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
        """Train with the settings there from now on; the trace says so."""
        assert self._comm is not None
        self._cell, self._began_ns = cell, time.perf_counter_ns()
        what = "tuner: try" if self.searching else "tuner: stay with"
        self._comm.tracer.add(what, self._began_ns, self._began_ns, self._grid[cell].plain())

    def _compare(
        self, comm: Communicator, algorithm: Algorithm, specs: Sequence[TensorSpec], grid: Grid
    ) -> dict[str, Any]:
        """Make sure that all ranks search alike; returns what an entry of a profile is valid for. Collective."""
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
                    f"Tuner: rank {comm.rank} and rank {rank} have different {', '.join(different)}"
                )
        return {**about, "nodes": [node for _, _, node in rows]}

    def _entry(self) -> dict[str, Any]:
        """What a profile keeps: the best settings, and how they were found."""
        history = [{**trial.settings.plain(), "seconds": trial.seconds} for trial in self.history]
        return {"about": self._about, "best": self.best.plain(), "history": history}


def _on_root(comm: Communicator, function: Callable[[], T]) -> T:
    """What `function` returns on rank 0, or raises there, on all ranks. Collective.

    Raises:
        BaguaError: Whatever it was that was raised, so that no rank waits for one that has left.
    """
    outcome: tuple[T | None, BaguaError | None] = (None, None)
    if comm.rank == 0:
        try:
            outcome = (function(), None)
        except BaguaError as exc:
            outcome = (None, exc)
        except Exception as exc:
            outcome = (None, BaguaError(f"Tuner: rank 0 cannot go on: {exc!r}"))
    value, error = comm.broadcast_object(outcome, root=0)
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
    """All entries of a profile, by key; none if there is no such file yet."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is a folder or a device")
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, expected {_FORMAT!r}")
        entries: dict[str, Any] = dict(content["entries"])
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ArrayError(f"Tuner: profile {str(path)!r} cannot be written: it has no folder") from None
        return {}
    except Exception as exc:  # of brackets without end RecursionError, say
        raise ArrayError(f"Tuner: profile {str(path)!r} is no file of a tuner's: {exc!r}") from exc
    return entries


def _read_profile(path: Path, key: str, grid: Grid) -> Cell | None:
    """The cell in the grid that the profile knows to be best; None if it has no entry with this key."""
    entries = _read_entries(path)
    if key not in entries:
        if entries:
            warnings.warn(
                f"Tuner: profile {str(path)!r} knows other trainings, but not this one; searching", stacklevel=2
            )
        return None
    try:
        cell = grid.cell_of(entries[key]["best"]["bucket_bytes"], entries[key]["best"]["algorithm"])
    except (TypeError, KeyError):
        cell = None
    if cell is None:
        raise ArrayError(
            f"Tuner: profile {str(path)!r}: the best settings of entry {key} are none of the choices"
        )
    return cell


def _write_profile(path: Path, key: str, entry: dict[str, Any]) -> None:
    """Add an entry, or replace it; a reader finds the file as it was or as it will be."""
    try:
        entries = {**_read_entries(path), key: entry}
        text = json.dumps({"format": _FORMAT, "entries": entries}, indent=1) + "\n"
        write_at_once(path, text.encode())
    except Exception as exc:  # training goes on
        warnings.warn(f"Tuner: profile {str(path)!r} was not written: {exc}", stacklevel=2)
