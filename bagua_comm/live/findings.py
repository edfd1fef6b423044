"""What is wrong with a job, in words: a pure function of the statuses of its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..flight.batches import named
from .status import OVER, SIGTERM, Status

HANGS_S = 5.0
"""A rank that has been in a call for so long waits for the ranks that are not in it."""

OF_OTHERS = ("RankFailed", "CommAborted", "CommTimeout")
"""The errors of ranks that wait for another one, which has failed before."""


def findings(ranks: Sequence[Status]) -> list[str]:
    """The problems of a job, a line each, the likeliest cause first.

    >>> barrier = {"call": "barrier #4", "members": (0, 1), "state": "in a call"}
    >>> waits = Status("job", 0, 2, "a", 12, call_s=7.0, **barrier)
    >>> works = Status("job", 1, 2, "a", 13, last="barrier #3", last_s=7.1)
    >>> findings([waits, works])
    ['rank 0 waits in barrier #4 for 7 s; rank 1 has not come: in no call, the last was barrier #3, 7 s ago']
    """
    ended = [each.rank for each in ranks if each.reason == SIGTERM]
    text = "ended by SIGTERM, which launchers send when a rank fails, and at Ctrl-C"
    return [
        *(
            _trouble(each)
            for each in sorted(ranks, key=_is_due_to_others)
            if each.state in _TROUBLE and each.reason != SIGTERM
        ),
        *([f"{named(ended)} {'were' if len(ended) > 1 else 'was'} {text}"] if ended else []),
        *_waits([each for each in ranks if each.state not in OVER]),
        *dict.fromkeys(text for each in ranks for text in each.slow.split("; ") if text),
    ]


_TROUBLE = {
    "failed": "failed: {reason}",
    "died": "died: {it} ended without notice; it crashed, or a signal ended it: SIGTERM, as torchrun sends to "
    "all when a rank fails, or SIGKILL, as the kernel does for want of memory",
    "stopped": "is stopped, by a signal or a debugger: {it}",
    "silent": "is silent for {age}, though {it} runs: C code does not let Python run, or the host is busy",
}
"""What is told of a rank in some states."""


def _trouble(status: Status) -> str:
    it, age = f"process {status.pid} on {status.host}", duration(status.age_s)
    return f"rank {status.rank} {_TROUBLE[status.state].format(reason=status.reason, it=it, age=age)}"


def _is_due_to_others(status: Status) -> int:
    """0 for a rank that has failed by itself, 1 if that is not known, 2 if it waited for one that had failed."""
    return 2 if status.reason.startswith(OF_OTHERS) else int(status.state != "failed")


def duration(seconds: float) -> str:
    """A time as text.

    >>> duration(34.2), duration(245), duration(7300)
    ('34 s', '4 min', '2.0 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _waits(ranks: Sequence[Status]) -> Iterator[str]:
    """Calls in which ranks wait for others that are not in them. The numbers of messages are each rank's own."""
    late = [(each.call, each.members or (each.rank,)) for each in ranks if each.call_s >= HANGS_S]
    for call, members in dict.fromkeys(late):
        awaited = [each for each in ranks if each.rank in members]
        inside = [each for each in awaited if each.call == call]
        others = [
            f"rank {each.rank} has {'left it' if each.last == call else 'not come'}: {_instead(each)}"
            for each in awaited
            if each.call != call
        ]
        wait = (
            f"wait{'' if len(inside) > 1 else 's'} in {call} for {duration(max(each.call_s for each in inside))}"
        )
        yield "; ".join([f"{named([each.rank for each in inside])} {wait}", *others[:4]])


def _instead(status: Status) -> str:
    """What a rank does that has not come to a call."""
    last = f", the last was {status.last}, {duration(status.last_s)} ago" if status.last else ""
    doing = f"in {status.call} for {duration(status.call_s)}" if status.call else f"in no call{last}"
    return f"{doing}, at {status.line}" if status.line else doing
