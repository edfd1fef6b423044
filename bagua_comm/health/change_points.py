"""Change points in series of rows: where something has become slow, and where it is no longer.

The statistics are robust, since times of steps have outliers: a median, and the median absolute deviation from it
(MAD; Hampel, 1974, "The influence curve and its role in robust estimation"), over the rows before. One row proves
nothing: `ROWS` in a row must agree.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

ROWS = 3
"""The number of successive rows that must be beyond the limit."""

HISTORY = 64
"""The number of earlier rows that the limit is computed from."""

LEAST_HISTORY = 6
"""The number of earlier rows without which only `at_once` is a limit."""

DEVIATIONS = 3.0
"""How many deviations of earlier rows a change exceeds."""


class Series:
    """Values of which larger ones are worse, such as the time of a rank as a multiple of the others'.

    Args:
        least: No value below it is slow, whatever was before.
        growth: A slow value is at least this multiple of the median before.
        at_once: The limit while there is no history.
    """

    def __init__(self, least: float, growth: float, at_once: float) -> None:
        self._least, self._growth = least, growth
        self._before: deque[float] = deque(maxlen=HISTORY)
        self._beyond: list[float] = []
        """The latest successive values on the other side of the limit, or of the way back."""
        self.limit, self.usual = at_once, 1.0
        """Of the next value, and the median before."""
        self.is_slow = False

    def add(self, value: float, rows: int = ROWS) -> int:
        """Add the value of a row; change `is_slow` if `rows` or more successive values are beyond the limit.

        Returns:
            Their number if `is_slow` has changed, else 0.
        """
        back = (self.limit + self.usual) / 2  # half of the way
        if value < back if self.is_slow else value > self.limit:
            self._beyond.append(value)
        else:
            self._keep([*self._beyond, value])
            self._beyond = []
        if len(self._beyond) < rows:
            return 0
        count, self._beyond = len(self._beyond), []
        self.is_slow = not self.is_slow
        return count

    def _keep(self, values: list[float]) -> None:
        """Add values to the history, unless they are slow, and compute the next limit."""
        if self.is_slow:
            return
        self._before.extend(values)
        if len(self._before) >= LEAST_HISTORY:
            self.usual = statistics.median(self._before)
            deviation = 1.4826 * statistics.median(abs(each - self.usual) for each in self._before)
            self.limit = max(self._least, self._growth * self.usual, self.usual + DEVIATIONS * deviation)


def relative_to_others(values: Sequence[float]) -> list[float]:
    """Each value as a multiple of the median of the other ones.

    >>> relative_to_others([1.0, 1.0, 3.0])
    [0.5, 0.5, 3.0]
    """
    others = [[*values[:rank], *values[rank + 1 :]] for rank in range(len(values))]
    return [value / max(statistics.median(rest), 1e-9) for value, rest in zip(values, others, strict=True)]
