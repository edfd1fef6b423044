"""A warning if one of many processes trains alone, because its program has connected to no other.

A program for torchrun may take the absence of a variable of torchrun as a sign that it is alone. Under mpirun,
each process would then train a model of its own, and all would write the same files.
"""

from __future__ import annotations

import sys
import warnings

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from bagua_comm.bootstrap import environment
from bagua_comm.bootstrap.world import current


def warn_if_alone() -> RemovableHandle | None:
    """Warn on rank 0, at the first step of an optimizer, unless the program has connected to the other ranks.

    Returns:
        Removes the hook of optimizers; None if other processes were not started.
    """
    found = environment.rank_of_many()
    if found is None or found[0] != 0:
        return None
    return register_optimizer_step_pre_hook(_FirstStep(found[1]))


class _FirstStep:
    """Called before each step of any optimizer; warns before the first one.

    Args:
        size: The number of processes; None if that is not known.
    """

    def __init__(self, size: int | None) -> None:
        self._size = size
        self._is_next = True

    def __call__(self, *_: object) -> None:
        if not self._is_next:
            return
        self._is_next = False
        if current() is not None or dist.is_initialized() or "mpi4py.MPI" in sys.modules:
            return
        warnings.warn(
            f"{self._size or 'several'} processes were started, but this one, rank 0, trains alone: its program "
            "has connected to no other. Call torch.distributed.init_process_group('bagua') or "
            "bagua_torch.connect(), and import bagua_torch before the program reads RANK, WORLD_SIZE and "
            "LOCAL_RANK. If each process is meant to train alone, say bagua_torch.connect(alone=True)",
            RuntimeWarning,
            stacklevel=3,
        )
