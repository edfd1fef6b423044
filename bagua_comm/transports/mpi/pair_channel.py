"""Messages between two ranks, on a thread beside the one that uses the transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpi4py import MPI

from ..flow import Message
from .counted_calls import CountedCalls
from .endpoint import Endpoint
from .messages import Messages


class MPIChannel(CountedCalls):
    """A channel over the MPI communicator of a transport; see `Transport.channel`.

    Args:
        comm: The communicator.
        timeout_s: How long a call may wait for its peers.
        endpoint: Makes the endpoint of these calls.
    """

    name = "mpi"

    def __init__(self, comm: MPI.Comm, timeout_s: float, endpoint: Callable[[CountedCalls], Endpoint]) -> None:
        super().__init__()
        self.rank, self.size, self.timeout_s = comm.Get_rank(), comm.Get_size(), timeout_s
        self._messages = Messages(endpoint(self))

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], *, tag: int) -> None:
        """All messages at once; see `Transport.exchange`."""
        self._messages.exchange(sends, recvs, tag=tag)
