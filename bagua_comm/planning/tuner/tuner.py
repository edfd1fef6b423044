"""The tuner: measures training steps on all ranks, and trains with what the search chooses."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from ...algorithms import Algorithm
from ...algorithms.base import check_algorithm_argument, check_integer, pack, runs_in_rounds
from ...averages import Average
from ...averages.base import check_average_argument
from ...bucket import DEFAULT_BUCKET_BYTES, TensorSpec
from ...comm import Communicator
from ...comm.outcomes import on_root
from ...engine import check_fit
from ...errors import ArrayError, BaguaError, CommMismatch, UnsupportedError
from ...logs import log_on_root
from .grid import Cell, Grid, Settings, Trial, make_grid, period_of, warmup_of
from .profile import read_best, write_profile
from .search import Search

UNTIMED_STEPS = 1
"""Steps that are not timed after a change of settings: they touch new memory for the first time."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Tuner:
    """Searches for the settings that train fastest while training runs, then keeps them.

    It measures whole training steps on all ranks; the time of the slowest rank counts. From the settings that
    training begins with it moves to neighbouring ones while they are faster, and restarts elsewhere while trials
    are left. At the end it measures the fastest three again, three times in turn, and chooses the best of them. A
    search takes at most (trials + 9) * (steps_per_trial + 1) steps, all of which train.

    Give a tuner to `bagua_torch.DistributedDataParallel`; with an `Engine` of your own, call `start` once and
    `step` after every training step. All ranks make an equal tuner. A tuner serves one training.

    It chooses among bucket sizes only, unless the algorithm already sends blocks of MinMaxUInt8 or `averages` are
    given. So an exact algorithm stays exact, and has the same results wherever transports add in the order of
    ranks (NCCL does not). A larger block is coarser; `blocks=()` keeps the block of the algorithm, and
    MinMaxUInt8.bagua() never changes. The settings that training begins with are among the choices.

    When settings change, the state of the algorithm moves to the new buckets; old and new buckets are both in
    memory then. The search begins when the warm-up of the algorithm (`after`, `warmup_steps`) has ended.

    Args:
        bucket_bytes: The bucket sizes to choose from, in bytes; 1 MiB to 128 MiB if None. Sizes that make the
            same buckets count as one.
        averages: The averages to choose from, besides that of the algorithm.
        blocks: The blocks of MinMaxUInt8 to choose from, in elements; 128 to 2048 if None.
        trials: Maximum number of different settings to measure.
        steps_per_trial: Number of steps to time with the same settings; their median counts. With an algorithm
            that communicates in one of n steps, n times as many steps, and the median of the means of n.
        warmup_steps: Number of training steps before the search begins.
        seed: Seed of the settings at which the search restarts.
        profile: The file that keeps the best settings found. If they are for the same tensors, ranks, nodes,
            transports, algorithm and choices, training uses them and does not search. Rank 0 reads and writes
            the file.

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
        """Whether the search is running."""
        self.history: list[Trial] = []
        """All measurements, in order; the last are those of the fastest settings, measured again."""
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
        """Begin, and return the settings to train with: the given ones, or the best ones of the profile.

        Collective.

        Args:
            comm: The ranks.
            algorithm: The algorithm that training begins with.
            specs: The tensors, in the order in which plans are packed.
            bucket_bytes: The bucket size that training begins with, in bytes.

        Raises:
            ArrayError: This tuner was started before; the algorithm has no average or block to replace; its
                state cannot move to other buckets; or the profile was not written by a Tuner.
            CommMismatch: Ranks have different tuners, tensors or algorithms.
            UnsupportedError: An algorithm among the choices does not support a tensor, or cannot be timed.
        """
        if self._comm is not None:
            raise ArrayError(
                "Tuner: this tuner was started before, and a tuner serves one training; make another one"
            )
        check_algorithm_argument("Tuner", "algorithm", algorithm)
        check_integer("Tuner", "bucket_bytes", bucket_bytes, least=1)
        last = algorithm.phases[-1]
        if runs_in_rounds(last):
            raise UnsupportedError(
                f"Tuner: no step waits for {last}, so the time of a step does not tell how fast it is; train "
                "with it without a tuner"
            )
        specs = list(specs)
        grid = make_grid(algorithm, specs, bucket_bytes, *self._choices)
        for family in grid.families:
            check_fit(family[0], pack(family[0], specs, bucket_bytes=bucket_bytes), comm.size)
        start = grid.cell_of(bucket_bytes, repr(algorithm))
        assert start is not None
        about = self._compare(comm, algorithm, specs, grid)

        trials, self._steps_per_trial, warmup_steps, seed = self._numbers
        self._comm, self._grid, self._about = comm, grid, about
        self._period = period_of(algorithm)
        self._untimed = max(warmup_steps, warmup_of(algorithm))
        self._seconds: list[float] = []

        def look_up() -> Cell | None:
            known = read_best(self._profile, about, grid) if self._profile is not None else None
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
        """The algorithm among the choices with this repr, as in checkpoints; None if there is none."""
        return {repr(choice.algorithm): choice.algorithm for choice in self.choices}.get(name)

    def step(self, seconds: float) -> Settings | None:
        """Report the seconds of a step on this rank; return the settings to change to, or None to keep them.

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
        """Agree on the seconds of the trial that ends here, and on the next settings. Collective."""
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
            _on_root(comm, lambda: write_profile(profile, self._content()))

    def _go_to(self, cell: Cell) -> None:
        """Train with the settings of this cell from now on, and add them to the trace."""
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
    ) -> dict[str, object]:
        """Check that all ranks search alike; return what a profile is valid for. Collective."""
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

    def _content(self) -> dict[str, object]:
        """The content of a profile: its validity, the best settings, and all measurements."""
        history = [{**trial.settings.plain(), "seconds": trial.seconds} for trial in self.history]
        return {"about": self._about, "best": self.best.plain(), "history": history}


def _on_root(comm: Communicator, function: Callable[[], T]) -> T:
    """Return the result of `function`, which rank 0 alone calls; its error is raised on all ranks. Collective."""
    return on_root(comm, function, lambda text: BaguaError(f"Tuner: rank 0 cannot go on: {text}"))
