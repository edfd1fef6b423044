"""The result of a call of a process group: a task on the lane of the group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bagua_comm import CommTimeout
from bagua_comm.transports.labels import Receive

from ..arrays import torch_stream


class Callbacks:
    """The threads that run the callbacks of the futures of a group, in the order of their calls.

    A callback may make calls itself, and wait for their futures: the callbacks of these run on a thread of their
    own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[ThreadPoolExecutor] = []
        """The thread of callbacks, of callbacks of calls that callbacks make, and so on."""
        self._closed = False
        self._current = threading.local()

    def depth(self) -> int:
        """Return 0 outside of callbacks, 1 inside of one, 2 inside of a callback of its calls, and so on."""
        return int(getattr(self._current, "depth", 0))

    def submit(self, depth: int, callback: Callable[[], object]) -> None:
        """Run the callback of a call that was made at `depth`."""

        def run() -> None:
            self._current.depth = depth + 1
            callback()

        with self._lock:
            if not self._closed:
                while len(self._threads) <= depth:
                    self._threads.append(ThreadPoolExecutor(1, "bagua callback"))
                self._threads[depth].submit(run)
                return
        run()  # the group has ended

    def close(self) -> None:
        """End the threads, after the callbacks that were submitted."""
        with self._lock:
            self._closed = True
            for thread in self._threads:
                thread.shutdown(wait=False)


_Work: Any = dist.Work  # torch types it in part


class LaneWork(_Work):  # type: ignore[misc]
    """A call in progress on the lane of a process group.

    Args:
        call: The name of the call, for errors.
        future: The task.
        tensors: The value of `get_future`: the tensors that the call fills.
        device: The device of the tensors.
        callbacks: Runs the callbacks of futures.
        receive: What is received, which then has its source; None if this is no `recv`.
        forget: Called with the task when `wait` raises its error, which the lane then raises no more.
    """

    def __init__(
        self,
        call: str,
        future: Future[None] | Future[object],
        tensors: object,
        device: torch.device,
        callbacks: Callbacks,
        receive: Receive | None = None,
        forget: Callable[[Future[Any]], object] | None = None,
    ) -> None:
        super().__init__()
        self._call, self._task, self._tensors, self._device = call, future, tensors, device
        self._callbacks, self._receive, self._forget = callbacks, receive, forget

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the call is done, and raise its error; on a device, the current stream waits.

        Args:
            timeout: How long to wait; if it is not above 0, until the time limit of the call.

        Raises:
            CommTimeout: It takes longer. The call continues.
        """
        limit_s = timeout.total_seconds() if timeout > timedelta(0) else None
        with torch_stream(self._device):
            try:
                error = self._task.exception(limit_s)
            except FutureTimeout as exc:
                raise CommTimeout(f"{self._call} is not done after {limit_s:g} s of waiting") from exc
            if error is not None and self._forget is not None:
                self._forget(self._task)
            self._task.result()
        return True

    def synchronize(self) -> None:
        """Wait, until the time limit of the call."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call is done; on a device, whether its work is."""
        return self._task.done()

    def is_success(self) -> bool:
        """Whether the call is done, without an error."""
        return self._task.done() and self._task.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the call; None if it has none, or is not done."""
        return self._task.exception() if self._task.done() else None

    def result(self) -> object:
        """Wait for the call, and return the tensors that it has filled."""
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank in the group that a received message comes from; -1 until it has come."""
        if self._receive is None:
            raise RuntimeError(f"{self._call} receives no message of one rank")
        return self._receive.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[object]:
        """Return a future of PyTorch, whose value is the tensors that the call fills.

        A future keeps no more of an error than its text. So a backward pass that asks for one, as that of
        PyTorch's DistributedDataParallel does, waits for the call at its end, and raises the error itself.
        """
        if torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self.synchronize)
        devices: list[int | str | torch.device] | None = None if self._device.type == "cpu" else [self._device]
        done: torch.futures.Future[None] = torch.futures.Future(devices=devices)

        def value(_: object) -> object:
            with torch_stream(self._device):
                self._task.result()
                return self._tensors

        # A callback that raises gives PyTorch's future an error. `set_exception` gives it the exception as its
        # value, which DistributedDataParallel then reads as tensors.
        made: torch.futures.Future[object] = done.then(value)
        if self._task.done():  # PyTorch's join reads the value at once, after wait()
            done.set_result(None)
            return made
        depth = self._callbacks.depth()
        self._task.add_done_callback(lambda _: self._callbacks.submit(depth, lambda: done.set_result(None)))
        return made
