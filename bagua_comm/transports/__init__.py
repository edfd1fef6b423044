"""What moves the bytes. `mpi` is imported only when MPI is wanted: importing it starts MPI."""

from .base import Transport
from .local import LocalTransport

__all__ = ["LocalTransport", "Transport"]
