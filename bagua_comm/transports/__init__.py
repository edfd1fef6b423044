"""What moves the bytes. `mpi`, which starts MPI, and `nccl` and `staged`, over CuPy, are imported when wanted."""

from .base import Transport
from .local import LocalTransport

__all__ = ["LocalTransport", "Transport"]
