"""CUDA devices, streams and events, through CuPy, which is imported at the first use."""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from threading import get_ident
from types import ModuleType
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np

from ..arrays import Array, Scratch, check_device, library
from ..errors import CommTimeout, UnsupportedError
from ..trace import label
from .futures import TaskFuture


class Stream(Protocol):
    """A stream of CuPy."""

    ptr: int

    def use(self) -> object:
        """Make it the current stream of this thread."""

    def is_capturing(self) -> bool:
        """Whether it is being captured in a CUDA graph."""

    def wait_event(self, event: Event) -> None:
        """Let later work on it wait for an event."""


class Event(Protocol):
    """An event of CuPy."""

    ptr: int

    def record(self, stream: Stream | None = None) -> None:
        """Record it on a stream, by default on the current one."""

    def synchronize(self) -> None:
        """Wait until it has happened."""


# Events -------------------------------------------------------------------------------------------------


def mark(x: Array) -> Event | None:
    """Record an event on the current stream if `x` is a device array; None if it is a host array."""
    return None if library(x) == "numpy" else record_event()


def record_event(stream: Stream | None = None) -> Event:
    """Record an event on `stream`, or on the current one, after all work enqueued there so far."""
    event: Event = sys.modules["cupy"].cuda.Event(disable_timing=True)
    event.record(stream)
    return event


_NOT_YET = frozenset({600, 900, 901, 906, 907})
"""CUDA's codes for an event that has not happened, or that cannot be queried while a stream is captured."""


def passed(event: Event) -> bool:
    """Whether an event has happened; False while CUDA cannot answer.

    CuPy's own `Event.done` stays False after an error of the device.

    Raises:
        CUDARuntimeError: The device has met an error.
    """
    runtime = sys.modules["cupy"].cuda.runtime
    status = runtime.eventQuery(event.ptr)
    if status and status not in _NOT_YET:
        raise runtime.CUDARuntimeError(status)
    return bool(status == 0)


def after(event: Event | None) -> None:
    """Make the current stream wait for an event of `mark`; the host does not wait."""
    if event is not None:
        sys.modules["cupy"].cuda.get_current_stream().wait_event(event)


# Streams ------------------------------------------------------------------------------------------------


def is_capturing(stream: Stream) -> bool:
    """Whether a stream is being captured in a CUDA graph.

    Raises:
        UnsupportedError: It is the default stream, and a stream that synchronizes with it is being captured.
    """
    runtime = sys.modules["cupy"].cuda.runtime
    try:
        return bool(stream.is_capturing())
    except runtime.CUDARuntimeError as exc:
        if exc.status != _IMPLICIT_CAPTURE:
            raise
        raise UnsupportedError(explained(exc)) from exc


def explained(exc: Any) -> str:
    """The message of a CUDA error, with advice for errors that are hard to understand."""
    if exc.status != _IMPLICIT_CAPTURE:
        return str(exc)
    return (
        f"{exc}; the default stream cannot be used while a stream that takes turns with it is captured in a CUDA "
        "graph: capture a stream that was made with non_blocking=True, or make the call on one"
    )


_IMPLICIT_CAPTURE = 906
"""cudaErrorStreamCaptureImplicit."""


class StreamOrder:
    """Order of the work that one thread enqueues on shared memory, on one stream after another.

    Work captured in a CUDA graph is ordered inside its capture. It cannot wait for work outside, since it does
    not run yet. When a graph is launched, the program must order its stream after earlier work on the memory,
    and later work after the graph.
    """

    def __init__(self) -> None:
        self.settled: Stream | None = None
        """The stream that needs no call of `follow`."""
        self._last: Stream | None = None
        """The stream of the latest work; kept alive, so that no other stream gets its address."""
        self._captured: Stream | None = None
        """The stream of the latest captured work since then."""

    def follow(self) -> None:
        """Order later work on the current stream after all work so far.

        Raises:
            UnsupportedError: The stream of the work so far is being captured, and the current one is not.
        """
        current = _cuda().get_current_stream()
        if current is self.settled:
            return
        capturing, before = is_capturing(current), self._last
        if capturing and self._captured is not None and is_capturing(self._captured):
            before = self._captured
        if before is not None and before.ptr != current.ptr:
            if is_capturing(before) == capturing:
                current.wait_event(record_event(before))
            elif not capturing:
                raise UnsupportedError(
                    "the stream of the call before this one is being captured in a CUDA graph, and the current "
                    "one is not; end the capture first, or use a communicator of its own here, made by dup() on "
                    "all ranks"
                )
        if capturing:
            self.settled, self._captured = None, current
        else:
            self.settled, self._last, self._captured = current, current, None

    def join(self, streams: Iterable[Stream]) -> None:
        """Make `streams` wait for all work so far, except captured work."""
        last = self._last
        if last is None or is_capturing(last):
            return
        for stream in streams:
            if stream.ptr != last.ptr and not is_capturing(stream):
                stream.wait_event(record_event(last))


