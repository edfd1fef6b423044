"""Ranks that torch.distributed connects: a transport over its process groups, and `connect` under torchrun."""

from .bootstrap import connect, default, provide_group
from .transport import Meeting, ProcessGroupTransport

__all__ = ["Meeting", "ProcessGroupTransport", "connect", "default", "provide_group"]
