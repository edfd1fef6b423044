"""CUDA's promises about the order of work, in plain Python: streams, events, graphs, memory and its reuse.

Every operation on device memory is enqueued on a stream. It runs when the stream's policy, or a host that waits,
demands it: "eager" streams run everything at once, "lazy" ones nothing until they must. A device may choose any
such order, so code that is right under every policy does not depend on luck. Code that forgot to wait works on
the wrong bytes: memory is poisoned when it is allocated, and again, in the order of its stream, when it is freed.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

POLICIES = {"lazy": ("lazy", "lazy"), "main-first": ("eager", "lazy"), "side-first": ("lazy", "eager")}
"""How the default stream runs, and how all other streams run."""

POISON = 0xFF
"""Every byte of unwritten memory: NaN in all float dtypes."""

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
"""The modes of a capture, and of a thread. They say what is forbidden while a stream is captured."""

ALIGNMENT = GUARD = 512
GUARD_BYTE = 0x5A
"""The bytes before and after each array, which must not be written."""

ERRORS = {
    46: "cudaErrorDevicesUnavailable: all CUDA-capable devices are busy or unavailable",
    100: "cudaErrorNoDevice: no CUDA-capable device is detected",
    101: "cudaErrorInvalidDevice: invalid device ordinal",
    400: "cudaErrorInvalidResourceHandle: invalid resource handle",
    600: "cudaErrorNotReady: device not ready",
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
    900: "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing",
    901: "cudaErrorStreamCaptureInvalidated: operation failed due to a previous error during capture",
    902: "cudaErrorStreamCaptureMerge: attempt to merge two distinct capture sequences",
    903: "cudaErrorStreamCaptureUnmatched: the capture was not initiated in this stream",
    904: "cudaErrorStreamCaptureUnjoined: capturing stream has unjoined work",
    905: "cudaErrorStreamCaptureIsolation: dependency created on uncaptured work in another stream",
    906: "cudaErrorStreamCaptureImplicit: the legacy stream would depend on a capturing blocking stream",
    907: "cudaErrorCapturedEvent: operation not permitted on an event last recorded in a capturing stream",
}


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(ERRORS[status])


class CUDADriverError(RuntimeError):
    """The error that modules and launches raise."""


class Hang(AssertionError):
    """A wait that would never end on a real device."""


@dataclass(eq=False)
class Block:
    """A piece of memory that a device can reach. Operations hold blocks: they know addresses, not owners."""

    start: int
    bytes: np.ndarray
    device: int | None  # None for pinned host memory
    pool: Queue | None  # freed device memory is reused in the order of this stream
    guarded: np.ndarray | None = None  # with the bytes before and after; None for foreign memory
    freed: bool = False

    def check_guard(self, what: str) -> None:
        if self.guarded is not None:
            before, after = self.guarded[: -len(self.bytes) - GUARD], self.guarded[-GUARD:]
            assert (before == GUARD_BYTE).all(), f"{what}: written before the start of an array"
            assert (after == GUARD_BYTE).all(), f"{what}: written past the end of an array"

    def poison(self) -> None:
        poison(self.bytes)


class Memory:
    """Owns a `Block`, which goes to `freed` when the last array over it is gone."""

    def __init__(self, block: Block, freed: deque[Block]) -> None:
        self.block = block
        weakref.finalize(self, freed.append, block).atexit = False


class Operation:
    """One operation of a stream. It runs once all of `waits` are done and, for NCCL, all ranks have called."""

    def __init__(self, queue: Queue, name: str, run: Callable[[], None], waits: Iterable[Operation]) -> None:
        self.queue, self.name, self.run = queue, name, run
        self.waits = tuple(wait for wait in waits if not wait.done)
        self.thread = threading.current_thread().name
        self.capture: Capture | None = None
        self.calls: Sequence[Any] = ()  # of NCCL, and the match of each with those of the other ranks
        self.matches: list[Any] = []
        self.blocks: tuple[Block, ...] = ()
        self.done = False
        self.finished_at = 0.0

    def blocker(self) -> Operation | str | None:
        """The operation that must run before this one, or its description if it is not enqueued, or None."""
        for wait in self.waits:
            if not wait.done:
                return wait
        blockers = (match.blocker() for match in self.matches)
        return next((blocker for blocker in blockers if blocker is not None), None)

    def execute(self) -> None:
        with np.errstate(all="ignore"):
            self.run()
            for match in self.matches:
                match.execute()
        self.done, self.finished_at = True, time.perf_counter()
        self.waits, self.blocks, self.calls, self.matches, self.run = (), (), (), [], _nothing

    def __repr__(self) -> str:
        return f"{self.name} on {self.queue} (enqueued by {self.thread})"


@dataclass(eq=False)
class Queue:
    """A stream as the device sees it."""

    ptr: int
    device: int
    eager: bool
    blocking: bool = False  # whether it takes turns with the default stream
    tail: Operation | None = None
    capture: Capture | None = None
    before_capture: Operation | None = None

    def __repr__(self) -> str:
        return f"stream {self.ptr} of device {self.device}"


@dataclass(eq=False)
class Capture:
    """The operations enqueued on `origin`, and on streams that joined it, since begin_capture."""

    origin: Queue
    mode: int = RELAXED
    is_valid: bool = True
    thread: int = field(default_factory=threading.get_ident)
    operations: list[Operation] = field(default_factory=list)
    queues: list[Queue] = field(default_factory=list)

    def add(self, queue: Queue) -> None:
        self.queues.append(queue)
        queue.capture, queue.before_capture, queue.tail = self, queue.tail, None

    def end(self) -> None:
        joined, rest = set(), [self.origin.tail]
        while rest:
            if (operation := rest.pop()) is not None and operation not in joined:
                joined.add(operation)
                rest.extend(operation.waits)
        for queue in self.queues:
            queue.capture, queue.tail, queue.before_capture = None, queue.before_capture, None
        if not self.is_valid:
            raise CUDARuntimeError(901)
        if len(joined) < len(self.operations):
            raise CUDARuntimeError(904)


@dataclass(frozen=True)
class Enqueued:
    """An entry of the log."""

    thread: str
    device: int
    stream: int
    name: str


class Machine:
    """Devices, their streams and their memory. Under one lock, a thread that waits runs what must run.

    Attributes:
        count: How many devices there are.
        architectures: The architectures of devices, by index; that of all others is "90".
        broken: The errors that devices have met, by index; see `break_device`.
        log: All operations enqueued, in order; `names` picks from it.
        host_syncs: The calls that made the host wait for a device.
        timeout_s: How long anything may wait while nothing happens at all.
        order: The order in which a kernel's threads run: "forward" or "backward".
    """

    def __init__(self, policy: str = "lazy", *, count: int = 1, timeout_s: float = 20.0) -> None:
        self.main, self.side = POLICIES[policy]
        self.count, self.timeout_s, self.order = count, timeout_s, "forward"
        self.architectures: dict[int, str] = {}
        self.broken: dict[int, int] = {}
        self.changed = threading.Condition(threading.RLock())
        self.log: list[Enqueued] = []
        self.host_syncs: list[str] = []
        self.nccl_worlds: dict[bytes, Any] = {}
        self.nccl_allows_sharing = False  # two ranks on one device
        self.nccl_connects = True  # first calls make the host wait for the other ranks' first calls
        self.nccl_async_error: int | None = None  # what check_async_error reports
        self._executed = 0
        self._queues: dict[tuple[int, int], Queue] = {}  # (device if the default stream, ptr)
        self._ptrs = itertools.count(0x1000, 0x10)
        self._captures: list[Capture] = []
        self._blocks: dict[int, Block] = {}
        self._kept: dict[Queue, int] = {}
        """How many bytes freed on a stream the pool keeps for it."""
        self._freed: deque[Block] = deque()
        self._forbidden: list[int | None] = []
        self._local = threading.local()

    # Devices and streams ----------------------------------------------------------------------------

    @property
    def device(self) -> int:
        """The current device of this thread."""
        return getattr(self._local, "device", 0)

    @device.setter
    def device(self, index: int) -> None:
        if not 0 <= index < self.count:
            raise CUDARuntimeError(101)
        self._local.device = index

    @property
    def local(self) -> dict[Any, Any]:
        """CuPy's state of each thread: the current streams, and the streams that `with` blocks restore."""
        return self._local.__dict__

    def new_stream(self, *, blocking: bool = False, eager: bool | None = None) -> Queue:
        """A stream on the current device."""
        with self.changed:
            ptr, eager = next(self._ptrs), self.side == "eager" if eager is None else eager
            return self._queues.setdefault((-1, ptr), Queue(ptr, self.device, eager, blocking))

    def queues(self) -> list[Queue]:
        with self.changed:
            return list(self._queues.values())

    def queue(self, ptr: int) -> Queue:
        """The stream at `ptr`; 0 is the default stream of the current device."""
        with self.changed:
            if ptr == 0:
                return self._queues.setdefault((self.device, 0), Queue(0, self.device, self.main == "eager"))
            assert (-1, ptr) in self._queues, f"there is no stream at {ptr:#x}"
            return self._queues[-1, ptr]

    def break_device(self, device: int, status: int = 700) -> None:
        """Stop a device: from now on nothing on it runs, and every call on it gives this error."""
        with self.changed:
            self.broken[device] = status
            self.progress()

    def check(self, device: int) -> None:
        """Raise the error that a device has met, if it has met one."""
        if device in self.broken:
            raise CUDARuntimeError(self.broken[device])

    # Work -------------------------------------------------------------------------------------------

    def enqueue(
        self,
        queue: Queue,
        name: str,
        run: Callable[[], None],
        *,
        blocks: Iterable[Block] = (),
        waits: Iterable[Operation] = (),
        calls: Sequence[Any] = (),
        log: bool = True,
    ) -> Operation:
        """Put an operation at the end of a stream. Returns at once; nothing here waits for another rank."""
        with self.changed:
            self.check(queue.device)
            self._reuse_freed()
            blocks = tuple(blocks)
            for block in blocks:
                assert not block.freed, f"{name}: uses memory that is freed"
                on_device = block.device in (None, queue.device)
                assert on_device, f"{name}: an array of device {block.device} is used on {queue}"
            operation = Operation(queue, name, run, [*self._before(queue), *waits])
            operation.calls, operation.blocks, operation.capture = calls, blocks, queue.capture
            if log:
                self.log.append(Enqueued(operation.thread, queue.device, queue.ptr, name))
            if queue.capture is not None:
                queue.capture.operations.append(operation)
            else:
                self._match(operation)
            queue.tail = operation
            self.progress()
            return operation

    def _before(self, queue: Queue) -> list[Operation]:
        """The operations before a new one on `queue`: its tail, and those that the default stream orders."""
        self.check_turns(queue)
        queues = [queue]
        if queue.ptr == 0:
            queues += self._taking_turns(queue)
        elif queue.blocking and queue.capture is None and (queue.device, 0) in self._queues:
            queues.append(self._queues[queue.device, 0])
        return [each.tail for each in queues if each.tail is not None]

    def _taking_turns(self, queue: Queue) -> list[Queue]:
        """The streams that take turns with `queue`, a default stream."""
        return [each for each in self._queues.values() if each.blocking and each.device == queue.device]

    def check_turns(self, queue: Queue) -> None:
        """Raise if this is a default stream, and a stream that takes turns with it is captured."""
        with self.changed:
            if queue.ptr == 0 and any(each.capture for each in self._taking_turns(queue)):
                raise CUDARuntimeError(906)

    def _match(self, operation: Operation) -> None:
        operation.matches = [call.match(operation) for call in operation.calls]

    def wait_event(self, queue: Queue, recorded: Operation | None) -> None:
        """Order all later operations of `queue` after `recorded`."""
        with self.changed:
            if recorded is None:
                return
            if recorded.capture is not queue.capture:
                if recorded.capture is None:
                    raise CUDARuntimeError(905)
                if queue.capture is not None:
                    raise CUDARuntimeError(902)
                if recorded.capture.origin.capture is not recorded.capture:
                    raise CUDARuntimeError(907)
                self._reuse_freed()
                recorded.capture.add(queue)
            self.enqueue(queue, "wait", _nothing, waits=[recorded], log=False)

    def progress(self) -> None:
        """After a change, let eager streams go on, and let threads that wait look again."""
        with self.changed:
            self.changed.notify_all()
            for queue in self.queues():
                if queue.eager and queue.capture is None and queue.tail is not None:
                    self._advance(queue.tail)

    def _advance(self, target: Operation, steps: int = sys.maxsize) -> str | None:
        """Run `target` and all that it needs, as far as possible; returns where it is stuck, or None."""
        path, on_path = [target], {target}
        while path:
            operation = path[-1]
            blocker = None if operation.done else operation.blocker()
            if isinstance(blocker, str):
                return f"{operation}, {blocker}"
            if isinstance(blocker, Operation):
                if blocker in on_path:
                    return f"{operation}, which waits for itself"
                path.append(blocker)
                on_path.add(blocker)
                continue
            if not operation.done:
                if operation.queue.device in self.broken:
                    return f"{operation}, on a device that is broken"
                if steps == 0:
                    return f"{operation}, which is not done yet"
                steps -= 1
                operation.execute()
                self._executed += 1
            on_path.remove(path.pop())
        return None

    # The host ---------------------------------------------------------------------------------------

    def query(self, operation: Operation | None, device: int) -> int:
        """The status of `operation`, on `device`. Time passes meanwhile: each query makes one operation run."""
        with self.changed:
            if device in self.broken:
                return self.broken[device]
            if self._breaks_a_capture():
                return 900
            if operation is None:
                return 0
            if operation.capture is not None:
                return 907
            if not operation.done:
                self.settle(operation, steps=1)
            return 0 if operation.done else 600

    def _breaks_a_capture(self) -> bool:
        """Whether a capture forbids this thread a call that may wait or allocates; such captures end."""
        thread = threading.get_ident()
        forbidding = [
            capture
            for capture in self._captures
            if self.local.get("capture mode", GLOBAL) != RELAXED
            and (capture.mode == GLOBAL or (capture.mode == THREAD_LOCAL and capture.thread == thread))
        ]
        for capture in forbidding:
            capture.is_valid = False
        return bool(forbidding)

    def settle(self, operation: Operation | None, *, steps: int = sys.maxsize) -> None:
        """Run what `operation` needs, as far as the device can. The host waits for nothing."""
        with self.changed:
            self._reuse_freed()
            before = self._executed
            if operation is not None:
                self._advance(operation, steps)
            if self._executed != before:  # a query that changes nothing must not prolong the waits of others
                self.progress()

    def wait(self, operations: Iterable[Operation | None], call: str) -> None:
        """Make the host wait until all of `operations` are done."""
        with self.changed:
            self.note_host_sync(call)
            self._reuse_freed()
            for operation in operations:
                if operation is None:
                    continue
                if operation.capture is not None:
                    raise CUDARuntimeError(900)
                self.wait_until(lambda op=operation: self._stuck_at(op), f"{call} stands at")
            self.progress()

    def _stuck_at(self, operation: Operation) -> str | None:
        self.check(operation.queue.device)
        return self._advance(operation)

    def wait_until(self, stuck_at: Callable[[], str | None], what: str) -> None:
        """Block until `stuck_at` returns None, or raise `Hang`. The host waits for other threads only here."""
        with self.changed:
            while (problem := stuck_at()) is not None:
                if not self.changed.wait(self.timeout_s):
                    name = threading.current_thread().name
                    raise Hang(f"{name} waited {self.timeout_s:g} s: {what} {problem}")

    def note_host_sync(self, call: str) -> None:
        thread = threading.get_ident()
        forbidden = any(only in (None, thread) for only in self._forbidden)
        assert not forbidden, f"{threading.current_thread().name}: {call} makes the host wait for the device"
        self.host_syncs.append(call)

    @contextlib.contextmanager
    def forbid_host_sync(self, *, this_thread: bool = False) -> Iterator[None]:
        """In the body of `with`, calls that make the host wait fail: on all threads, or on this one only."""
        entry = threading.get_ident() if this_thread else None
        self._forbidden.append(entry)
        try:
            yield
        finally:
            self._forbidden.remove(entry)

    def names(self, *, device: int | None = None, thread: str | None = None) -> list[str]:
        """The operations of one thread or for one device: "kernel NAME", "nccl NAME", "copy", "graph", ..."""
        entries = [entry for entry in self.log if device in (None, entry.device)]
        return [entry.name for entry in entries if thread in (None, entry.thread)]

    @property
    def launches(self) -> list[str]:
        """The names of the kernels that were launched."""
        return [name.removeprefix("kernel ") for name in self.names() if name.startswith("kernel ")]

    # Memory -----------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, pool: Queue | None) -> Memory:
        """Memory full of poison: of the device of `pool`, or pinned host memory if `pool` is None.

        A pool may have to take memory from the device, which a capture forbids unless it is relaxed.
        """
        with self.changed:
            if pool is not None and self._breaks_a_capture():
                raise CUDARuntimeError(900)
        guarded = np.full(ALIGNMENT + GUARD + nbytes + GUARD, GUARD_BYTE, np.uint8)
        start = GUARD + -(guarded.ctypes.data + GUARD) % ALIGNMENT
        data = guarded[start : start + nbytes]
        poison(data)
        address, device = data.ctypes.data if nbytes else 0, None if pool is None else pool.device
        if pool in self._kept:
            self._kept[pool] = max(0, self._kept[pool] - nbytes)
        return self._own(Block(address, data, device, pool, guarded[: start + nbytes + GUARD]))

    def share(self, host: np.ndarray) -> Memory:
        """Foreign memory of the current device, represented by the memory of `host`."""
        low, high = np.lib.array_utils.byte_bounds(host)
        first = np.lib.stride_tricks.as_strided(host, (1,), (host.itemsize,)).view(np.uint8)
        data = np.lib.stride_tricks.as_strided(first, (high - low,), (1,))
        return self._own(Block(low, data, self.device, None))

    def _own(self, block: Block) -> Memory:
        with self.changed:
            self._reuse_freed()
            self._blocks[id(block)] = block
            return Memory(block, self._freed)

    def _reuse_freed(self) -> None:
        """Poison freed memory: CuPy's pools reuse it, pinned memory without regard to streams."""
        for _ in range(len(self._freed)):
            block = self._freed.popleft()
            if block.pool is not None and block.pool.capture is not None:
                self._freed.append(block)  # later: a graph must not contain it
                continue
            block.freed = True
            block.check_guard("before it was freed")
            del self._blocks[id(block)]
            if block.pool is not None:
                self._kept[block.pool] = self._kept.get(block.pool, 0) + len(block.bytes)
                before = [block.pool.tail] if block.pool.tail else []
                block.pool.tail = Operation(block.pool, "reuse of freed memory", block.poison, before)
                if block.pool.eager:
                    self._advance(block.pool.tail)
            elif block.guarded is not None:
                block.poison()

    def pool_bytes(self) -> int:
        """Bytes that the pool of the current device has taken from it, in use or not."""
        with self.changed:
            self._reuse_freed()
            pools = [(block.pool, len(block.bytes)) for block in self._blocks.values()] + [*self._kept.items()]
            return sum(size for pool, size in pools if pool is not None and pool.device == self.device)

    def trim_pool(self, queue: Queue | None) -> None:
        """Return what the pool keeps, for one stream or for all, to the device; wait for it, as cudaFree does."""
        with self.changed:
            self._reuse_freed()
            found = [each for each in self._kept if each.device == self.device and queue in (None, each)]
            if any(self._kept.pop(each) for each in found):
                tails = [each.tail for each in self.queues() if each.device == self.device]
                self.wait(tails, "MemoryPool.free_all_blocks")

    def find(self, address: int, nbytes: int) -> tuple[Block | None, np.ndarray]:
        """The block that has these bytes, and a view of them; no block if there are no bytes.

        Raises:
            AssertionError: No allocation has all of them.
        """
        if nbytes == 0:
            return None, np.empty(0, np.uint8)
        with self.changed:
            self._reuse_freed()
            for block in self._blocks.values():
                offset = address - block.start
                if offset >= 0 and offset + nbytes <= len(block.bytes):
                    return block, block.bytes[offset : offset + nbytes]
        raise AssertionError(f"no allocation of device or pinned memory has the {nbytes} bytes at {address:#x}")

    # Graphs -----------------------------------------------------------------------------------------

    def begin_capture(self, queue: Queue, mode: int = RELAXED) -> None:
        with self.changed:
            if queue.capture is not None:
                raise CUDARuntimeError(900)
            self._reuse_freed()
            capture = Capture(queue, mode)
            capture.add(queue)
            self._captures.append(capture)

    def end_capture(self, queue: Queue) -> list[Operation]:
        with self.changed:
            capture = queue.capture
            if capture is None or capture.origin is not queue:
                raise CUDARuntimeError(903)
            self._captures.remove(capture)
            capture.end()
            return capture.operations

    def replay(self, operations: Sequence[Operation], queue: Queue) -> None:
        """Enqueue copies of captured operations, with the same freedom of order."""
        with self.changed:
            self._reuse_freed()
            if queue.capture is not None:
                raise NotImplementedError("a graph inside a graph")
            first, copies = self._before(queue), dict[Operation, Operation]()
            for each in operations:
                for block in each.blocks:
                    assert not block.freed, f"graph: {each.name} uses memory that was freed since it was captured"
                for call in each.calls:
                    assert call.comm.comm, f"graph: {each.name} uses a communicator that was given up"
                waits = [*first, *(copies[wait] for wait in each.waits)]
                # Any branch of a graph may go first, as any stream may.
                copy = Operation(queue, each.name, each.run, waits if self.side == "lazy" else reversed(waits))
                copy.calls = each.calls
                self._match(copy)
                copies[each] = copy
            self.enqueue(queue, "graph", _nothing, waits=reversed(copies.values()))


def poison(data: np.ndarray) -> None:
    """Fill memory that was never written, or may have been reused, so that it shows in results."""
    data.view(np.uint8).fill(POISON)


def _nothing() -> None:
    pass


_running = Machine()


def use(machine: Machine) -> None:
    """Put `machine` behind the modules that stand in for CuPy's."""
    global _running
    _running = machine


def running() -> Machine:
    """The machine behind the modules that stand in for CuPy's."""
    return _running