class SharedScratch(Scratch):
    """A `Scratch` for calls on several streams: `take` orders the current stream after earlier calls."""

    def __init__(self) -> None:
        super().__init__()
        self._order: StreamOrder = StreamOrder()
        self._device: int | None = None
        """The device of the memory."""
        self._homes: dict[int, Stream] = {}
        """The streams on which memory was allocated, by address: freed memory is reused in their order."""

    @staticmethod
    def of(x: Array) -> SharedScratch | None:
        """The scratch in whose memory a device array lies; None if it lies in no scratch."""
        return _scratches.get(id(x if x.base is None else x.base))

    def _allocated(self, nbytes: int, like: Array) -> Array:
        if isinstance(like, np.ndarray):
            return super()._allocated(nbytes, like)
        cuda = _cuda()
        self._device, current = cuda.runtime.getDevice(), cuda.get_current_stream()
        self._homes[current.ptr] = current
        buffer = super()._allocated(nbytes, like)
        _scratches[id(buffer)] = self
        return buffer

    def clear(self) -> None:
        """See `Scratch.clear`."""
        if self._device is not None:
            cuda = _cuda()
            # After an error of the device, or on an unusable stream, there is nothing to wait for.
            with suppress(cuda.runtime.CUDARuntimeError, UnsupportedError), cuda.Device(self._device):
                self._order.join(self._homes.values())
        self._homes.clear()
        for buffer in (*self._buffers.values(), *self._outgrown):
            _scratches.pop(id(buffer), None)
        super().clear()


_scratches: WeakValueDictionary[int, SharedScratch] = WeakValueDictionary()
"""The scratch of each device buffer, by the buffer's id. A scratch holds its buffers, so ids are not reused."""


class SideStream:
    """A CUDA stream beside the caller's, ordered by events. Only `finish` makes the host wait.

    Args:
        device: The index of the device; it becomes the current one of the calling thread.
    """

    def __init__(self, device: int) -> None:
        use_device(device)
        self.device, self.clock, self._cuda = device, DeviceClock(device), _cuda()
        # At normal priority, its small kernels would queue behind the large ones of the backward pass.
        self._stream = self._cuda.Stream(non_blocking=True, priority=-1)
        self._callers: dict[int, Stream] = {}
        """Streams on which tasks were submitted since the last join, by address."""
        self.end: Any = None
        """An event after the latest task."""

    def future(self, name: str = "", group: str = "") -> SideFuture:
        """The future of a task that runs after all work on the current stream; see `TaskFuture`."""
        caller = self._cuda.get_current_stream()
        self._callers[caller.ptr] = caller
        return SideFuture(record_event(), name, group)

    def run_after(self, event: Any, task: Callable[[], None]) -> None:
        """Run a task with this stream as the current one, ordered after `event`."""
        self._stream.wait_event(event)
        before = self._cuda.get_current_stream()
        try:
            self._stream.use()
            task()
        finally:
            before.use()  # C code: a signal handler cannot raise in between

    def join(self) -> None:
        """Make the current stream wait for all tasks that were run, and the streams on which they were submitted.

        An array may then be freed: its memory is reused in the order of the stream on which it was made.
        """
        current = self._cuda.get_current_stream()
        if self.end is not None:
            for stream in ({current.ptr: current} | self._callers).values():
                stream.wait_event(self.end)
        self._callers.clear()

    def finish(self, limit_s: float) -> None:
        """Wait for the device.

        Raises:
            CommTimeout: The device takes longer than `limit_s`, as if a peer is missing.
            CUDARuntimeError: The device has met an error.
        """
        give_up = time.monotonic() + limit_s
        while self.end is not None and not passed(self.end):
            if time.monotonic() > give_up:
                raise CommTimeout(f"the device has worked on a lane's last task for more than {limit_s:g} s")
            time.sleep(1e-4)

    def free(self) -> None:
        """Return memory freed on this stream to the device, since no other stream would reuse it."""
        importlib.import_module("cupy").get_default_memory_pool().free_all_blocks(self._stream)


