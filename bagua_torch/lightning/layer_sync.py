"""Lightning's LayerSync for `Trainer(sync_batchnorm=True)`, on the CPU as well."""

from __future__ import annotations

from torch import nn

from bagua_comm import Communicator

from ..sync_batchnorm import SyncBatchNorm, convert, revert


class BatchNormOverRanks:
    """Converts each BatchNorm of a model to one over all ranks while `fit` runs.

    A `bagua_torch.SyncBatchNorm` of the model keeps its ranks.

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
        """Undo `apply`."""
        return revert(model, keep=self._there)
