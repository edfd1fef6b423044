"""Where the time of training steps went, on each rank and in all."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

from ..trace import Span
from .calls import CallSummary, grouped, is_call, number, outermost_calls, summarize_calls
from .intervals import Interval, covered, intersection, length, union
from .reading import RankTimeline, Timeline, is_exchange

DEVICE = "device: "
"""Prefix of the rows of a device."""

SLOW = 1.2
"""A rank is slow if its own work takes this many times as long as that of the median rank."""


@dataclass(frozen=True)
class BucketSummary:
    """The exchanges of a bucket in a step: their means."""

    index: int
    bytes: float
    """Bytes of the bucket."""
    exchange_s: float
    hidden: float
    """The share of the exchange during which training did not wait."""


@dataclass(frozen=True)
class MarkedSpans:
    """The spans of one name that the program itself marks, on the threads that train."""

    name: str
    times: float
    """How many there are in a step, in the mean."""
    seconds: float
    """The time in them in a step, without waits."""


@dataclass(frozen=True)
class RankSummary:
    """The mean step of a rank, in seconds and bytes.

    `step_s` is the time from the end of a step to the end of the next. It is the sum of `forward_s`,
    `backward_s`, `compute_s`, `optimizer_s`, `waiting_s`, `marked_s` and `other_s`.
    """

    rank: int
    steps: int
    """The number of steps in the mean; the first step of a timeline is not in it, unless it is the only one."""
    step_s: float
    median_step_s: float
    slowest_step_s: float
    forward_s: float
    backward_s: float
    compute_s: float
    """Forward and backward passes, where the program does not tell them apart."""
    optimizer_s: float
    waiting_s: float
    """Training waits for exchanges, or for other calls of a communicator."""
    marked_s: float
    """Spans of the program's own, outside of the stages above."""
    other_s: float
    """Everything else, such as the loss and the loading of data."""
    exchange_s: float
    """Buckets are exchanged, beside training or while it waits."""
    hidden: float
    """The share of `exchange_s` during which training did not wait."""
    payload_bytes: float
    sent_payload_bytes: float
    """Those of the exchanges that communicated: between the exchanges of `every` and `DiLoCo`, none does."""
    wire_bytes: float
    """Bytes sent to other ranks in exchanges, or in all calls if there are no exchanges."""
    on_device: bool
    """Whether exchanges and stages are those of a device; then it is idle in a part of `other_s`."""
    buckets: list[BucketSummary]
    marked: list[MarkedSpans]
    """Spans of the program's own, also those inside of stages, the longest first."""
    algorithm: str
    """The algorithm of the last exchange, as `Every(Decentralized)`; "" if the timeline does not say."""
    payload: str
    """The payload, "grad" or "weight"; "" if the timeline does not say."""
    step_ends_s: list[float] = field(repr=False)
    """When steps ended, from the beginning of the timeline."""
    step_waits_s: list[float] = field(repr=False)
    """The wait in each of these steps but the first."""

    @property
    def own_s(self) -> float:
        """The median over steps of the time in which this rank does not wait."""
        ends, waits = self.step_ends_s, self.step_waits_s
        return statistics.median(b - a - wait for (a, b), wait in zip(pairwise(ends), waits, strict=True))


@dataclass(frozen=True)
class Summary:
    """The mean steps of all ranks, and of the mean rank."""

    ranks: list[RankSummary]
    without_steps: list[int]
    """Ranks in whose timeline no step ends."""
    mean: dict[str, float]
    """The means over ranks: the fields of `RankSummary` that are times, bytes or shares."""
    slowest: int | None
    """The rank whose own work takes longest; None with a single rank."""
    slow: bool
    """Whether the other ranks wait for the slowest one."""
    calls: list[CallSummary]
    """The calls on the first rank, if no rank has exchanges: of a program without an engine."""


