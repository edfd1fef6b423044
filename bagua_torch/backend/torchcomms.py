"""A backend "bagua" of torchcomms, whose calls are those of a process group of this library.

    comm = torchcomms.new_comm("bagua", torch.device("cpu"), name="main")

torchcomms imports this module by its entry point "torchcomms.backends"; importing it registers the class. The
ranks are those of MPI or of torchrun. Interface: https://github.com/meta-pytorch/torchcomms/pull/2080.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch

import bagua_comm
from bagua_comm import ArrayError, CommError, Communicator
from bagua_comm.bootstrap import environment
from bagua_comm.bootstrap.world import current, default_or

from ..bases import with_base
from ..process_group import connect
from ..process_group.bootstrap import BACKEND
from .group import BaguaGroup
from .start import lane_of
from .work import LaneWork


class _Options:
    """The options of a call of a process group, from the arguments of one of torchcomms."""

    def __init__(self, async_op: bool, op: Any = None, root: int = 0) -> None:
        self.asyncOp = async_op
        self.reduceOp, self.rootRank = getattr(op, "type", op), root


class TorchCommBagua:
    """The ranks of MPI or torchrun, or some of them, as a communicator of torchcomms.

    Errors are those of bagua_comm. Calls return None, or a work if `async_op`.
    """

    _lock: ClassVar = threading.Lock()
    _open: ClassVar[Counter[Communicator]] = Counter()
    """The worlds that were connected here, and how many of these objects use each."""
    _splits: ClassVar[WeakKeyDictionary[Communicator, Counter[Any]]] = WeakKeyDictionary()
    """How many groups of the same ranks and name were split from each world."""

    def __init__(self) -> None:
        super().__init__()
        self._group: BaguaGroup | None = None
        self._world: Communicator | None = None
        self._name = ""
        self._device, self._options = torch.device("cpu"), None

    # Start and end ----------------------------------------------------------------------------------

    def init(self, device: torch.device, name: str, options: Any = None) -> None:
        """Connect the ranks.

        Collective.

        Raises:
            CommError: It has been called before.
        """
        if self._group is not None:
            raise CommError(f"torchcomms: init of {self._name}, expected one call")
        timeout_s = getattr(options, "timeout", timedelta(seconds=300)).total_seconds()
        mpi = not environment.under_torchrun() and environment.under_mpi()
        with self._lock:
            before = current()
            make = bagua_comm.connect if mpi else connect
            world = default_or(lambda: make(timeout_s=timeout_s))
            if world is not before or world in self._open:
                self._open[world] += 1
                self._world = world
        self._take(BaguaGroup(lane_of(world.dup(), timeout_s), world), device, name, options)

    def _take(self, group: BaguaGroup, device: torch.device, name: str, options: Any) -> None:
        self._group, self._device, self._name, self._options = group, device, name, options

    def finalize(self) -> None:
        """End this communicator, once its calls are done.

        Collective.
        """
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()
        world, self._world = self._world, None
        if world is None:
            return
        with self._lock:
            self._open[world] -= 1
            last = not self._open[world]
            if last:
                del self._open[world]
        if last:
            world.close()

    def split(self, ranks: Sequence[int], name: str, options: Any = None) -> TorchCommBagua | None:
        """Make a communicator of these ranks, in this order; returns None if there are none.

        Collective among `ranks`.

        Raises:
            ArrayError: This rank is not among them, or one occurs twice or does not exist.
        """
        group, ranks = self._used("split"), list(ranks)
        if not ranks:
            return None
        size = group.size()
        if group.rank() not in ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(size)):
            raise ArrayError(
                f"split: ranks is {ranks}, expected different ranks from 0 to {size - 1}, among them this one, "
                f"{group.rank()}; ranks without a part pass none"
            )
        key = (name, *ranks)
        counts = self._splits.setdefault(group.parent, Counter())
        counts[key] += 1
        made = group.parent.subgroup(ranks, f"torchcomms/{key}/{counts[key]}")
        timeout = getattr(options, "timeout", None)
        timeout_s = group.comm.timeout_s if timeout is None else timeout.total_seconds()
        child = type(self)()
        child._take(BaguaGroup(lane_of(made, timeout_s), made), self._device, name, options)
        tell = getattr(child, "_set_device_and_options", None)  # where torchcomms keeps them, too
        if tell is not None:
            tell(self._device, options)
        return child

    def _used(self, call: str) -> BaguaGroup:
        if self._group is None:
            raise CommError(
                f"{call}: this communicator of torchcomms is not initialised, or was finalised; call init before"
            )
        return self._group

    # What it is -------------------------------------------------------------------------------------

    def get_rank(self) -> int:
        """Return this rank."""
        return self._used("get_rank").rank()

    def get_size(self) -> int:
        """Return the number of ranks."""
        return self._used("get_size").size()

    def get_backend_name(self) -> str:
        """Return "bagua"."""
        return BACKEND

    def get_comm_name(self) -> str:
        """Return the name of this communicator."""
        return self._name

    def get_device(self) -> torch.device:
        """Return the device of this communicator."""
        return self._device

    def get_options(self) -> Any:
        """Return the options of this communicator."""
        return self._options

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of calls, from the next one on."""
        self._used("set_timeout").set_timeout(timeout)

    # Calls ------------------------------------------------------------------------------------------

    def send(self, tensor: Any, dst: int, async_op: bool) -> LaneWork | None:
        """Send a tensor to another rank."""
        return _ended(self._used("send").send([tensor], dst, 0), async_op)

    def recv(self, tensor: Any, src: int, async_op: bool) -> LaneWork | None:
        """Receive a tensor from another rank."""
        return _ended(self._used("recv").recv([tensor], src, 0), async_op)

    def broadcast(self, tensor: Any, root: int, async_op: bool) -> LaneWork | None:
        """Copy a tensor of the root to all ranks."""
        return _ended(self._used("broadcast").broadcast([tensor], _Options(async_op, root=root)), async_op)

    def all_reduce(self, tensor: Any, op: Any, async_op: bool) -> LaneWork | None:
        """Reduce a tensor over all ranks, in place."""
        return _ended(self._used("all_reduce").allreduce([tensor], _Options(async_op, op)), async_op)

    def reduce(self, tensor: Any, root: int, op: Any, async_op: bool) -> LaneWork | None:
        """Reduce a tensor over all ranks, in place on the root."""
        return _ended(self._used("reduce").reduce([tensor], _Options(async_op, op, root)), async_op)

    def all_gather(self, outputs: Any, tensor: Any, async_op: bool) -> LaneWork | None:
        """Gather the tensor of each rank, in a list; their sizes may differ."""
        return _ended(self._used("all_gather").allgather([outputs], [tensor], _Options(async_op)), async_op)

    def all_gather_single(self, output: Any, tensor: Any, async_op: bool) -> LaneWork | None:
        """Gather the tensor of each rank, in one tensor."""
        group = self._used("all_gather_single")
        return _ended(group.all_gather_single(output, tensor, _Options(async_op)), async_op)

    def reduce_scatter(self, output: Any, inputs: Any, op: Any, async_op: bool) -> LaneWork | None:
        """Reduce a list of one tensor for each rank, and keep this rank's; their sizes may differ."""
        group = self._used("reduce_scatter")
        return _ended(group.reduce_scatter([output], [inputs], _Options(async_op, op)), async_op)

    def reduce_scatter_single(self, output: Any, tensor: Any, op: Any, async_op: bool) -> LaneWork | None:
        """Reduce a tensor of one chunk for each rank, and keep this rank's."""
        group = self._used("reduce_scatter_single")
        return _ended(group.reduce_scatter_single(output, tensor, _Options(async_op, op)), async_op)

    def all_to_all_single(self, output: Any, tensor: Any, async_op: bool) -> LaneWork | None:
        """Send as many rows of a tensor to each rank."""
        return self.all_to_all_v_single(output, tensor, None, None, async_op)

    def all_to_all_v_single(
        self, output: Any, tensor: Any, output_splits: Any, input_splits: Any, async_op: bool
    ) -> LaneWork | None:
        """Send these numbers of rows of a tensor to the ranks."""
        group, options = self._used("all_to_all_single"), _Options(async_op)
        return _ended(group.all_to_all_single(output, tensor, output_splits, input_splits, options), async_op)

    def all_to_all(self, outputs: Any, inputs: Any, async_op: bool) -> LaneWork | None:
        """Send one tensor of a list to each rank."""
        return _ended(self._used("all_to_all").alltoall(outputs, inputs, _Options(async_op)), async_op)

    def barrier(self, async_op: bool) -> LaneWork | None:
        """Wait until all ranks have called it."""
        return _ended(self._used("barrier").barrier(_Options(async_op)), async_op)

    def scatter(self, output: Any, inputs: Any, root: int, async_op: bool) -> LaneWork | None:
        """Send one tensor of a list of the root to each rank."""
        group = self._used("scatter")
        return _ended(group.scatter([output], [inputs], _Options(async_op, root=root)), async_op)

    def gather(self, outputs: Any, tensor: Any, root: int, async_op: bool) -> LaneWork | None:
        """Gather the tensor of each rank on the root, in a list."""
        group = self._used("gather")
        lists = [outputs] if group.rank() == root else []
        return _ended(group.gather(lists, [tensor], _Options(async_op, root=root)), async_op)

    all_gather_v, reduce_scatter_v = all_gather, reduce_scatter


def _ended(work: LaneWork, async_op: bool) -> LaneWork | None:
    """Return the work of a call; without `async_op`, None, once it is done."""
    if async_op:
        return work
    work.wait()
    return None


def register() -> None:
    """Register the class with torchcomms, unless that is not installed."""
    try:
        from torchcomms import _comms
    except ImportError:
        return
    _comms.register_backend(BACKEND, with_base(TorchCommBagua, _comms.TorchCommBackend))


register()
