"""The file of a timeline: Chrome trace events, which https://ui.perfetto.dev opens."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..trace import Span, Value
from .calls import grouped

FORMAT = {"format": "bagua_comm timeline", "version": 1}
"""Metadata of the file, in "otherData"; the version changes with the format."""

PIDS_PER_RANK = 1000
"""The pids of ranks are multiples of it, so that Perfetto shows them in their order. See `chrome_trace`."""


def chrome_trace(
    spans_by_rank: Sequence[Sequence[Span]], values_by_rank: Sequence[Sequence[Value]] = ()
) -> dict[str, object]:
    """Lay out the spans of all ranks as Chrome trace events: a process per rank, a row per thread.

    Perfetto takes the thread whose tid is the pid for the main thread of a process, and two threads with one tid
    for one thread. So no tid occurs twice, and none is a pid. It drops spans of a thread that overlap without one
    containing the other; these get a row of their own.

    Source: the Trace Event Format; times in microseconds from the earliest span.
    """
    times = [span.start_ns for spans in spans_by_rank for span in spans]
    times += [value.time_ns for values in values_by_rank for value in values]
    earliest = min(times, default=0)
    rows_by_rank = [rows_of(spans) for spans in spans_by_rank]
    stride = max([PIDS_PER_RANK, *(len(rows) + 1 for rows in rows_by_rank)])
    events: list[dict[str, object]] = []
    for rank, rows in enumerate(rows_by_rank):
        pid = stride * (rank + 1)
        events.append(_metadata("process_name", pid, pid, name=f"rank {rank}"))
        events.append(_metadata("process_sort_index", pid, pid, sort_index=rank))
        for tid, name in enumerate(rows, start=pid + 1):
            events.append(_metadata("thread_name", pid, tid, name=name))
            events.append(_metadata("thread_sort_index", pid, tid, sort_index=tid - pid))
        placed = [(span, tid) for tid, spans in enumerate(rows.values(), start=pid + 1) for span in spans]
        events.extend(
            {
                "ph": "X",
                "name": span.name,
                "pid": pid,
                "tid": tid,
                "ts": (span.start_ns - earliest) / 1e3,
                "dur": (span.end_ns - span.start_ns) / 1e3,
                "args": span.args,
            }
            for span, tid in sorted(placed, key=lambda each: (each[0].start_ns, -each[0].end_ns))
        )
        if rank < len(values_by_rank):
            events.extend(_events_of(values_by_rank[rank], pid, earliest))
    about = {**FORMAT, "ranks": len(spans_by_rank), "start_ns": earliest}
    return {"otherData": about, "displayTimeUnit": "ms", "traceEvents": events}


def write_trace(path: str | Path, trace: Mapping[str, object]) -> None:
    """Write the result of `chrome_trace` as JSON, gzipped if the path ends in ".gz"; makes the folder."""
    with suppress(FileExistsError):  # if it is a file, the next line says so
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(trace).encode()
    Path(path).write_bytes(gzip.compress(data) if str(path).endswith(".gz") else data)


def rows_of(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """The spans of each row, by its name: a thread, or what overlaps on it.

    >>> long, late = Span("long", "main", 0, 10, {}), Span("late", "main", 5, 15, {})
    >>> [(name, [span.name for span in spans]) for name, spans in rows_of([late, long]).items()]
    [('main', ['long']), ('main, overlapping', ['late'])]
    """
    rows: dict[str, list[Span]] = {}
    for name, rest in grouped(spans, lambda span: span.thread).items():
        while rest:
            rows[name], rest = _nested(sorted(rest, key=lambda span: (span.start_ns, -span.end_ns)))
            name += ", overlapping"
    return rows


def _nested(spans: Iterable[Span]) -> tuple[list[Span], list[Span]]:
    """Split spans, in the order of their begin, in those that are nested and the others."""
    nested: list[Span] = []
    others: list[Span] = []
    ends: list[int] = []  # of the spans that contain the present one
    for span in spans:
        while ends and ends[-1] <= span.start_ns:
            ends.pop()
        if ends and ends[-1] < span.end_ns:
            others.append(span)
        else:
            nested.append(span)
            ends.append(span.end_ns)
    return nested, others


def _events_of(values: Iterable[Value], pid: int, earliest: int) -> Iterable[dict[str, object]]:
    """Counters; a value that is not finite, which JSON cannot hold as a number, is an instant event."""
    for value in values:
        at = {"name": value.name, "pid": pid, "ts": (value.time_ns - earliest) / 1e3}
        if math.isfinite(value.number):
            yield {"ph": "C", **at, "args": {"value": value.number}}
        else:
            yield {"ph": "i", "s": "p", "tid": pid, **at, "args": {"value": str(value.number)}}


def _metadata(kind: str, pid: int, tid: int, **args: object) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}
