"""PyTorch's ZeroRedundancyOptimizer, which shards optimizer states over ranks.

Each rank steps its share of the parameters, and broadcasts it by torch.distributed. So it fits only where
gradients are averaged and all ranks step.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bagua_comm import Algorithm, UnsupportedError
from bagua_comm.algorithms.base import exchanges_weights
from bagua_comm.checkpoint.optimizers import Restore, is_sharded_optimizer, load_in_place, update_groups

__all__ = ["check_sharded", "is_sharded_optimizer", "load_state", "state_of"]


def check_sharded(optimizers: Iterable[Any], algorithm: Algorithm) -> None:
    """Raise `UnsupportedError` if one of the optimizers is sharded and does not fit the algorithm."""
    for optimizer in filter(is_sharded_optimizer, optimizers):
        if optimizer._overlap_with_ddp:
            raise UnsupportedError(
                "DistributedDataParallel: this ZeroRedundancyOptimizer has overlap_with_ddp=True, so it waits "
                "for a hook of PyTorch's wrapper and would never step; construct it without"
            )
        if exchanges_weights(algorithm):
            raise UnsupportedError(
                f"DistributedDataParallel: {algorithm} lets the weights of ranks differ, but a "
                "ZeroRedundancyOptimizer makes them equal in every step; give another optimizer, or an algorithm "
                "that exchanges gradients"
            )


def state_of(optimizer: Any) -> dict[str, object]:
    """The states of this rank's share, with the settings of all groups."""
    groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    return {"share": optimizer.optim.state_dict(), "groups": groups}


def load_state(optimizer: Any, state: Mapping[str, Any], restore: Restore | None) -> None:
    """Load the result of `state_of` of this rank, for the same number of ranks."""
    load_in_place(optimizer.optim, state["share"], restore)
    update_groups(optimizer.param_groups, state["groups"])
