"""Spans, byte counters and the flight recorder; written out as a Chrome trace.

A `Recorder` is always on. It keeps the latest spans in a ring, which costs well under a microsecond a call.
`Communicator.trace` writes them to a file that https://ui.perfetto.dev opens. `NULL` is the tracer that keeps
nothing.

A device finishes its work long after the host has enqueued it. So a span of a device is kept as a pair of events,
on a row of its own, and gets its times when somebody reads the spans.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

DEVICE_SPANS = 2048
"""How many spans of devices are kept until somebody reads them: each holds two events of the driver."""


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that took time on one thread; times in nanoseconds since the epoch."""

    name: str
    thread: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]


class Tracer(Protocol):
    """Where spans go."""

    def span(self, name: str, **args: Any) -> SpanContext:
        """Time the body of a `with` statement."""

    def add(self, name: str, start_ns: int, end_ns: int, args: dict[str, Any]) -> None:
        """Keep one span of the calling thread; times by `time.perf_counter_ns`."""


class Clock(Protocol):
    """Tells when the events of a device happened."""

    def times(self, events: Sequence[Any]) -> list[int | None]:
        """When each event happened, by `time.perf_counter_ns`; None if it has not happened yet."""


@dataclass(frozen=True, slots=True)
class _DeviceSpan:
    """A span between two events, which may not have happened yet."""

    name: str
    row: str
    start: Any
    end: Any
    args: dict[str, Any]
    clock: Clock


class SpanContext:
    """The `with` statement behind `Tracer.span`."""

    __slots__ = ("_args", "_name", "_start", "_tracer")

    def __init__(self, tracer: Tracer, name: str, args: dict[str, Any]) -> None:
        self._tracer, self._name, self._args = tracer, name, args

    def __enter__(self) -> SpanContext:
        self._start = time.perf_counter_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._args["error"] = kind.__name__
        self._tracer.add(self._name, self._start, time.perf_counter_ns(), self._args)


class _ThreadName(threading.local):
    """The calling thread's name, looked up once per thread."""

    def __init__(self) -> None:
        self.name = threading.current_thread().name


class Recorder:
    """A tracer that keeps the last `capacity` spans of all threads and devices.

    Of the spans of devices that nobody has read yet, it keeps the last `DEVICE_SPANS`.

    >>> recorder = Recorder()
    >>> with recorder.span("encode", bucket=0):
    ...     pass
    >>> [(span.name, span.args) for span in recorder.spans()]
    [('encode', {'bucket': 0})]
    """

    def __init__(self, capacity: int = 16384) -> None:
        self._ring: deque[tuple[str, str, int, int, dict[str, Any]]] = deque(maxlen=capacity)
        self._on_device: deque[_DeviceSpan] = deque(maxlen=min(capacity, DEVICE_SPANS))
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._thread = _ThreadName()

    def span(self, name: str, **args: Any) -> SpanContext:
        """Time the body of a `with` statement."""
        return SpanContext(self, name, args)

    def add(self, name: str, start_ns: int, end_ns: int, args: dict[str, Any]) -> None:
        """Keep one span of the calling thread."""
        self._ring.append((name, self._thread.name, start_ns, end_ns, args))

    def add_on_device(
        self, name: str, row: str, start: Any, end: Any, args: dict[str, Any], clock: Clock
    ) -> None:
        """Keep one span of a device, from the event `start` to the event `end`, on the row `row`."""
        self._on_device.append(_DeviceSpan(name, row, start, end, args, clock))

    def spans(self) -> list[Span]:
        """The spans that have ended, in the order of their ends. Does not wait for a device."""
        self._take_times()
        shift = self._epoch_ns
        ring = sorted(self._ring, key=lambda span: span[3])
        return [Span(n, t, start + shift, end + shift, a) for n, t, start, end, a in ring]

    def _take_times(self) -> None:
        """Move the spans that have ended on devices to the ring."""
        waiting: defaultdict[int, list[_DeviceSpan]] = defaultdict(list)
        for _ in range(len(self._on_device)):
            span = self._on_device.popleft()
            waiting[id(span.clock)].append(span)
        for spans in waiting.values():
            times = spans[0].clock.times([event for span in spans for event in (span.start, span.end)])
            for span, start_ns, end_ns in zip(spans, times[::2], times[1::2], strict=True):
                if start_ns is None or end_ns is None:
                    self._on_device.append(span)
                else:
                    self._ring.append((span.name, span.row, start_ns, end_ns, span.args))


class _NullTracer:
    """A tracer that keeps nothing."""

    def span(self, name: str, **args: Any) -> SpanContext:
        return SpanContext(self, name, args)

    def add(self, name: str, start_ns: int, end_ns: int, args: dict[str, Any]) -> None:
        pass


NULL: Tracer = _NullTracer()


@dataclass
class Counter:
    """How often an operation ran on this rank, and what it moved."""

    calls: int = 0
    payload_bytes: int = 0
    """Bytes of the arrays handed in."""
    wire_bytes: int = 0
    """Bytes this rank handed to the transport for other ranks."""

    def add(self, payload_bytes: int, wire_bytes: int) -> None:
        """Count one more call."""
        self.calls += 1
        self.payload_bytes += payload_bytes
        self.wire_bytes += wire_bytes


@dataclass
class Counters:
    """A `Counter` per operation.

    >>> counters = Counters()
    >>> counters["allreduce"].add(8, 12)
    >>> counters["barrier"].add(0, 2)
    >>> counters.total()
    Counter(calls=2, payload_bytes=8, wire_bytes=14)
    """

    by_operation: defaultdict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))

    def __getitem__(self, operation: str) -> Counter:
        return self.by_operation[operation]

    def total(self) -> Counter:
        """The sum over all operations."""
        total = Counter()
        for counter in list(self.by_operation.values()):
            total.calls += counter.calls
            total.payload_bytes += counter.payload_bytes
            total.wire_bytes += counter.wire_bytes
        return total


def plain(spans: Sequence[Span]) -> list[Span]:
    """The same spans with only JSON's types in `args`; any other value becomes a string.

    Raises:
        Exception: JSON cannot hold `args`: for instance a list that contains itself, or a key that is a tuple.
    """
    return [
        dataclasses.replace(span, name=str(span.name), args=json.loads(json.dumps(span.args, default=str)))
        for span in spans
    ]


def chrome_trace(spans_by_rank: list[list[Span]]) -> dict[str, Any]:
    """Lay out the spans of all ranks as Chrome trace events: a process per rank, a row per thread.

    Source: the Trace Event Format; times in microseconds from the earliest span.
    """
    earliest = min((span.start_ns for spans in spans_by_rank for span in spans), default=0)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(spans_by_rank):
        threads = {name: i for i, name in enumerate(dict.fromkeys(span.thread for span in spans))}
        events.append(_metadata("process_name", rank, 0, f"rank {rank}"))
        events.extend(_metadata("thread_name", rank, i, name) for name, i in threads.items())
        events.extend(
            {
                "ph": "X",
                "name": span.name,
                "pid": rank,
                "tid": threads[span.thread],
                "ts": (span.start_ns - earliest) / 1e3,
                "dur": (span.end_ns - span.start_ns) / 1e3,
                "args": span.args,
            }
            for span in spans
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