class SideFuture(TaskFuture):
    """The future of a task on a side stream."""

    def __init__(self, submitted: Any, name: str, group: str) -> None:
        super().__init__(name, group)
        self.submitted = submitted
        """The event for which the task waits."""
        self.end: Any = None
        """The event after the task."""

    def done(self) -> bool:
        """Whether the task has run, and the device has finished it."""
        return super().done() and (self.end is None or passed(self.end))

    def result(self, timeout: float | None = None) -> Any:
        """Wait until the task has run, and return its result; the current stream waits for its work."""
        result = super().result(timeout)
        _cuda().get_current_stream().wait_event(self.end)
        return result


class OrderedFuture(TaskFuture):
    """The future of a task that has run on whatever stream was current.

    Args:
        follow: Orders the current stream after the task.
        name, group: See `TaskFuture`.
    """

    def __init__(self, follow: Callable[[], None], name: str, group: str) -> None:
        super().__init__(name, group)
        self._follow = follow

    def result(self, timeout: float | None = None) -> object:
        """Return the result; the current stream waits for its work."""
        result = super().result(timeout)
        self._follow()
        return result


class DeviceClock:
    """The times of a device's events, on the host's clock; see `trace.Clock`.

    Each call reads both clocks: they drift apart by milliseconds in hours, and CUDA's times are 32-bit floats.
    """

    def __init__(self, device: int) -> None:
        use_device(device)
        self._device, self._cuda = device, _cuda()
        self._stream = self._cuda.Stream(non_blocking=True)

    def mark(self) -> Event:
        """Record an event with a time on the current stream."""
        event: Event = self._cuda.Event()
        event.record()
        return event

    def times(self, events: Sequence[Event]) -> list[int | None]:
        """See `trace.Clock`. The host waits for the device, but not for other streams."""
        happened = [passed(event) for event in events]
        use_device(self._device)
        now, before_ns = self._cuda.Event(), time.perf_counter_ns()
        now.record(self._stream)
        now.synchronize()
        now_ns = (before_ns + time.perf_counter_ns()) // 2
        return [
            now_ns - round(1e6 * self._cuda.get_elapsed_time(event, now)) if known else None
            for event, known in zip(events, happened, strict=True)
        ]


class NvtxRanges:
    """A listener (see `trace.listen`) that shows spans as NVTX ranges, which Nsight Systems draws above kernels.

    A range covers the host's call, which enqueues the work. With BAGUA_NVTX=1, `connect` adds this listener.
    """

    def active(self) -> bool:
        """Whether CuPy, which has the bindings to NVTX, is imported."""
        return "cupy" in sys.modules

    def range(self, name: str, args: Mapping[str, object]) -> AbstractContextManager[None]:
        """An NVTX range of the calling thread."""
        return _nvtx_range(label(name, args))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NvtxRanges)

    def __hash__(self) -> int:
        return hash(NvtxRanges)


@contextmanager
def _nvtx_range(text: str) -> Iterator[None]:
    nvtx = sys.modules["cupy"].cuda.nvtx
    nvtx.RangePush(text)
    try:
        yield
    finally:
        nvtx.RangePop()


class UseStream:
    """Make `stream` CuPy's current stream in the body of `with`.

    CuPy's own `with stream:` does not suffice: it restores the stream of the enclosing `with`, rather than one
    that `Stream.use` has made current.

    If a signal handler raises just before the end, the stream stays current until that exception is discarded.
    """

    _before: Any = None
    """The stream to restore, in the body of `with`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._thread = get_ident()
        self._before = _cuda().get_current_stream()
        self._stream.use()

    def __exit__(self, *error: object) -> None:
        self._before.use()
        self._before = None

    def __del__(self) -> None:
        if self._before is None or self._thread != get_ident():
            return
        if _cuda().get_current_stream().ptr == self._stream.ptr:
            self._before.use()


def use_address(address: int) -> AbstractContextManager[None]:
    """Make another library's stream, by its address, CuPy's current stream in the body of `with`."""
    if address == current_address():
        return nullcontext()
    return UseStream(_stream_at(address, _cuda().runtime.getDevice()))


@functools.lru_cache(maxsize=64)
def _stream_at(address: int, device: int) -> Stream:
    """CuPy's handle for a stream of another library on `device`, the current device.

    It does not own the stream. To make one takes microseconds, so the latest are cached, by device as well: the
    default streams of all devices have the same address.
    """
    stream: Stream = _cuda().Stream.from_external(_Address(address))
    return stream


STREAMS_PER_THREAD = (
    "CuPy has a default stream for each thread (CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1), which PyTorch's tensors "
    "do not work with: unset that variable"
)


def has_streams_per_thread() -> bool:
    """Whether the current stream is CuPy's default stream of this thread, which CuPy has only on request."""
    return int(_cuda().get_current_stream().ptr) == _PER_THREAD


