"""Host arrays over MPI; importing this starts MPI."""

from .transport import MPITransport

__all__ = ["MPITransport"]
