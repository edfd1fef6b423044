"""The base of a process group of torch.distributed: ranks, names, calls on a lane, and an end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bagua_comm import CommError, Communicator
from bagua_comm.execution.lane import Lane, ThreadLane

from ..arrays import torch_stream
from .arguments import Options
from .averaging import BackendOptions, GroupAverage
from .messages import Messages
from .tensors import HOST, device_of
from .work import Callbacks, LaneWork

_ProcessGroup: Any = dist.ProcessGroup  # torch types its methods by overloads

_DONE: Future[None] = Future()
"""The task of calls that have ended without an error."""
_DONE.set_result(None)


class GroupBase(_ProcessGroup):  # type: ignore[misc]
    """A process group without calls; see `BaguaGroup` for the arguments."""

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(
        self,
        lane: Lane[Communicator],
        parent: Communicator,
        at_close: Callable[[], object] | None = None,
        options: BackendOptions | None = None,
    ) -> None:
        super().__init__(lane.comm.rank, lane.comm.size)
        self.lane, self.comm, self.parent = lane, lane.comm, parent
        self._at_close = at_close
        self._average = GroupAverage(options or BackendOptions(), self.comm)
        self._messages = Messages(self.comm)
        self._callbacks = Callbacks()
        self._kept: deque[LaneWork] = deque(maxlen=64)
        """The latest allreduces of one element. PyTorch's `join` gives such a work to its reducer, which waits
        for it in the backward pass, but does not keep the Python object: that wait would never end."""
        self._is_open = True
        self._name = self._description = ""

    # What torch.distributed asks of a group -----------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        """Return "bagua"."""
        return "bagua"

    def rank(self) -> int:
        """Return this rank in the group."""
        return self.comm.rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self.comm.size

    def setGroupName(self, name: str) -> None:  # noqa: N802 - PyTorch's name
        """Set the name by which torch.distributed finds the group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - PyTorch's name
        """Return the name by which torch.distributed finds the group."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - PyTorch's name
        """Set the description of the group."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802 - PyTorch's name
        """Return the description of the group."""
        return self._description

    getRank, getSize = rank, size  # noqa: N815 - PyTorch's names
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors the group carries."""
        return [HOST] if self.comm.device is None else [HOST, torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> GroupBase:
        """Return the object that makes the calls for a device: the group itself."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of calls, from the next one on."""
        self.comm.timeout_s = timeout.total_seconds()

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: calls are numbered anyway."""

    # The lane ---------------------------------------------------------------------------------------------

    def _submit(
        self,
        name: str,
        options: Options,
        tensors: Sequence[Any],
        task: Callable[..., object],
        *args: object,
        reads: Sequence[torch.Tensor] = (),
        begin: Callable[[], bool] | None = None,
        **keywords: object,
    ) -> LaneWork:
        """Run `task` on the lane; unless asynchronously, it has ended on return, or its error is raised.

        Args:
            name: The name of the call, for errors.
            options: Its options.
            tensors: The value of its future; lists of lists are possible.
            task: Called with `args`, `keywords` and `timeout_s`.
            args: Its arguments.
            reads: Tensors that it reads, whose device counts if there are no `tensors`.
            begin: Begins the call ahead; see `ThreadLane.submit_begun`.
            keywords: More arguments.
        """
        self._check_open(name)
        device, lane = device_of([*tensors, *reads]), self.lane
        with torch_stream(device):
            if not options.asynchronous:
                lane.run(task, *args, **keywords, timeout_s=options.timeout_s)
                return LaneWork(name, _DONE, tensors, device, self._callbacks)
            future: Future[Any]
            if begin is not None and isinstance(lane, ThreadLane) and options.timeout_s is None:
                future = lane.submit_begun(begin, task, *args, **keywords, timeout_s=None)
            else:
                future = lane.submit(task, *args, **keywords, timeout_s=options.timeout_s)
        work = LaneWork(name, future, tensors, device, self._callbacks, forget=lane.forget)
        if name == "allreduce" and tensors[0].numel() == 1:
            self._kept.append(work)
        return work

    def _check_open(self, name: str) -> None:
        if not self._is_open:
            raise CommError(f"{name}: this process group was destroyed")

    # End --------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the group, once its calls are done. Collective.

        Raises:
            BaguaError: The error of a call that nobody has waited for.
        """
        if not self._is_open:
            return
        self._is_open = False
        with ExitStack() as ends:
            if self._at_close is not None:
                ends.callback(self._at_close)
            ends.callback(self._callbacks.close)
            ends.callback(self.lane.close)
            ends.callback(self._messages.drain, self.comm.timeout_s)

    def abort(self) -> None:
        """End the group at once; collective calls under way fail when their time limit is over."""
        self._is_open = False
        self._messages.stop()  # before the lane closes the connections that they share
        self.lane.abort()
        self._callbacks.close()
