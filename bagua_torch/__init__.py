"""PyTorch on bagua_comm: tensors lent through DLPack, and a DistributedDataParallel over any algorithm."""

from .arrays import as_array, as_tensor
from .ddp import DistributedDataParallel

__all__ = ["DistributedDataParallel", "as_array", "as_tensor"]