def summarize(timeline: Timeline) -> Summary:
    """Compute the mean steps of all ranks."""
    found = {rank: summarize_rank(rank, each) for rank, each in timeline.ranks.items()}
    ranks = [each for each in found.values() if each is not None]
    without = [rank for rank, each in found.items() if each is None]
    calls: list[CallSummary] = []
    if timeline.ranks and not any(_exchanges(each.spans) for each in timeline.ranks.values()):
        calls = summarize_calls(next(iter(timeline.ranks.values())).spans)
    names = [each.name for each in fields(RankSummary) if each.type == "float"] if ranks else []
    mean = {name: statistics.fmean(getattr(each, name) for each in ranks) for name in names}
    if len(ranks) < 2:
        return Summary(ranks, without, mean, None, slow=False, calls=calls)
    slowest = max(ranks, key=lambda each: each.own_s)
    others_s = statistics.median(each.own_s for each in ranks if each is not slowest)
    more_s = slowest.own_s - others_s
    slow = slowest.own_s > SLOW * others_s and more_s > 0.05 * slowest.step_s
    return Summary(ranks, without, mean, slowest.rank, slow=slow, calls=calls)


def summarize_rank(rank: int, timeline: RankTimeline) -> RankSummary | None:
    """Compute the mean step of a rank; None if no step ends in its timeline."""
    spans = timeline.spans
    ends = ends_of_steps(spans)
    if len(ends) < 2 or ends[0] == ends[-1]:  # without a length, as in a damaged file
        return None
    window, steps = [(ends[0], ends[-1])], len(ends) - 1

    def mean_s(intervals: list[Interval]) -> float:
        return length(intersection(intervals, window)) / steps / 1e9

    inside = [span for span in spans if ends[0] < span.end_ns <= ends[-1]]
    exchanges = _exchanges(inside)
    waits = _waits(inside, exchanges)
    times = {name: mean_s(_without(_stage(spans, name), waits)) for name in STAGES}
    marked = _marked(inside)
    stages = union(edge for name in STAGES for edge in _stage(spans, name))
    marked_s = mean_s(_without(_without(_intervals(marked), waits), stages))
    step_s, waiting_s = (ends[-1] - ends[0]) / steps / 1e9, mean_s(waits)
    durations = [(b - a) / 1e9 for a, b in pairwise(ends)]
    communicating, calls = _communication(inside)
    exchanged, waited = intersection(_intervals(exchanges), window), covered(waits)
    return RankSummary(
        rank=rank,
        steps=steps,
        step_s=step_s,
        median_step_s=statistics.median(durations),
        slowest_step_s=max(durations),
        forward_s=times["forward"],
        backward_s=times["backward"],
        compute_s=times["forward and backward"],
        optimizer_s=times["optimizer"],
        waiting_s=waiting_s,
        marked_s=marked_s,
        other_s=max(0.0, step_s - waiting_s - marked_s - sum(times.values())),
        exchange_s=mean_s(exchanged),
        hidden=_hidden(exchanged, waits),
        payload_bytes=sum(number(span, "bytes") for span in exchanges) / steps,
        sent_payload_bytes=sum(number(span, "bytes") for span in communicating) / steps,
        wire_bytes=sum(number(span, "wire_bytes") for span in calls) / steps,
        on_device=any(map(_on_device, exchanges)),
        buckets=_buckets(exchanges, waits),
        marked=sorted(
            (
                MarkedSpans(name, len(each) / steps, mean_s(_without(_intervals(each), waits)))
                for name, each in grouped(marked, lambda span: span.name).items()
            ),
            key=lambda each: -each.seconds,
        ),
        algorithm=_last(exchanges, "algorithm"),
        payload=_last(exchanges, "payload"),
        step_ends_s=[end / 1e9 for end in ends],
        step_waits_s=[waited(*step) / 1e9 for step in pairwise(ends)],
    )


def ends_of_steps(spans: Sequence[Span]) -> list[int]:
    """When steps ended, in nanoseconds; of a single step also its beginning, and without steps passes count."""
    steps = [span for span in spans if span.name == "step"]
    if not steps:  # of an earlier version, or of a program without an engine
        passes = sorted(span.start_ns for span in spans if span.name == "backward" and not _on_device(span))
        return passes if len(passes) > 1 else []
    ends = sorted(span.end_ns for span in steps)
    return ends if len(ends) > 1 else [steps[0].start_ns, *ends]


def _on_device(span: Span) -> bool:
    return span.thread.startswith(DEVICE)


