"""What is wrong with a job, in words: a pure function of the statuses of its ranks."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ..flight.batches import named
from .status import SIGTERM, Status

HANGS_S = 5.0
"""A call in which a rank has been for so long waits for the ranks that are not in it."""

OF_OTHERS = ("RankFailed", "CommAborted", "CommTimeout")
"""The errors of ranks that wait for another one, which has failed before."""

SLOW = 1.2
"""A rank is slow if its own work takes this many times that of the median rank, as for `bagua trace`."""

LEAST_S = 1e-3
"""The least difference of own work in a step that makes a rank slow."""


def findings(ranks: Sequence[Status]) -> list[str]:
    """The problems of a job, a line each, the likeliest cause first.

    >>> waits = Status("job", 0, 2, "a", "12 3 a", call="barrier #4", call_s=7.0, state="in a call")
    >>> works = Status("job", 1, 2, "a", "13 3 a", last="barrier #3", last_s=7.1, state="training")
    >>> findings([waits, works])
    ['rank 0 has waited in barrier #4 for 7 s; rank 1 has not come: in no call, the last was barrier #3, 7 s ago']
    """
    return [*_gone(ranks), *_stuck(ranks), *_waits(ranks), *_slow(ranks)]


def duration(seconds: float) -> str:
    """A time as text.

    >>> duration(34.2), duration(245), duration(7300)
    ('34 s', '4 min', '2.0 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def milliseconds(seconds: float) -> str:
    """A time of a step as text: three digits.

    >>> milliseconds(0.01234), milliseconds(1.5)
    ('12.3 ms', '1.5e+03 ms')
    """
    return f"{1e3 * seconds:.3g} ms"


def _gone(ranks: Sequence[Status]) -> Iterator[str]:
    failed = [each for each in ranks if each.state == "failed" and each.reason != SIGTERM]
    for each in failed:
        if not each.reason.startswith(OF_OTHERS):
            yield f"rank {each.rank} failed: {each.reason}"
    for each in ranks:
        if each.state == "died":
            within = f" in {each.call}" if each.call else ""
            yield (
                f"rank {each.rank} died{within}: process {each.pid} on {each.host} ended without notice; it "
                "crashed, or was killed, for want of memory or by its launcher after another rank"
            )
    for each in failed:
        if each.reason.startswith(OF_OTHERS):
            yield f"rank {each.rank} failed: {each.reason}"
    if ended := [each.rank for each in ranks if each.state == "failed" and each.reason == SIGTERM]:
        was = "were" if len(ended) > 1 else "was"
        yield f"{named(ended)} {was} ended by SIGTERM, which launchers send when a rank fails, and at Ctrl-C"


def _stuck(ranks: Sequence[Status]) -> Iterator[str]:
    for each in ranks:
        where = f"process {each.pid} on {each.host}"
        if each.state == "stopped":
            yield f"rank {each.rank} is stopped, by a signal or a debugger: kill -CONT continues {where}"
        if each.state == "silent":
            yield (
                f"rank {each.rank} has written nothing for {duration(each.age_s)}, though {where} runs: code of "
                "C that does not let Python run, or a busy host"
            )


def _waits(ranks: Sequence[Status]) -> Iterator[str]:
    """Calls in which ranks wait for others that are not in them."""
    waiting: defaultdict[str, list[Status]] = defaultdict(list)
    for each in ranks:
        if each.call and each.call_s >= HANGS_S and not each.is_over:
            waiting[each.call].append(each)
    for call, inside in waiting.items():
        since = duration(max(each.call_s for each in inside))
        numbers = [each.rank for each in inside]
        text = f"{named(numbers)} {'have' if len(numbers) > 1 else 'has'} waited in {call} for {since}"
        others = [each for each in ranks if each.call != call and not each.is_over]
        yield "; ".join([text, *(f"rank {each.rank} has not come: {_instead(each)}" for each in others[:4])])


def _instead(status: Status) -> str:
    """What a rank does that has not come to a call."""
    at = f", at {status.line}" if status.line else ""
    if status.call:
        return f"in {status.call} for {duration(status.call_s)}{at}"
    last = f", the last was {status.last}, {duration(status.last_s)} ago" if status.last else ""
    return f"in no call{last}{at}"


def _slow(ranks: Sequence[Status]) -> Iterator[str]:
    own = [each.own_s for each in ranks if each.own_s is not None]
    if len(own) < 2:
        return
    median = statistics.median_low(own)
    for each in ranks:
        if each.own_s is not None and each.own_s > max(SLOW * median, median + LEAST_S):
            yield (
                f"rank {each.rank} is slow: its own work takes {milliseconds(each.own_s)} a step, that of the "
                f"median rank {milliseconds(median)}; the others wait for it"
            )
