"""Spans and counters, for Chrome traces and for other tools.

A `Recorder` is always on. It keeps the latest spans in a ring, at well under a microsecond a call.
`Communicator.trace` writes them to a file that https://ui.perfetto.dev opens. `NULL` is a tracer that keeps no
spans.

A `Listener` shows spans in another tool. `import bagua_torch` adds one for PyTorch's profiler, and BAGUA_NVTX=1
one for NVTX (`cuda.NvtxRanges`). Without listeners, a call only checks that there are none.

A device finishes its work long after the host has enqueued it. So a device's span is a pair of events, on a
separate row, whose times are read with the spans.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

DEVICE_SPANS = 2048
"""The number of device spans kept until the spans are read: each holds two events of the driver."""


@dataclass(frozen=True, slots=True)
class Span:
    """An interval on one thread; times in nanoseconds since the epoch."""

    name: str
    thread: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Value:
    """A number at a time, in nanoseconds since the epoch."""

    name: str
    time_ns: int
    number: float


class Tracer(Protocol):
    """A receiver of spans."""

    def span(self, name: str, **args: object) -> SpanContext:
        """Time the body of a `with` statement."""

    def add(self, name: str, start_ns: int, end_ns: int, args: dict[str, object]) -> None:
        """Add a span of the calling thread; times by `time.perf_counter_ns`."""

    def value(self, name: str, number: float) -> None:
        """Add a number, such as the loss, with the present time."""


class Clock(Protocol):
    """The clock of a device."""

    def mark(self) -> object:
        """Record an event with a time on the current stream."""

    def times(self, events: Sequence[Any]) -> list[int | None]:
        """The time of each event, by `time.perf_counter_ns`; None if it has not happened yet."""


@dataclass(frozen=True, slots=True)
class _DeviceRecord:
    """A span between two events, which may not have happened yet."""

    name: str
    row: str
    start: object
    end: object
    args: dict[str, object]
    clock: Clock


class SpanContext:
    """The `with` statement behind `Tracer.span`."""

    __slots__ = ("_args", "_name", "_shown", "_start", "_tracer")

    def __init__(self, tracer: Tracer, name: str, args: dict[str, object]) -> None:
        self._tracer, self._name, self._args = tracer, name, args

    def __enter__(self) -> SpanContext:
        self._shown = show(self._name, self._args) if wanted() else None
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
        if self._shown is not None:
            self._shown.close()


class _ThreadName(threading.local):
    """The name of the calling thread, looked up once per thread."""

    def __init__(self) -> None:
        self.name = threading.current_thread().name


class Recorder:
    """A tracer that keeps the last `capacity` spans of all threads and devices.

    Of the device spans not read yet, it keeps the last `DEVICE_SPANS`.

    >>> recorder = Recorder()
    >>> with recorder.span("encode", bucket=0):
    ...     pass
    >>> [(span.name, span.args) for span in recorder.spans()]
    [('encode', {'bucket': 0})]
    """

    def __init__(self, capacity: int = 16384) -> None:
        self._ring: deque[tuple[str, str, int, int, dict[str, object]]] = deque(maxlen=capacity)
        self._on_device: deque[_DeviceRecord] = deque(maxlen=min(capacity, DEVICE_SPANS))
        self._values: deque[tuple[str, int, float]] = deque(maxlen=capacity)
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._thread = _ThreadName()

    def span(self, name: str, **args: object) -> SpanContext:
        """Time the body of a `with` statement."""
        return SpanContext(self, name, args)

    def add(self, name: str, start_ns: int, end_ns: int, args: dict[str, object]) -> None:
        """Add a span of the calling thread."""
        self._ring.append((name, self._thread.name, start_ns, end_ns, args))

    def value(self, name: str, number: float) -> None:
        """Add a number, such as the loss, with the present time; the last `capacity` numbers are kept.

        >>> recorder = Recorder()
        >>> recorder.value("loss", 0.5)
        >>> [(value.name, value.number) for value in recorder.values()]
        [('loss', 0.5)]
        """
        self._values.append((name, time.perf_counter_ns(), number))

    def values(self) -> list[Value]:
        """The numbers, in the order of their times."""
        return [Value(name, time_ns + self._epoch_ns, number) for name, time_ns, number in self._values]

    def add_on_device(
        self, name: str, row: str, start: object, end: object, args: dict[str, object], clock: Clock
    ) -> None:
        """Add a span of a device, from the event `start` to the event `end`, on the row `row`."""
        self._on_device.append(_DeviceRecord(name, row, start, end, args, clock))

    def now_ns(self) -> int:
        """The present time of spans."""
        return time.perf_counter_ns() + self._epoch_ns

    def spans(self) -> list[Span]:
        """The finished spans, in the order of their ends. Does not wait for a device."""
        self._take_times()
        shift = self._epoch_ns
        ring = sorted(self._ring, key=lambda span: span[3])
        return [Span(n, t, start + shift, end + shift, a) for n, t, start, end, a in ring]

    def _take_times(self) -> None:
        """Move the finished spans of devices to the ring."""
        waiting: defaultdict[int, list[_DeviceRecord]] = defaultdict(list)
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


class DeviceSpan:
    """A span of the current stream's work, from here to `end`, on a row of a `Recorder`'s timeline."""

    def __init__(self, tracer: Tracer, clock: Clock, name: str, row: str) -> None:
        self._recorder = tracer if isinstance(tracer, Recorder) else None
        self._clock, self._name, self._row = clock, name, row
        self._start = clock.mark() if self._recorder is not None else None

    def end(self, **args: object) -> object:
        """Record the span, and return the event of its end; None without a recorder."""
        if self._recorder is None:
            return None
        end = self._clock.mark()
        self._recorder.add_on_device(self._name, self._row, self._start, end, args, self._clock)
        return end


class _NullTracer:
    """A tracer that keeps no spans."""

    def span(self, name: str, **args: object) -> SpanContext:
        return SpanContext(self, name, args)

    def add(self, name: str, start_ns: int, end_ns: int, args: dict[str, object]) -> None:
        pass

    def value(self, name: str, number: float) -> None:
        pass


NULL: Tracer = _NullTracer()


# ---------------------------------------------------------------------------------------------------
# Other tools
# ---------------------------------------------------------------------------------------------------


class Listener(Protocol):
    """Shows spans in another tool as they happen, on their threads."""

    def active(self) -> bool:
        """Whether the tool wants the span that begins now. Called before every span: fast, and never raises."""

    def range(self, name: str, args: Mapping[str, object]) -> AbstractContextManager[object]:
        """A context manager for the span; `args` has "bytes", "bucket" and the like, if known."""


listeners: tuple[Listener, ...] = ()
"""The listeners of all communicators of this process; see `listen` and `ignore`."""
wanted: Callable[[], bool] = bool
"""Whether a tool wants the span that begins now; `bool`, which returns False, without listeners."""


def listen(listener: Listener) -> None:
    """Show all later spans of this process to `listener`; only once if it is added twice.

    If it raises, it is removed with a warning: a tool that fails does not end training.

    >>> import contextlib
    >>> class Printer:
    ...     def active(self):
    ...         return True
    ...     @contextlib.contextmanager
    ...     def range(self, name, args):
    ...         print("begin", label(name, args))
    ...         yield
    ...         print("end", name)
    >>> listen(printer := Printer())
    >>> with Recorder().span("exchange", bucket=0, bytes=4096):
    ...     print("at work")
    begin bagua_comm: exchange bucket=0 bytes=4096
    at work
    end exchange
    >>> ignore(printer)
    """
    if listener not in listeners:
        _listen_only(*listeners, listener)


def ignore(listener: Listener) -> None:
    """Remove `listener`, if it was added; it still sees the end of open spans."""
    _listen_only(*(each for each in listeners if each != listener))


def _listen_only(*those: Listener) -> None:
    """Set `listeners`, and `wanted` to the fastest function for them: every call uses it."""
    global listeners, wanted
    listeners, asked = those, [each.active for each in those]
    wanted = asked[0] if len(asked) == 1 else bool if not asked else lambda: any(ask() for ask in asked)


def label(name: str, args: Mapping[str, object]) -> str:
    """The name of a span in another tool, with its bucket and size.

    >>> label("allreduce", {"op": "avg", "bytes": 4096})
    'bagua_comm: allreduce bytes=4096'
    """
    known = (f" {key}={args[key]}" for key in ("bucket", "bytes") if key in args)
    return f"bagua_comm: {name}{''.join(known)}"


class Ranges:
    """The ranges of a span in other tools."""

    def __init__(self) -> None:
        self._open: list[tuple[Listener, AbstractContextManager[object]]] = []

    def begin(self, listener: Listener, name: str, args: Mapping[str, object]) -> None:
        """Begin a range of `listener`, if it wants the span."""
        try:
            if listener.active():
                opened = listener.range(name, args)
                opened.__enter__()
                self._open.append((listener, opened))
        except Exception as exc:
            _give_up(listener, exc)

    def close(self) -> None:
        """End all ranges."""
        while self._open:
            listener, opened = self._open.pop()
            try:
                opened.__exit__(None, None, None)
            except Exception as exc:
                _give_up(listener, exc)


def show(name: str, args: Mapping[str, object], nbytes: int | None = None) -> Ranges:
    """Begin a span in the tools that want it; close the result at the end of the span."""
    ranges = Ranges()
    known = args if nbytes is None else {"bytes": nbytes, **args}
    for listener in listeners:
        ranges.begin(listener, name, known)
    return ranges


def _give_up(listener: Listener, exc: Exception) -> None:
    ignore(listener)
    warnings.warn(f"{listener!r} failed, and shows no more spans: {exc!r}", RuntimeWarning, stacklevel=4)


# ---------------------------------------------------------------------------------------------------
# Counters
# ---------------------------------------------------------------------------------------------------


@dataclass
class Counter:
    """The calls of an operation on this rank, the bytes it moved, and its time."""

    calls: int = 0
    payload_bytes: int = 0
    """Bytes of the arrays passed to it."""
    wire_bytes: int = 0
    """Bytes that this rank passed to the transport for other ranks."""
    time_ns: int = field(default=0, compare=False, repr=False)
    """Nanoseconds that this rank spent in it, including waits for others; on a device only the host's,
    which enqueues the work. Not compared: it differs in every run."""

    def add(self, payload_bytes: int, wire_bytes: int, time_ns: int = 0) -> None:
        """Count one call."""
        self.calls += 1
        self.payload_bytes += payload_bytes
        self.wire_bytes += wire_bytes
        self.time_ns += time_ns

    @property
    def seconds(self) -> float:
        """`time_ns` in seconds."""
        return self.time_ns / 1e9

    def __add__(self, other: Counter) -> Counter:
        return Counter(
            self.calls + other.calls,
            self.payload_bytes + other.payload_bytes,
            self.wire_bytes + other.wire_bytes,
            self.time_ns + other.time_ns,
        )

    def __sub__(self, other: Counter) -> Counter:
        return Counter(
            self.calls - other.calls,
            self.payload_bytes - other.payload_bytes,
            self.wire_bytes - other.wire_bytes,
            self.time_ns - other.time_ns,
        )

    def as_dict(self, name: str) -> dict[str, float]:
        """The numbers of the operation `name`.

        >>> Counter(1, 8, 12).as_dict("allreduce")
        {'allreduce/calls': 1, 'allreduce/payload_bytes': 8, 'allreduce/wire_bytes': 12, 'allreduce/seconds': 0.0}
        """
        return {
            f"{name}/calls": self.calls,
            f"{name}/payload_bytes": self.payload_bytes,
            f"{name}/wire_bytes": self.wire_bytes,
            f"{name}/seconds": self.seconds,
        }


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
            total.time_ns += counter.time_ns
        return total

    def as_dict(self) -> dict[str, float]:
        """All numbers by name, flat, as wandb, TensorBoard and Prometheus take them; they only grow.

        The names are OPERATION/calls, /payload_bytes, /wire_bytes and /seconds, for every operation called and
        for their sum, "total".

        >>> counters = Counters()
        >>> counters["barrier"].add(0, 2, 500_000_000)
        >>> counters.as_dict()
        {'barrier/calls': 1, 'barrier/payload_bytes': 0, 'barrier/wire_bytes': 2, 'barrier/seconds': 0.5,
         'total/calls': 1, 'total/payload_bytes': 0, 'total/wire_bytes': 2, 'total/seconds': 0.5}

        As text for Prometheus:

        >>> for name, value in counters.as_dict().items():
        ...     operation, measure = name.split("/")
        ...     if operation != "total":   # Prometheus adds up itself
        ...         print(f'bagua_comm_{measure}_total{{operation="{operation}"}} {value}')
        bagua_comm_calls_total{operation="barrier"} 1
        bagua_comm_payload_bytes_total{operation="barrier"} 0
        bagua_comm_wire_bytes_total{operation="barrier"} 2
        bagua_comm_seconds_total{operation="barrier"} 0.5
        """
        numbers: dict[str, float] = {}
        for operation, counter in [*self.by_operation.items(), ("total", self.total())]:
            numbers |= counter.as_dict(operation)
        return numbers


@dataclass
class ExchangeCounters:
    """The exchanges of an engine on this rank, and the time that training waited for them.

    >>> counters = ExchangeCounters(Counter(3, 12, 18), Counter(1, time_ns=500_000_000), commits=1)
    >>> counters.as_dict()
    {'exchange/calls': 3, 'exchange/payload_bytes': 12, 'exchange/wire_bytes': 18, 'exchange/seconds': 0.0,
     'wait/calls': 1, 'wait/seconds': 0.5, 'commit/calls': 1}
    """

    exchange: Counter = field(default_factory=Counter)
    """Exchanged buckets, and the seconds that the lane worked on them."""
    wait: Counter = field(default_factory=Counter)
    """The waits of training, to submit buckets to the lane and for the lane to finish them. On a device over NCCL
    the host does not wait: see the device's rows in `Communicator.trace`."""
    commits: int = 0
    """The number of times that the buckets were written back."""

    def __add__(self, other: ExchangeCounters) -> ExchangeCounters:
        return ExchangeCounters(
            self.exchange + other.exchange, self.wait + other.wait, self.commits + other.commits
        )

    def __sub__(self, other: ExchangeCounters) -> ExchangeCounters:
        return ExchangeCounters(
            self.exchange - other.exchange, self.wait - other.wait, self.commits - other.commits
        )

    def as_dict(self) -> dict[str, float]:
        """All counts by name, flat; they only grow."""
        wait = {"wait/calls": self.wait.calls, "wait/seconds": self.wait.seconds}
        return {**self.exchange.as_dict("exchange"), **wait, "commit/calls": self.commits}


def plain(spans: Sequence[Span]) -> list[Span]:
    """Copies of spans with only JSON's types in `args`; any other value becomes a string.

    Raises:
        Exception: JSON cannot hold `args`, such as a list that contains itself, or a tuple as a key.
    """
    return [
        dataclasses.replace(
            span,
            name=str(span.name),
            args=json.loads(json.dumps(span.args, default=str), parse_constant=str),  # NaN becomes "NaN"
        )
        for span in spans
    ]


def plain_values(values: Sequence[Value]) -> list[Value]:
    """Copies of values, as Python's own numbers.

    Raises:
        Exception: A value is not a number.
    """
    return [Value(str(value.name), value.time_ns, float(value.number)) for value in values]
