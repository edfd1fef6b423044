"""Transports move the bytes. `mpi`, which starts MPI, and `nccl` and `staged`, on CuPy, are imported if used."""

from .base import Transport
from .local import LocalTransport

__all__ = ["LocalTransport", "Transport"]
