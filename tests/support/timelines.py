"""Timelines of trainings, made by hand."""

from bagua_comm.timeline.reading import RankTimeline
from bagua_comm.trace import Span

MS = 1_000_000


def timeline_of(spans):
    rank = RankTimeline()
    for span in spans:
        rank.rows.setdefault(span.thread, []).append(span)
    return rank


def span(name, start, end, thread="main", **args):
    return Span(name, thread, round(start * MS), round(end * MS), args)


def step_spans(at, *, bucket_ms=((10, 20), (20, 30)), wait=(25, 32), own=0, kib=1024, wire=0.5, **args):
    """A step of 40 ms from `at` on: forward 0 to 8, backward 9 to 25, waiting to 32, optimizer 33 to 36."""
    yield span("step", at, at + 38 + own, step=0)
    yield span("forward", at, at + 8)
    yield span("backward", at + 9, at + wait[0])
    yield span("wait for exchanges", at + wait[0], at + wait[1])
    yield span("optimizer", at + 33 + own, at + 36 + own)
    for index, (start, end) in enumerate(bucket_ms):
        sent = round(wire * kib * 1024)
        yield span("exchange", at + start, at + end, "lane", bucket=index, bytes=kib * 1024, step=0, **args)
        yield span("allreduce", at + start + 1, at + end - 1, "lane", wire_bytes=sent, bytes=kib * 1024)
        yield span("inner", at + start + 2, at + end - 2, "lane", wire_bytes=sent)  # made by the call


def training(n=5, every=40, **settings):
    return timeline_of([each for i in range(n) for each in step_spans(every * i, **settings)])
