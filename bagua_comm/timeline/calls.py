"""The calls of a program that has no engine: how many, how long, and what they sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..trace import Span

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True)
class CallSummary:
    """The calls of one name on a rank, in the whole timeline."""

    name: str
    calls: int
    seconds: float
    """In all calls together, waiting for other ranks included."""
    payload_bytes: float
    """Bytes of the arrays handed in, of all calls."""
    wire_bytes: float
    """Bytes sent to other ranks, by all calls."""

    @property
    def of_one(self) -> dict[str, float]:
        """The means over the calls, and their number."""
        totals = {"seconds": self.seconds, "payload_bytes": self.payload_bytes, "wire_bytes": self.wire_bytes}
        return {"calls": self.calls, **{name: total / self.calls for name, total in totals.items()}}


def summarize_calls(spans: Sequence[Span]) -> list[CallSummary]:
    """Add up the calls by name, those that take longest first."""
    found = [
        CallSummary(
            name,
            calls=len(calls),
            seconds=sum(call.end_ns - call.start_ns for call in calls) / 1e9,
            payload_bytes=sum(number(call, "bytes") for call in calls),
            wire_bytes=sum(number(call, "wire_bytes") for call in calls),
        )
        for name, calls in grouped(outermost_calls(spans), lambda call: call.name).items()
    ]
    return sorted(found, key=lambda each: -each.seconds)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by their keys, in their order.

    >>> grouped(["a", "bb", "c"], len)
    {1: ['a', 'c'], 2: ['bb']}
    """
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def is_call(span: Span) -> bool:
    """Whether it is a call of a communicator."""
    return "wire_bytes" in span.args


def outermost_calls(spans: Iterable[Span]) -> list[Span]:
    """The calls, without those that another call makes."""
    calls: list[Span] = []
    for span in sorted(filter(is_call, spans), key=lambda span: (span.thread, span.start_ns, -span.end_ns)):
        if not (calls and calls[-1].thread == span.thread and span.end_ns <= calls[-1].end_ns):
            calls.append(span)
    return calls


def number(span: Span, name: str) -> float:
    """A number among the arguments of a span; 0 if it has none."""
    value = span.args.get(name, 0)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0
