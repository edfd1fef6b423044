"""Ranks that torch.distributed connects: a transport over its process groups, and `connect` under torchrun."""

from bagua_comm.deprecation import former_names

from .bootstrap import connect, default, provide_group
from .transport import ProcessGroupTransport, RendezvousInfo

__all__ = ["ProcessGroupTransport", "RendezvousInfo", "connect", "default", "provide_group"]

__getattr__ = former_names(__name__, {"Meeting": "RendezvousInfo"})
