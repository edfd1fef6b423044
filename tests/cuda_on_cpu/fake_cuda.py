"""Stands in for `cupy.cuda`: handles of the devices, streams, events and graphs that a `Machine` holds."""

from __future__ import annotations

import itertools
import json
import types
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from . import fake_nccl as nccl  # noqa: F401 - a part of cupy.cuda
from . import machine
from .machine import CUDADriverError, CUDARuntimeError, Memory, Operation, Queue, running


class MemoryPointer:
    def __init__(self, mem: Memory, offset: int) -> None:
        self.mem, self.device_id = mem, mem.block.device
        self.ptr = mem.block.start + offset


class Device:
    def __init__(self, device: int | Device | None = None) -> None:
        self.id = running().device if device is None else getattr(device, "id", device)

    def use(self) -> None:
        running().device = self.id
        running().local["context"] = self.id

    def __enter__(self) -> Device:
        running().local.setdefault("devices", []).append(running().device)
        self.use()
        return self

    def __exit__(self, *exception: object) -> None:
        running().device = running().local["devices"].pop()

    def synchronize(self) -> None:
        queues = [queue for queue in running().queues() if queue.device == self.id]
        running().wait([queue.tail for queue in queues], "Device.synchronize")

    @property
    def attributes(self) -> dict[str, int]:
        return {"MultiProcessorCount": 2, "MaxThreadsPerMultiProcessor": 2048, "WarpSize": 32}

    @property
    def compute_capability(self) -> str:
        return running().architectures.get(self.id, "90")

    @property
    def pci_bus_id(self) -> str:
        return f"0000:{self.id:02X}:00.0"

    def __int__(self) -> int:
        return self.id

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Device) and self.id == value.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"


_ptrs = itertools.count(0x100000, 0x10)
_events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self._machine, self._timed, self._device = running(), not disable_timing, running().device
        self._operation: Operation | None = None
        self.ptr = next(_ptrs)
        _events[self.ptr] = self

    @property
    def done(self) -> bool:
        return self._status() == 0

    def _status(self) -> int:
        return self._machine.query(self._operation, self._device)

    def record(self, stream: Stream | None = None) -> None:
        queue = (stream or get_current_stream())._queue
        if queue.device != self._device:
            raise CUDARuntimeError(400)
        self._operation = running().enqueue(queue, "event", lambda: None, log=False)

    def synchronize(self) -> None:
        self._machine.wait([self._operation], "Event.synchronize")


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    operations = start_event._operation, end_event._operation
    if None in operations or not (start_event._timed and end_event._timed):
        raise CUDARuntimeError(400)
    if not all(operation.done for operation in operations):
        raise CUDARuntimeError(600)
    return (operations[1].finished_at - operations[0].finished_at) * 1000


class Stream:
    """A handle of a `Queue`."""

    null: Stream

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        assert not ptds, "this CuPy has no per-thread default stream"
        self.ptr, self.device_id, self.priority = 0, -1, priority or 0
        if not null:
            self.ptr, self.device_id = running().new_stream(blocking=not non_blocking).ptr, running().device

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        version, ptr = obj.__cuda_stream__()
        assert version == 0
        return cls._at(ptr, obj)

    @classmethod
    def _at(cls, ptr: int, owner: Any, device_id: int = -1) -> Stream:
        stream = cls.__new__(cls)
        stream.ptr, stream.device_id, stream._owner = ptr, device_id, owner
        return stream

    @property
    def _queue(self) -> Queue:
        return running().queue(self.ptr)

    def __enter__(self) -> Stream:
        _entered().append(self._check_device())
        _stack(_entered()[-1]).append(self)
        return self.use()

    def __exit__(self, *exception: object) -> None:
        device = _entered().pop()
        _stack(device).pop()
        running().local["stream", device] = _stack(device)[-1]  # whatever `use` has made current

    def use(self) -> Stream:
        running().local["stream", self._check_device()] = self
        return self

    def _check_device(self) -> int:
        if self.device_id not in (-1, running().device):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with the current"
                f" device ({running().device})"
            )
        return running().device

    @property
    def done(self) -> bool:
        return running().query(self._queue.tail, self._queue.device) == 0

    def synchronize(self) -> None:
        running().wait([self._queue.tail], "Stream.synchronize")

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        running().wait_event(self._queue, event._operation)

    def begin_capture(self, mode: int | None = None) -> None:
        if self.ptr == 0:
            raise RuntimeError("cannot capture on the default (legacy) stream")
        running().begin_capture(self._queue, machine.RELAXED if mode is None else mode)

    def end_capture(self) -> Graph:
        return Graph._of(running().end_capture(self._queue))

    def is_capturing(self) -> bool:
        running().check(self._queue.device)
        running().check_turns(self._queue)
        return self._queue.capture is not None

    @property
    def is_non_blocking(self) -> bool:
        return not self._queue.blocking

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.ptr} (device {self.device_id})>"


Stream.null = Stream(null=True)


