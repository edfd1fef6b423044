"""From processes to a communicator: the launcher, the rendezvous, MPI and NCCL, and the end of a rank."""

from .connection import GPU, connect, current, default

__all__ = ["GPU", "connect", "current", "default"]
