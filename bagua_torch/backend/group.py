"""`BaguaGroup`: a process group of torch.distributed whose calls are those of a communicator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bagua_comm import CommError, Communicator, UnsupportedError
from bagua_comm.arrays import Array, Op, check_reduction
from bagua_comm.lane import Lane

from ..arrays import as_array, torch_stream
from .work import LaneWork

_ProcessGroup: Any = dist.ProcessGroup  # torch types its methods by overloads

_HOST = torch.device("cpu")


_REDUCTIONS: dict[str, Op] = {
    "SUM": "sum",
    "AVG": "avg",
    "PRODUCT": "prod",
    "MIN": "min",
    "MAX": "max",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
}
"""Our names of PyTorch's reductions."""


class BaguaGroup(_ProcessGroup):  # type: ignore[misc]
    """The ranks of a communicator as a process group.

    A call is submitted to the lane of the group, and runs there after the calls before it. So the calls of a
    group are in order, and those of several groups run at the same time. Errors are those of bagua_comm: they
    name the rank and the call, and no call waits longer than its time limit.

    Collective.

    Args:
        lane: The lane on whose communicator the calls run; the group owns it.
        at_close: Called when the group has been shut down.
    """

    def __init__(self, lane: Lane[Communicator], at_close: Callable[[], object] | None = None) -> None:
        super().__init__(lane.comm.rank, lane.comm.size)
        self.lane, self.comm = lane, lane.comm
        self._at_close = at_close
        self._submits = threading.Lock()
        self._name, self._description = "", ""
        self._is_open = True

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

    getRank, getSize = rank, size  # noqa: N815 - PyTorch's names

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors the group carries."""
        return [_HOST] if self.comm.device is None else [_HOST, torch.device("cuda")]

    # Collectives ----------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> LaneWork:
        """Reduce each of `tensors` over all ranks, in place."""
        tensors = _listed(tensors)
        xs = [_array("allreduce", x) for x in tensors]
        op = _op("allreduce", opts, xs)
        if len(xs) == 1:
            return self._submit("allreduce", opts, tensors, self.comm.allreduce, xs[0], xs[0], op=op)
        return self._submit("allreduce", opts, tensors, self.comm.allreduce_many, xs, xs, op=op)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any) -> LaneWork:
        """Copy `tensors` of the root to all ranks."""
        tensors = _listed(tensors)
        xs = [_array("broadcast", x) for x in tensors]
        if len(xs) == 1:
            return self._submit("broadcast", opts, tensors, self.comm.broadcast, xs[0], root=opts.rootRank)
        return self._submit("broadcast", opts, tensors, self.comm.broadcast_many, xs, root=opts.rootRank)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> LaneWork:
        """Gather the input of each rank, in a list of tensors."""
        outs, x = _only("allgather", outputs), _array("allgather", _only("allgather", inputs))
        targets = [_array("allgather", out) for out in outs]
        counts = [target.size for target in targets]

        def allgather(timeout_s: float | None) -> None:
            buffer = _empty(sum(counts), x)
            if len(set(counts)) == 1:
                self.comm.allgather(x, buffer, timeout_s=timeout_s)
            else:
                self.comm.allgatherv(x, buffer, counts, timeout_s=timeout_s)
            _copy_parts(buffer, targets)

        return self._submit("allgather", opts, outputs, allgather)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> LaneWork:
        """Gather the input of each rank, in one tensor."""
        out, x = _array("allgather", output), _array("allgather", tensor)
        return self._submit("allgather", opts, output, self.comm.allgather, x, out)

    _allgather_base = all_gather_single

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> LaneWork:
        """Reduce a list of one tensor for each rank, and keep this rank's."""
        name = "reduce_scatter"
        out, parts = _array(name, _only(name, outputs)), [_array(name, x) for x in _only(name, inputs)]
        op = _op(name, opts, parts)
        counts = [part.size for part in parts]

        def reduce_scatter(timeout_s: float | None) -> None:
            buffer = _joined(parts)
            self.comm.reduce_scatter(buffer, out, op=op, counts=counts, timeout_s=timeout_s)

        return self._submit(name, opts, outputs, reduce_scatter)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> LaneWork:
        """Reduce a tensor of a chunk for each rank, and keep this rank's."""
        name = "reduce_scatter"
        out, x = _array(name, output), _array(name, tensor)
        op, counts = _op(name, opts, [x]), [out.size] * self.comm.size
        return self._submit(name, opts, output, self.comm.reduce_scatter, x, out, op=op, counts=counts)

    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, opts: Any = None) -> LaneWork:
        """Wait until all ranks have called it."""
        return self._submit("barrier", opts, [], self.comm.barrier)

    # The lane ---------------------------------------------------------------------------------------------

    def _submit(
        self, name: str, opts: Any, tensors: Any, task: Callable[..., object], *args: Any, **options: Any
    ) -> LaneWork:
        """Run `task` on the lane, within the time limit of `opts`."""
        if not self._is_open:
            raise CommError(f"{name}: this process group was destroyed")
        device = _device_of(tensors)
        with torch_stream(device), self._submits:
            future = self.lane.submit(task, *args, **options, timeout_s=_seconds(opts))
        return LaneWork(name, future, tensors, device)

    # End --------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the group, once its calls are done. Collective."""
        if not self._is_open:
            return
        self._is_open = False
        with ExitStack() as ends:
            if self._at_close is not None:
                ends.callback(self._at_close)
            ends.callback(self.lane.close)


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _only(call: str, values: Any) -> Any:
    """Return the one value of a list; PyTorch's lists of one list for each device of a process."""
    if isinstance(values, torch.Tensor):
        return values
    if len(values) != 1:
        raise UnsupportedError(f"{call}: there are {len(values)} tensors of this rank, expected one")
    return values[0]


def _array(call: str, tensor: torch.Tensor) -> Array:
    """Return a tensor as an array, which shares its memory."""
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"{call}: a tensor has layout {tensor.layout}, expected a dense tensor")
    return as_array(tensor)


def _op(call: str, opts: Any, xs: Sequence[Array]) -> Op:
    """Return our name of the reduction of `opts`, which all of `xs` have."""
    wanted: Any = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    name: str = getattr(wanted, "op", wanted).name
    op = _REDUCTIONS.get(name)
    if op is None:
        raise UnsupportedError(f"{call}: op is {name}, expected one of {', '.join(_REDUCTIONS)}")
    for x in xs:
        check_reduction(call, op, x.dtype)
    return op


def _seconds(opts: Any) -> float | None:
    """Return the time limit of a call; None for that of the group."""
    timeout = getattr(opts, "timeout", None)
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        return None
    return timeout.total_seconds()


def _device_of(tensors: Any) -> torch.device:
    while isinstance(tensors, (list, tuple)):
        if not tensors:
            return _HOST
        tensors = tensors[0]
    device: torch.device = tensors.device
    return device


def _empty(size: int, like: Array) -> Array:
    from bagua_comm.arrays import empty

    return empty((size,), like.dtype, like=like)


def _joined(parts: Sequence[Array]) -> Array:
    """Return a new array of the elements of all parts."""
    buffer = _empty(sum(part.size for part in parts), parts[0])
    start = 0
    for part in parts:
        buffer[start : start + part.size] = part.reshape(-1)
        start += part.size
    return buffer


def _copy_parts(buffer: Array, targets: Sequence[Array]) -> None:
    start = 0
    for target in targets:
        target[...] = buffer[start : start + target.size].reshape(target.shape)
        start += target.size
