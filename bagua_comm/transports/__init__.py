"""What moves the bytes. `mpi`, which starts MPI, and `nccl` and `staged`, over CuPy, are imported when wanted.

A transport of your own is a `Transport` with `moves`, `exchange` and `split`.
"""

from .base import COLLECTIVE, POINT_TO_POINT, Flow, Message, Transport
from .local import LocalTransport

__all__ = ["COLLECTIVE", "POINT_TO_POINT", "Flow", "LocalTransport", "Message", "Transport"]
