"""What Lightning's Trainer calls a LayerSync: `Trainer(sync_batchnorm=True)` over our ranks, on the CPU too."""

from __future__ import annotations

from torch import nn

from bagua_comm import Communicator

from ..sync_batchnorm import SyncBatchNorm, convert, revert


class BatchNormOverRanks:
    """Makes each BatchNorm of a model one over all ranks while `fit` runs.

    A `bagua_torch.SyncBatchNorm` that the model has already keeps its own ranks.

    Args:
        comm: The ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._there: list[nn.Module] = []

    def apply(self, model: nn.Module) -> nn.Module:
        """Replace each BatchNorm. Collective."""
        self._there = [part for part in model.modules() if isinstance(part, SyncBatchNorm)]
        return convert(model, self._comm, keep=self._there)

    def revert(self, model: nn.Module) -> nn.Module:
        """Put back what `apply` has replaced."""
        return revert(model, keep=self._there)
