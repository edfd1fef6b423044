"""Averaging weights, in full precision, while the forward and the backward pass run.

    x_{t+1,i} = average_i(x_t) - lr g_i(x_{t,i})

The average is taken of the weights that the step begins with, and takes their place when the backward pass
has ended; then the optimizer subtracts the gradient, which was taken at the un-averaged weights.
Source: D-PSGD, Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", arXiv 1705.09056.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from .. import kernels, topology
from ..arrays import Array
from ..bucket import Bucket
from ..comm import Communicator
from ..errors import ArrayError
from .base import TRANSIENT, Payload, Point, Window, check_floating

PEERS = ("all", "shift_one", "one_peer_exponential")


@dataclass
class Averaged:
    """What `Decentralized` keeps."""

    average: Array = field(metadata=TRANSIENT)
    round: int = 0
    """How often this bucket was averaged."""


@dataclass(frozen=True)
class Decentralized:
    """Average weights with peers during the forward and backward pass, in place of gradients.

    Ranks' weights differ, but for `peers="all"` without gradients; average them before evaluation.
    A message is as large as the weights.

    Args:
        peers: "all": the mean over all ranks. "shift_one": the mean with one peer of the other half of the
            ranks, another one each time (an even number of ranks). "one_peer_exponential": the mean with the
            rank 2^k behind, k = 0, 1, ... in turn (arXiv 2110.13363); over log2 p rounds of a power of two p,
            that is the mean of all.

    Raises:
        ArrayError: `peers` is something else; or, when training begins, "shift_one" on an odd number of ranks.
    """

    peers: Literal["all", "shift_one", "one_peer_exponential"] = "all"

    payload: ClassVar[Payload] = "weight"
    window: ClassVar[Window] = Window(Point.FORWARD, Point.BACKWARD)

    def __post_init__(self) -> None:
        if self.peers not in PEERS:
            raise ArrayError(f"Decentralized: peers is {self.peers!r}, expected one of {', '.join(PEERS)}")

    def check(self, dtype: str) -> None:
        """Floating-point dtypes."""
        check_floating(self, dtype)

    def check_size(self, size: int) -> None:
        """An even number of ranks for "shift_one"."""
        if self.peers == "shift_one":
            topology.shift_one(0, size, 0)  # raises on an odd number

    def init(self, bucket: Bucket, comm: Communicator) -> Averaged:
        """See `Algorithm.init`. Collective."""
        return Averaged(bucket.flat.copy())

    def exchange(self, bucket: Bucket, comm: Communicator, state: Averaged) -> None:
        """Average the weights into `state.average`; they themselves stay. Collective."""
        x, average, s = bucket.flat, state.average, state.round
        if self.peers == "all":
            comm.allreduce(x, out=average, op="avg")
        else:
            if self.peers == "shift_one":
                dest = source = topology.shift_one(comm.rank, comm.size, s)
            else:
                dest, source = topology.one_peer_exponential(comm.rank, comm.size, s)
            comm.sendrecv(x, average, dest=dest, source=source)
            kernels.of(x).midpoint(x, average, out=average)
        state.round += 1

    def commit(self, bucket: Bucket, state: Averaged) -> None:
        """x <- average."""
        bucket.flat[...] = state.average
