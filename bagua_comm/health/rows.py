"""Rows: what a rank measures in a few steps and shares with all others, and the causes that this shows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import NamedTuple

SHARE = 0.4
"""A cause explains at least this share of the time that a rank needs more than the others."""

FAULTS_S = 20.0
"""Pages read from disk in a second, from which on a process is swapping."""

BUSY = "other processes have its processor"
"""The cause that comes and goes most often."""


class StepTimes(NamedTuple):
    """One training step of a rank, from the end of the one before, in seconds."""

    own_s: float
    """All but waits: the rank's own computing, with what its program does between steps."""
    waiting_s: float
    """Training waits for exchanges, or for calls of the program."""
    between_s: float
    """The part of `own_s` before the step begins, such as the loading of data."""


NO_STEP = StepTimes(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Row:
    """The steps of a rank since its last row. All fields are numbers, and travel as float64."""

    step: float
    """The number of the last step, counted from 0."""
    node: float
    """The node of the rank."""
    steps: float
    """The number of steps in this row, 0 without a batch; the three medians below are over them, in seconds."""
    own_s: float
    waiting_s: float
    between_s: float
    seconds: float
    """The time of all of them."""
    queued_s: float
    """The part of `seconds` in which the thread that trains was ready, and other ones had its processor."""
    page_faults: float
    """Pages that were read from disk, as when memory is swapped."""
    throttled: float
    """How often the processor was slowed down for its temperature."""
    share: float
    """The microbatches of the rank, as a multiple of an equal share; 1 unless they are shifted."""
    counts: float
    """A checksum of the microbatches of all ranks, as this rank has them."""

    @classmethod
    def of(
        cls,
        step: int,
        node: int,
        steps: Sequence[StepTimes],
        used: Usage,
        share: float = 1.0,
        counts: float = 0.0,
    ) -> Row:
        """Return the row of these steps, of which `step` is the last."""
        own_s, waiting_s, between_s = map(statistics.median, zip(*(steps or [NO_STEP]), strict=True))
        seconds = sum(each.own_s + each.waiting_s for each in steps)
        return cls(step, node, len(steps), own_s, waiting_s, between_s, seconds, *used, share, counts)

    @property
    def work_s(self) -> float:
        """The time that the rank would need for an equal share of the microbatches."""
        return self.own_s / self.share

    def numbers(self) -> tuple[float, ...]:
        """All fields, in order."""
        return astuple(self)

    def cause(self, others: Sequence[Row]) -> str:
        """Return the likely cause why its rank takes longer than the others; "" if the machine shows none."""

        def more(value: Callable[[Row], float]) -> float:
            return value(self) - statistics.median(map(value, others))

        longer_s = more(lambda row: row.work_s)
        if longer_s <= 0 or not self.steps:
            return ""
        if self.page_faults > FAULTS_S * self.seconds:
            return "its memory is swapped: it reads pages from disk"
        if more(lambda row: row.queued_s / max(row.steps, 1)) > SHARE * longer_s:
            return BUSY
        if self.throttled > 0:
            return "its processor is slowed down for its temperature"
        if more(lambda row: row.between_s) > SHARE * longer_s:
            return "it is late between steps, as when data is loaded"
        return ""


class Usage(NamedTuple):
    """What this process has met since its start; fields of a `Row`."""

    queued_s: float
    page_faults: float
    throttled: float

    @classmethod
    def now(cls) -> Usage:
        """Return the counts until now; those that this system does not have are 0."""
        waited = _numbers(Path("/proc/self/schedstat"))  # of the main thread: on a processor, queued, slices
        throttled = sum(sum(_numbers(path)[:1]) for path in _THROTTLE)
        faults = getrusage(RUSAGE_SELF).ru_majflt
        return cls(waited[1] / 1e9 if len(waited) > 1 else 0.0, faults, throttled)

    def since(self, before: Usage) -> Usage:
        """Return the counts since an earlier time."""
        return Usage(*(now - then for now, then in zip(self, before, strict=True)))


_THROTTLE = sorted(Path("/sys/devices/system/cpu").glob("cpu*/thermal_throttle/package_throttle_count"))[:1]


def _numbers(path: Path) -> list[int]:
    """The integers in a file; none if it cannot be read."""
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []
