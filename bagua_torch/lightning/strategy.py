"""The common part of the strategies for Trainer and Fabric."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bagua_comm import Algorithm, ArrayError, Communicator, UnsupportedError
from bagua_comm.algorithms.base import exchanges_weights

from ..arrays import as_array, torch_stream
from ..broadcast import map_leaves
from ..ddp import DistributedDataParallel
from ..process_group import default
from .packages import FABRICS, package_of, with_base

KEY = "bagua"
"""Under this key, checkpoints hold what the algorithm keeps."""


class RankStrategy:
    """What the strategies of Trainer and Fabric have in common: the ranks, and what they tell each other."""

    comm: Communicator
    algorithm: Algorithm | None

    def _join(
        self, homes: Mapping[str, str], algorithm: Algorithm | None, comm: Communicator | None, options: Any
    ) -> dict[str, Any]:
        """Find the ranks; returns what Lightning's base class wants to know of them. Collective."""
        self.algorithm, self._options = algorithm, options
        self.comm = comm if comm is not None else default()
        self._num_nodes = len(set(self.comm.allgather_object(self.comm.node)))
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
        """The module, exchanged by the algorithm. Collective."""
        stepping = [optimizer for optimizer in optimizers if optimizer.param_groups]  # Lightning has an empty one
        return DistributedDataParallel(module, stepping, self.algorithm, comm=self.comm, **self._options)

    # What Lightning asks for ------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return self._device

    @property
    def is_distributed(self) -> bool:
        """True: every rank gets its own share of the data."""
        return True

    @property
    def num_nodes(self) -> int:
        """How many hosts the ranks are on."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, given: int) -> None:
        if given not in (1, self._num_nodes):
            raise ArrayError(
                f"{type(self).__name__}: num_nodes is {given}, but the {self.comm.size} ranks are on "
                f"{self._num_nodes} nodes; leave num_nodes out"
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How a DistributedSampler divides the data."""
        return {"num_replicas": self.comm.size, "rank": self.comm.rank}

    def _set_world_ranks(self) -> None:
        utilities = importlib.import_module("lightning_utilities.core.rank_zero")
        utilities.rank_zero_only.rank = self.comm.rank

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. Collective."""
        self.comm.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank `src`. Collective."""
        return self.comm.broadcast_object(obj, root=src)

    def _reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce a tensor over all ranks, in place; anything else is returned as it is. Collective."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        _check_group(group)
        op = _op_of(reduce_op)
        with torch_stream(tensor.device), torch.no_grad():
            values = as_array(tensor)
            self.comm.allreduce(values, out=values, op=op)
        return tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all ranks, stacked: (ranks, ...). Collective.

        With `sync_grads`, gradients flow back to the ranks that they came from.
        """
        if sync_grads:
            return super().all_gather(tensor, group, sync_grads)  # type: ignore[misc, no-any-return]
        _check_group(group)
        gathered = tensor.new_empty((self.comm.size, *tensor.shape))
        with torch_stream(tensor.device), torch.no_grad():
            self.comm.allgather(as_array(tensor.detach().contiguous()), as_array(gathered))
        return gathered


class _Ranks:
    """Lightning's ClusterEnvironment: which rank this is, as the communicator says."""

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
        raise UnsupportedError("BaguaStrategy: ranks meet by their communicator, which has no port")

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._comm.size

    def set_world_size(self, size: int) -> None:
        """The communicator knows it."""

    def global_rank(self) -> int:
        return self._comm.rank

    def set_global_rank(self, rank: int) -> None:
        """The communicator knows it."""

    def local_rank(self) -> int:
        return self._comm.local_rank

    def node_rank(self) -> int:
        return self._comm.node


def _check_group(group: Any) -> None:
    world = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    if group is not None and group is not world:
        raise UnsupportedError(
            f"BaguaStrategy: group is {group}, expected None: it reduces over all ranks; for some of them call "
            "torch.distributed.all_reduce(tensor, group=group)"
        )


def _op_of(given: Any) -> Any:
    """Our name of a reduction: of Lightning's names, and of torch.distributed's ReduceOp."""
    name = given if isinstance(given, str) else getattr(given, "name", None) or str(given).rpartition(".")[2]
    op = {"mean": "avg", "product": "prod"}.get(name.lower(), name.lower())
    if op not in ("sum", "avg", "min", "max", "prod"):
        raise ArrayError(f"BaguaStrategy: reduce_op is {given!r}, expected mean, sum, min, max or product")
    return op


# States of algorithms in checkpoints ----


def make_equal(wrapper: DistributedDataParallel) -> None:
    """Average the weights, where ranks' differ, and copy rank 0's buffers; exchange nothing more. Collective."""
    if exchanges_weights(wrapper.algorithm):
        wrapper.stop()
        wrapper.average_weights()
    else:
        wrapper.copy_buffers()


def gather_states(wrapper: DistributedDataParallel) -> list[dict[str, Any]]:
    """On rank 0 what every rank's algorithm keeps, and its optimizers if they differ; else empty. Collective."""
    if not wrapper.keeps_state():
        return []
    mine: dict[str, Any] = {"algorithm": wrapper.get_extra_state()}
    if exchanges_weights(wrapper.algorithm):
        mine["optimizers"] = [optimizer.state_dict() for optimizer in wrapper.optimizers]
    on_host = map_leaves(mine, lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf)
    return wrapper.comm.gather_object(on_host, root=0) or []


def load_states(wrapper: DistributedDataParallel, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Go on from what `gather_states` gave; on another number of ranks, from what rank 0 had. Collective."""
    comm = wrapper.comm
    mine = ranks[comm.rank if len(ranks) == comm.size else 0]
    for optimizer, state in zip(wrapper.optimizers, mine.get("optimizers", ()), strict=False):
        optimizer.load_state_dict(state)
    wrapper.set_extra_state(mine["algorithm"])
