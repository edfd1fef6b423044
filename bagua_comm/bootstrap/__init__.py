"""From processes to a communicator: the launcher, the rendezvous, MPI and NCCL, and the exit of a rank."""

from .connection import connect, default
from .gpu import GPU
from .world import current

__all__ = ["GPU", "connect", "current", "default"]
