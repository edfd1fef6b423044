"""`DistributedDataParallel`: its state, its names of PyTorch's, checkpoints, and the hook for PyTorch's class."""

from .comm_hook import comm_hook
from .wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel", "comm_hook"]
