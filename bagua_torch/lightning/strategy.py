"""The common part of the strategies for Trainer and Fabric."""

from __future__ import annotations

import importlib
import inspect
import socket
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from bagua_comm import Algorithm, ArrayError, Communicator, UnsupportedError
from bagua_comm.algorithms.base import check_algorithm_argument, exchanges_weights
from bagua_comm.errors import warn

from ..arrays import as_array, torch_stream
from ..bases import with_base
from ..ddp.wrapper import DistributedDataParallel
from ..entry import communicator_of, errors_on_all
from ..process_group.bootstrap import default_group
from ..tensors.broadcast import map_leaves
from .packages import FABRICS, package_of

T = TypeVar("T")

KEY = "bagua"
"""The key of the algorithm's state in checkpoints."""


class RankStrategy:
    """Base of the strategies for Trainer and Fabric: the ranks, and collectives over them."""

    comm: Communicator
    algorithm: Algorithm | None

    def _join(
        self, homes: Mapping[str, str], algorithm: Algorithm | None, comm: Communicator | None, options: Any
    ) -> dict[str, object]:
        """Find the ranks; return the arguments of Lightning's base class. Collective."""
        self.algorithm, self._options = algorithm, options
        self.comm = communicator_of(type(self).__name__, comm)
        with errors_on_all(self.comm):
            if algorithm is not None:
                check_algorithm_argument(type(self).__name__, "algorithm", algorithm)
        self._hosts = len(set(self.comm.allgather_object(self.comm.node)))
        cuda = self.comm.device is not None and torch.cuda.is_available()
        self._device = torch.device(f"cuda:{self.comm.device}") if cuda else torch.device("cpu")
        fabric = FABRICS[package_of(type(self), homes)]
        environments = importlib.import_module(f"{fabric}.plugins.environments")
        environment = with_base(_Ranks, environments.ClusterEnvironment)
        return {
            "parallel_devices": [self._device] * self.comm.local_size,
            "cluster_environment": environment(self.comm),
        }

    def _wrap(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> DistributedDataParallel:
        """Wrap the module. Collective."""
        stepping = [optimizer for optimizer in optimizers if optimizer.param_groups]  # Lightning has an empty one
        return DistributedDataParallel(module, stepping, self.algorithm, comm=self.comm, **self._options)

    # Lightning's interface --------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return self._device

    @property
    def is_distributed(self) -> bool:
        """True: every rank gets a different share of the data."""
        return True

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""
        return self._hosts

    @num_nodes.setter
    def num_nodes(self, given: int) -> None:
        if given not in (1, self._hosts):
            raise ArrayError(
                f"{type(self).__name__}: num_nodes is {given}, but the {self.comm.size} ranks are on "
                f"{self._hosts} nodes; leave num_nodes out"
            )

    def _configure_launcher(self) -> None:
        """Check `devices` and `num_nodes`, as given to Trainer or Fabric.

        Lightning gives neither to a strategy that has ranks already; its connector, which calls this method, has
        them.
        """
        frame = inspect.currentframe()
        connector = frame.f_back.f_locals.get("self") if frame is not None and frame.f_back is not None else None
        self.num_nodes = getattr(connector, "_num_nodes_flag", 1)
        devices = getattr(connector, "_devices_flag", 1)
        self._check_devices(devices if isinstance(devices, int) else len(devices or [0]))

    def _check_devices(self, given: int) -> None:
        """Raise if `devices` is not the number of ranks of this host; on GPUs, "auto" counts all, so warn."""
        here = self.comm.local_size
        if given in (1, here):
            return
        started = f"{here} rank{'s were' if here > 1 else ' was'} started on this host"
        message = (
            f"{type(self).__name__}: devices is {given}, but {started}, and devices starts no processes; start "
            f"them by `bagua run -n {given}`, or leave devices out"
        )
        if self._device.type == "cpu":
            raise ArrayError(message)
        if self.comm.local_rank == 0:
            warn(message)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The arguments of a DistributedSampler."""
        return {"num_replicas": self.comm.size, "rank": self.comm.rank}

    def set_world_ranks(self) -> None:
        """Set the rank in Lightning's loggers."""
        utilities = importlib.import_module("lightning_utilities.core.rank_zero")
        utilities.rank_zero_only.rank = self.comm.rank

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. Collective."""
        self.comm.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object of rank `src`. Collective."""
        return self.comm.broadcast_object(obj, root=src)

    def reduce(self, tensor: T, group: object = None, reduce_op: object = "mean") -> T:
        """Reduce a tensor over all ranks, in place; return other values unchanged. Collective."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        _check_group(group)
        op = _op_of(reduce_op)
        with torch_stream(tensor.device), torch.no_grad():
            values = as_array(tensor)
            self.comm.allreduce(values, out=values, op=op)
        return tensor

    all_reduce = reduce
    """The name of `reduce` in Fabric."""

    def all_gather(self, tensor: torch.Tensor, group: object = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all ranks, stacked: (ranks, ...). Collective.

        With `sync_grads`, the result is differentiable.
        """
        if sync_grads:
            return super().all_gather(tensor, group, sync_grads)  # type: ignore[misc, no-any-return]
        _check_group(group)
        gathered = tensor.new_empty((self.comm.size, *tensor.shape))
        with torch_stream(tensor.device), torch.no_grad():
            self.comm.allgather(as_array(tensor.detach().contiguous()), as_array(gathered))
        return gathered


class _Ranks:
    """Lightning's ClusterEnvironment for a communicator."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return socket.gethostname()

    @property
    def main_port(self) -> int:
        raise UnsupportedError("BaguaStrategy: ranks are connected by their communicator, which has no port")

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._comm.size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the communicator has it."""

    def global_rank(self) -> int:
        return self._comm.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the communicator has it."""

    def local_rank(self) -> int:
        return self._comm.local_rank

    def node_rank(self) -> int:
        return self._comm.node


def _check_group(group: object) -> None:
    if group is not None and group is not default_group():
        raise UnsupportedError(
            f"BaguaStrategy: group is {group}, expected None: it reduces over all ranks; for a subset call "
            "torch.distributed.all_reduce(tensor, group=group)"
        )


def _op_of(given: object) -> Any:
    """The operation for a name of Lightning, or a ReduceOp of torch.distributed."""
    name = given if isinstance(given, str) else getattr(given, "name", None) or str(given).rpartition(".")[2]
    op = {"mean": "avg", "product": "prod"}.get(name.lower(), name.lower())
    if op not in ("sum", "avg", "min", "max", "prod"):
        raise ArrayError(f"BaguaStrategy: reduce_op is {given!r}, expected mean, sum, min, max or product")
    return op


# States of algorithms in checkpoints ------------------------------------------------------------------------


def make_equal(wrapper: DistributedDataParallel) -> None:
    """Average weights that differ between ranks, copy rank 0's buffers, and stop exchanges. Collective."""
    if exchanges_weights(wrapper.algorithm):
        wrapper.stop()
        wrapper.average_weights()
    else:
        wrapper.copy_buffers()


def gather_states(wrapper: DistributedDataParallel) -> list[dict[str, Any]]:
    """Gather the states of all algorithms, and of optimizers that differ, on rank 0. Collective."""
    if not wrapper.keeps_state():
        return []
    mine: dict[str, object] = {"algorithm": wrapper.get_extra_state()}
    if exchanges_weights(wrapper.algorithm):
        mine["optimizers"] = [optimizer.state_dict() for optimizer in wrapper.optimizers]
    on_host = map_leaves(mine, lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf)
    return wrapper.comm.gather_object(on_host, root=0) or []


def load_states(wrapper: DistributedDataParallel, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Load the result of `gather_states`; rank 0's on another number of ranks. Collective."""
    comm = wrapper.comm
    mine = ranks[comm.rank if len(ranks) == comm.size else 0]
    for optimizer, state in zip(wrapper.optimizers, mine.get("optimizers", ()), strict=False):
        optimizer.load_state_dict(state)
    wrapper.set_extra_state(mine["algorithm"])