def _exchanges(spans: Iterable[Span]) -> list[Span]:
    """The exchanges: as the device ran them, if one did, and otherwise as a thread did."""
    found = list(filter(is_exchange, spans))
    return [span for span in found if _on_device(span)] or found


def _waits(spans: Sequence[Span], exchanges: Sequence[Span]) -> list[Interval]:
    """When training waited for other ranks.

    The threads that train are those with stages of steps. They wait for exchanges on lanes, and in calls. A
    device waits while it exchanges and computes nothing.
    """
    if exchanges and _on_device(exchanges[0]):
        computing = [span for span in spans if _on_device(span) and span.name in STAGES]
        return _without(_intervals(exchanges), _intervals(computing))
    return _intervals(
        span
        for span in _on_training_threads(spans)
        if span.name == "wait for exchanges" or is_exchange(span) or is_call(span)
    )


STAGES = ("forward", "backward", "forward and backward", "optimizer")

OF_LIBRARY = {
    *(*STAGES, "step", "exchange", "wait for exchanges", "exact: small", "commit", "restore", "recovery"),
    *("weights of ranks", "Hierarchical gather", "Reproducible", "reproducible_allreduce", "reproducible_sum"),
}
"""The names of spans of this library that are no calls; all others are of the program."""


def _on_training_threads(spans: Sequence[Span]) -> list[Span]:
    training = {span.thread for span in spans if span.name in (*STAGES, "step", "wait for exchanges")}
    return [span for span in spans if span.thread in training]


def _marked(spans: Sequence[Span]) -> list[Span]:
    """The spans that the program itself marks, by `comm.tracer.span`, on the threads that train."""
    return [
        span
        for span in _on_training_threads(spans)
        if span.name not in OF_LIBRARY
        and not (is_call(span) or _on_device(span) or span.name.startswith("tuner: "))
    ]


def _stage(spans: Iterable[Span], name: str) -> list[Interval]:
    """When a stage ran: on the device, if its times are known there."""
    found = [span for span in spans if span.name == name]
    return _intervals([span for span in found if _on_device(span)] or found)


def _intervals(spans: Iterable[Span]) -> list[Interval]:
    return union((span.start_ns, span.end_ns) for span in spans)


def _without(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The time of `a` that is not in `b`."""
    edges = [-(2**63), *(edge for interval in b for edge in interval), 2**63]
    return intersection(a, list(zip(edges[::2], edges[1::2], strict=True)))


def _hidden(exchanged: list[Interval], waits: list[Interval]) -> float:
    total = length(exchanged)
    return 1 - length(intersection(exchanged, waits)) / total if total else 0.0


def _communication(spans: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """The exchanges with calls in them, and these calls, or, without exchanges, all; none that a call makes."""
    exchanges = grouped((x for x in spans if is_exchange(x) and not _on_device(x)), lambda x: x.thread)
    if not exchanges:
        return [], outermost_calls(spans)
    communicating, sending = [], []
    for thread, each in exchanges.items():
        calls = outermost_calls(span for span in spans if span.thread == thread)
        starts = [call.start_ns for call in calls]
        for exchange in each:
            within = slice(bisect_left(starts, exchange.start_ns), bisect_left(starts, exchange.end_ns))
            if calls[within]:
                communicating.append(exchange)
                sending += calls[within]
    return communicating, sending


def _last(exchanges: Sequence[Span], name: str) -> str:
    """The text of this name in the last exchange that has one."""
    found = [span for span in exchanges if isinstance(span.args.get(name), str)]
    return str(max(found, key=lambda span: span.start_ns).args[name]) if found else ""


def _buckets(exchanges: Sequence[Span], waits: list[Interval]) -> list[BucketSummary]:
    numbered = [span for span in exchanges if isinstance(span.args.get("bucket"), int)]
    return [
        BucketSummary(
            index,
            bytes=statistics.fmean(number(span, "bytes") for span in spans),
            exchange_s=statistics.fmean(span.end_ns - span.start_ns for span in spans) / 1e9,
            hidden=_hidden(_intervals(spans), waits),
        )
        for index, spans in sorted(grouped(numbered, lambda span: span.args["bucket"]).items())
    ]
