"""Ranks that torch.distributed connects: a transport over its process groups, and `connect` under torchrun."""

from .bootstrap import connect, default, provide_group, renew_group
from .transport import ProcessGroupTransport, RendezvousInfo

__all__ = ["ProcessGroupTransport", "RendezvousInfo", "connect", "default", "provide_group", "renew_group"]
