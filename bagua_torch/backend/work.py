"""The result of a call of a process group: a task on the lane of the group."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bagua_comm import CommTimeout

from ..arrays import torch_stream

_Work: Any = dist.Work  # torch types it in part


class LaneWork(_Work):  # type: ignore[misc]
    """A call in progress on the lane of a process group.

    Args:
        call: The name of the call, for errors.
        future: The task.
        tensors: The value of `get_future`: the tensors that the call fills.
        device: The device of the tensors.
        source: The rank that a received message comes from; None if this is no `recv`.
    """

    def __init__(
        self,
        call: str,
        future: Future[Any],
        tensors: Any,
        device: torch.device,
        source: int | None = None,
    ) -> None:
        super().__init__()
        self._call, self._task, self._tensors, self._device, self._source = call, future, tensors, device, source

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the call is done, and raise its error; on a device, the current stream waits.

        Args:
            timeout: How long to wait; if it is not above 0, until the time limit of the call.

        Raises:
            CommTimeout: It takes longer. The call continues.
        """
        limit_s = timeout.total_seconds()
        with torch_stream(self._device):
            try:
                self._task.result(limit_s if limit_s > 0 else None)
            except FutureTimeout as exc:
                raise CommTimeout(f"{self._call} is not done after the {limit_s:g} s of wait()") from exc
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """Whether the call is done; on a device, whether its work is."""
        return self._task.done()

    def is_success(self) -> bool:
        """Whether the call is done, without an error."""
        return self._task.done() and self._task.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the call; None if it has none, or is not done."""
        return self._task.exception() if self._task.done() else None

    def result(self) -> Any:
        """Wait for the call, and return the tensors that it has filled."""
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank in the group that a received message comes from."""
        if self._source is None:
            raise RuntimeError(f"{self._call} receives no message of one rank")
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of PyTorch, whose value is the tensors that the call fills."""
        devices: Any = None if self._device.type == "cpu" else [self._device]
        made: torch.futures.Future[Any] = torch.futures.Future(devices=devices)

        def finish(task: Future[Any]) -> None:
            error = task.exception()
            if error is None:
                with torch_stream(self._device):
                    task.result()
                    made.set_result(self._tensors)
            else:
                made.set_exception(error)

        self._task.add_done_callback(finish)
        return made
