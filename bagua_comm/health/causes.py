"""Likely causes of a slow rank, from what its row shows beside its own times."""

from __future__ import annotations

from collections.abc import Sequence

from .rows import Row

SHARE = 0.4
"""A cause explains at least this share of the time that a rank needs more than the others."""

FAULTS_S = 20.0
"""Pages read from disk in a second, from which on a process is swapping."""


BUSY = "other processes have its processor"
"""The cause that comes and goes most often."""


def cause_of(row: Row, others: Sequence[Row]) -> str:
    """Return the likely cause why a rank takes longer than the others; "" if the machine shows none."""

    def more(value: float, others: Sequence[float]) -> float:
        return value - sorted(others)[len(others) // 2]

    longer_s = more(row.own_s, [each.own_s for each in others])
    if longer_s <= 0 or not row.steps:
        return ""
    queued_s = more(row.queued_s / row.steps, [each.queued_s / max(each.steps, 1) for each in others])
    between_s = more(row.between_s, [each.between_s for each in others])
    if row.page_faults > FAULTS_S * row.seconds:
        return "its memory is swapped: it reads pages from disk"
    if queued_s > SHARE * longer_s:
        return BUSY
    if row.throttled > 0:
        return "its processor is slowed down for its temperature"
    if between_s > SHARE * longer_s:
        return "it is late between steps, as when data is loaded"
    return ""
