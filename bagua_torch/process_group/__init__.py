"""Ranks that torch.distributed connects: a transport over its process groups, and `connect` under torchrun."""

import warnings
from typing import Any

from .bootstrap import connect, default, provide_group
from .transport import ProcessGroupTransport, RendezvousInfo

__all__ = ["ProcessGroupTransport", "RendezvousInfo", "connect", "default", "provide_group"]


def __getattr__(name: str) -> Any:
    if name == "Meeting":
        warnings.warn("bagua_torch.process_group.Meeting is now RendezvousInfo", DeprecationWarning, 2)
        return RendezvousInfo
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
