"""Transports, which move the bytes of communicators.

`mpi`, which starts MPI, and `nccl` and `staged`, over CuPy, are imported only where they are used. A transport of
your own is a `Transport` with `moves`, `exchange`, `split` and `abort`.
"""

from .base import Transport
from .flow import COLLECTIVE, POINT_TO_POINT, Flow, Message
from .local import LocalTransport

__all__ = ["COLLECTIVE", "POINT_TO_POINT", "Flow", "LocalTransport", "Message", "Transport"]
