"""Ranks that torch.distributed connects: a transport over its process groups, and `connect` under torchrun."""

from .bootstrap import connect
from .transport import ProcessGroupTransport

__all__ = ["ProcessGroupTransport", "connect"]
