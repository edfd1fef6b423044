"""The times of training: of forward and backward passes and optimizers, as spans, and of steps, for a tuner."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bagua_comm import Tuner
from bagua_comm.trace import Clock, DeviceSpan, Tracer


class StageSpan:
    """The duration of a stage of training, as a span on the host and, for a CUDA device, on the device.

    Args:
        name: The stage.
        tracer: Receives the spans.
        device: The device of the stage.
    """

    def __init__(self, name: str, tracer: Tracer, device: torch.device) -> None:
        self.clock: Clock | None = clock_of(device) if device.type == "cuda" else None
        """The clock of the device, if there is one."""
        self._name, self._tracer = name, tracer
        self._start_ns = 0
        self._on_device: DeviceSpan | None = None

    def begin(self) -> None:
        """Begin the span."""
        self._start_ns = time.perf_counter_ns()
        if self.clock is not None:
            self._on_device = DeviceSpan(self._tracer, self.clock, self._name, f"device: {self._name}")

    def end(self, **detail: object) -> None:
        """End the span, if one has begun; `detail` is shown with it."""
        if self._start_ns:
            self._tracer.add(self._name, self._start_ns, time.perf_counter_ns(), detail)
            if self._on_device is not None:
                self._on_device.end(**detail)
            self.forget()

    def forget(self) -> None:
        """Drop a span that has begun."""
        self._start_ns, self._on_device = 0, None


class DeviceRow:
    """A row of the timeline, of what a CUDA device does on whatever stream is PyTorch's current one.

    Args:
        name: The name of the row.
    """

    def __init__(self, name: str) -> None:
        self._row = f"device: {name}"

    @contextmanager
    def span(self, name: str, tracer: Tracer, device: torch.device, **detail: object) -> Iterator[None]:
        """Time the body of a `with` statement on the device; does nothing on a CPU. `detail` is shown with it."""
        if device.type != "cuda":
            yield
            return
        span = DeviceSpan(tracer, clock_of(device), name, self._row)
        yield
        span.end(**detail)


@functools.cache
def clock_of(device: torch.device) -> TorchClock:
    """The clock of a CUDA device: one for all of its spans, since each has a stream of its own."""
    return TorchClock(device)


class TorchClock:
    """The times of events on PyTorch's current stream, on the host's clock; see `DeviceClock`.

    Its events are PyTorch's, which take a tenth of the time of a stream of CuPy's that is PyTorch's current one.

    Args:
        device: The CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda: Any = torch.cuda  # torch leaves its constructors untyped
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def _event(self) -> torch._C._CudaEventBase:
        event: torch._C._CudaEventBase = self._cuda.Event(enable_timing=True)
        return event

    def mark(self) -> torch._C._CudaEventBase:
        """Record an event with a time on the current stream."""
        event = self._event()
        event.record(self._cuda.current_stream(self._device))
        return event

    def times(self, events: Sequence[torch._C._CudaEventBase]) -> list[int | None]:
        """See `bagua_comm.trace.Clock`. The host waits for the device, but not for other streams."""
        happened = [event.query() for event in events]
        if self._stream is None:
            self._stream = self._cuda.Stream(self._device)
        now, before_ns = self._event(), time.perf_counter_ns()
        now.record(self._stream)
        now.synchronize()
        now_ns = (before_ns + time.perf_counter_ns()) // 2
        return [
            now_ns - round(1e6 * event.elapsed_time(now)) if known else None
            for event, known in zip(events, happened, strict=True)
        ]


class StepTimer:
    """Reports the duration of steps to a tuner, and applies the settings that it returns.

    Args:
        device: The device of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began_s: float | None = None

    def next_step(self, tuner: Tuner | None, replan: Callable[..., object], *, paused: bool) -> None:
        """Report the step that ends here, and begin another one. Collective.

        Args:
            tuner: The tuner, if there is one.
            replan: Changes to other settings, as `DistributedDataParallel.replan` does.
            paused: Whether the duration of these steps does not count.
        """
        if tuner is None or not tuner.searching:
            return
        if paused:
            self._began_s = None
            return
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        if self._began_s is not None:
            change = tuner.step(time.perf_counter() - self._began_s)
            if change is not None:
                replan(bucket_bytes=change.bucket_bytes, algorithm=change.algorithm)
        self._began_s = time.perf_counter()