class ExternalStream(Stream):
    def __init__(self, ptr: int, device_id: int = -1) -> None:
        warnings.warn(
            "ExternalStream is deprecated. Use Stream.from_external() instead to interoperate with external "
            "streams that implement the CUDA stream protocol.",
            DeprecationWarning,
            stacklevel=2,
        )
        self.__dict__.update(vars(Stream._at(ptr, None, device_id)))


def get_current_stream(device_id: int = -1) -> Stream:
    return running().local.get(("stream", running().device if device_id == -1 else device_id), Stream.null)


def _entered() -> list[int]:
    """The devices of the `with` blocks of streams that this thread is in."""
    return running().local.setdefault("entered", [])


def _stack(device: int) -> list[Stream]:
    """The streams of those `with` blocks on one device, above its default stream."""
    return running().local.setdefault(("stack", device), [Stream.null])


class MemoryPool:
    def total_bytes(self) -> int:
        return running().pool_bytes()

    def free_all_blocks(self, stream: Stream | None = None) -> None:
        running().trim_pool(None if stream is None else stream._queue)


class Graph:
    @classmethod
    def _of(cls, operations: list[Operation]) -> Graph:
        graph = cls.__new__(cls)
        graph._operations = operations
        return graph

    def launch(self, stream: Stream | None = None) -> None:
        running().replay(self._operations, (stream or get_current_stream())._queue)

    def upload(self, stream: Stream | None = None) -> None:
        pass


def _memcpy_async(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    (target_block, target), (source_block, source) = running().find(dst, size), running().find(src, size)
    if size:
        blocks = [target_block, source_block]
        running().enqueue(running().queue(stream), "copy", lambda: np.copyto(target, source), blocks=blocks)


class _Driver:
    """libcuda.so.1."""

    @staticmethod
    def cuThreadExchangeStreamCaptureMode(mode: Any) -> int:
        """Set what captures of other threads forbid this thread, and write the setting before that to `mode`."""
        before, running().local["capture mode"] = (
            running().local.get("capture mode", machine.GLOBAL),
            mode._obj.value,
        )
        mode._obj.value = before
        return 0


def _get_device_count() -> int:
    if not running().count:
        raise CUDARuntimeError(100)
    return running().count


def _compile_using_nvrtc(source: str, options: tuple[str, ...] = (), filename: str = "kern.cu") -> Any:
    """Keep the source for the current device's architecture; the C++ compiler gets it when it is loaded."""
    return json.dumps([source, options, Device().compute_capability]).encode(), None


def _loaded(path: str) -> tuple[str, tuple[str, ...], str]:
    """Source, options and architecture."""
    source, options, architecture = json.loads(Path(path).read_bytes().rstrip(b"\0"))
    return source, tuple(options), architecture


def _check_architecture(architecture: str) -> None:
    """Raise unless the current device can run code for `architecture`: has the same, or a later minor one."""
    mine, compiled = divmod(int(Device().compute_capability), 10), divmod(int(architecture), 10)
    if mine[0] != compiled[0] or mine[1] < compiled[1]:
        raise CUDADriverError(
            "CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available for execution on the device"
        )


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(f"cupy.cuda.{name}")
    vars(module).update(members)
    return module


compiler = _module("compiler", compile_using_nvrtc=_compile_using_nvrtc)
_functions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Kernels, by their addresses."""


def _launch_kernel(function: int, *extents_shared_stream_args_extra: int) -> None:
    """Launch a kernel with the arguments to which a table of pointers points."""
    *extents, shared, stream, args, extra = extents_shared_stream_args_extra
    assert (len(extents), extra) == (6, 0)
    if running().local.get("context") != running().device:
        raise CUDADriverError("CUDA_ERROR_INVALID_CONTEXT: invalid device context")
    kernel = _functions[function]
    kernel(
        tuple(extents[:3]), tuple(extents[3:]), kernel._arguments_at(args), shared_mem=shared,
        stream=Stream._at(stream, None),
    )  # fmt: skip


driver = _module("driver", CUDADriverError=CUDADriverError, launchKernel=_launch_kernel)
nvrtc = _module("nvrtc", getVersion=lambda: (0, 0))
runtime = _module(
    "runtime",
    CUDARuntimeError=CUDARuntimeError,
    deviceSynchronize=lambda: Device().synchronize(),
    driverGetVersion=lambda: 13000,
    eventQuery=lambda event: _events[event]._status(),
    getDevice=lambda: running().device,
    getDeviceCount=_get_device_count,
    getDeviceProperties=lambda device: {
        "name": b"a CPU",
        "multiProcessorCount": 2,
        "uuid": b"\xff" * 15 + bytes([device]),
    },
    memcpyAsync=_memcpy_async,
    memcpyDefault=4,
    memcpyDeviceToDevice=3,
    memcpyDeviceToHost=2,
    memcpyHostToDevice=1,
    runtimeGetVersion=lambda: 13000,
    setDevice=lambda device: Device(device).use(),
    streamCaptureModeGlobal=machine.GLOBAL,
    streamCaptureModeRelaxed=machine.RELAXED,
    streamCaptureModeThreadLocal=machine.THREAD_LOCAL,
)