def current_address() -> int:
    """The address of CuPy's current stream, for another library.

    Raises:
        UnsupportedError: The current stream is CuPy's default stream of each thread, which has no address.
    """
    address = int(_cuda().get_current_stream().ptr)
    if address == _PER_THREAD:
        raise UnsupportedError(STREAMS_PER_THREAD)
    return address


DEFAULT_STREAMS = (0, 1)
"""The addresses of a device's default stream: CuPy's, and cudaStreamLegacy."""

_PER_THREAD = 2
"""cudaStreamPerThread."""


@dataclass(frozen=True)
class _Address:
    """A stream as CuPy accepts it from another library."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def _cuda() -> Any:
    return importlib.import_module("cupy").cuda


# Devices ------------------------------------------------------------------------------------------------


def use_device(index: int) -> None:
    """Make a CUDA device the current one of this thread."""
    importlib.import_module("cupy").cuda.Device(index).use()


def enter(call: str, name: str, x: Array) -> None:
    """Let this thread launch kernels on `x` by the driver, which needs a context; CuPy's own launches bind one.

    Raises:
        ArrayError: `x`, argument `name` of `call`, is on another device than the current one.
    """
    check_device(call, name, x)
    _cuda().runtime.setDevice(x.data.device_id)


def device_count() -> int:
    """The number of CUDA devices that CuPy sees; 0 without CuPy or a driver."""
    try:
        cupy = importlib.import_module("cupy")
    except (ImportError, OSError):  # OSError: CuPy has no writable folder
        return 0
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


def bus_id(index: int) -> str:
    """The PCI bus id of a CUDA device: equal in all processes, which may number the devices differently."""
    return str(importlib.import_module("cupy").cuda.Device(index).pci_bus_id)


def uuid(index: int) -> str:
    """NVIDIA's UUID of a CUDA device, in hexadecimal; empty if CuPy does not report it.

    Slices of one GPU (MIG) share a `bus_id`, but not the UUID. CuPy cuts it off at its first zero byte, so
    compare it together with the `bus_id`.
    """
    found = importlib.import_module("cupy").cuda.runtime.getDeviceProperties(index)
    return bytes(found.get("uuid", b"")).hex()


def device_facts() -> dict[str, str]:
    """Versions and devices of CUDA, or why there are none. Never raises."""
    try:
        cupy = importlib.import_module("cupy")
    except ModuleNotFoundError:
        return {"CUDA": "CuPy is not installed; pip install 'bagua-comm[cuda13]' or 'bagua-comm[cuda12]'"}
    except (ImportError, OSError) as exc:
        return {"CUDA": f"CuPy cannot be imported: {exc}"}
    runtime = cupy.cuda.runtime
    facts = {
        "CUDA driver": _known(lambda: _version(runtime.driverGetVersion(), 1000, 10)),
        "CUDA runtime": _known(lambda: _version(runtime.runtimeGetVersion(), 1000, 10)),
        "NVRTC": _known(lambda: "{}.{}".format(*cupy.cuda.nvrtc.getVersion())),
        "NCCL": _known(lambda: _version(importlib.import_module("cupy.cuda.nccl").get_version(), 10000, 100, 1)),
    }
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as exc:
        reason = "there is no NVIDIA driver" if facts["CUDA driver"] == "none" else str(exc)
        return {**facts, "CUDA": f"no device can be used: {reason}"}
    for index in range(count):
        facts[f"GPU {index}"] = _known(functools.partial(_describe, cupy, index))
    return facts


def _describe(cupy: ModuleType, index: int) -> str:
    found = cupy.cuda.runtime.getDeviceProperties(index)
    name, memory = found["name"].decode(), found["totalGlobalMem"] / 2**30
    return f"{name}, {memory:.0f} GiB, compute capability {found['major']}.{found['minor']}, at {bus_id(index)}"


def _version(number: int, *places: int) -> str:
    """A version that is written as one number, such as 13020 for 13.2.

    >>> _version(13020, 1000, 10), _version(23203, 10000, 100, 1)
    ('13.2', '2.32.3')
    """
    parts = []
    for place in places:
        part, number = divmod(number, place)
        parts.append(str(part))
    return ".".join(parts) if parts != ["0"] * len(parts) else "none"


def _known(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except Exception as exc:
        return f"not available: {exc}"
