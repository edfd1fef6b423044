"""The search of a tuner: which settings to measure next."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Iterator
from itertools import islice

import numpy as np

from .grid import Cell, Grid

FINALISTS, ROUNDS = 3, 3
"""Number of settings that are measured again at the end, and how often each."""


class Search:
    """Hill climbing with restarts: `cell` is the cell to measure next, `tell` takes its seconds.

    From `start` it moves to the first neighbour that is faster, until no neighbour is; the neighbour in the
    direction of the last move comes first. Then it restarts at a random cell that was not measured yet. This part
    measures each cell at most once and ends after `trials` cells. It cannot cycle, whatever the noise: the
    seconds of a cell stay as measured, and each move makes them smaller.

    At the end the fastest few cells are measured again, in turn, and the medians of these measurements decide.

    Args:
        grid: All settings that can be chosen.
        start: The first cell to measure.
        trials: Maximum number of cells to measure, before the fastest are measured again.
        seed: Seed of the cells at which climbs restart.
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
        """Report the seconds of a step at `cell`, and set `cell` to the next one."""
        try:
            self.cell = self._measurements.send(seconds)
        except StopIteration:
            self.cell = None

    def _measure(self, cells: Iterable[Cell]) -> Generator[Cell, float, None]:
        """Yield these cells, then the fastest of them again, and receive the seconds of each."""
        for cell in cells:
            self._seconds[cell] = yield cell
            self.best = min(self._seconds, key=self._seconds.__getitem__)

        finalists = sorted(self._seconds, key=self._seconds.__getitem__)[:FINALISTS]
        again: dict[Cell, list[float]] = {cell: [] for cell in finalists}
        for cell in finalists * ROUNDS:
            again[cell].append((yield cell))
        self.best = min(again, key=lambda cell: float(np.median(again[cell])))

    def _climbs(self, start: Cell, seed: int) -> Iterator[Cell]:
        """All cells of the grid, each once, one climb after another."""
        chance = random.Random(seed)
        yield from self._climb(start)
        while unknown := [cell for cell in self._grid if cell not in self._seconds]:
            yield from self._climb(chance.choice(unknown))

    def _climb(self, at: Cell) -> Iterator[Cell]:
        """Unmeasured cells on the way from `at` to a local optimum; each is measured before the next one."""
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
