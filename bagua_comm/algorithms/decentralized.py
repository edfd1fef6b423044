"""Averages of weights, in full precision, during the forward and the backward pass.

    x_{t+1,i} = average_i(x_t) - lr g_i(x_{t,i})

The average is that of the weights at the beginning of the step. It replaces them when the backward pass has
ended. Then the optimizer subtracts the gradient, which was computed with the weights before the average.
Source: D-PSGD, Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", arXiv 1705.09056.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .. import kernels, topology
from ..arrays import Array
from ..bucket import Bucket
from ..comm import Communicator
from ..errors import ArrayError
from ..transports.labels import UNLABELLED
from .base import TRANSIENT, Algorithm, Point, Window, check_floating

PEERS = ("all", "shift_one", "one_peer_exponential")


@dataclass
class Averaged:
    """State of `Decentralized`."""

    average: Array = field(metadata=TRANSIENT)
    round: int = 0
    """Number of times that this bucket was averaged."""


@dataclass(frozen=True)
class Decentralized(Algorithm):
    """Average weights with peers during the forward and backward pass, instead of gradients.

    Weights differ between ranks, because each rank adds its own gradient to the average; average them before
    evaluation. A message is as large as the weights.

    Args:
        peers: "all": the mean over all ranks. "shift_one": the mean with one peer from the other half of the
            ranks, a different one in each round; the number of ranks must be even. "one_peer_exponential": the
            mean with the rank 2^k behind, for k = 0, 1, ... in turn (arXiv 2110.13363); if the number of ranks p
            is a power of two, log2 p rounds give the mean over all ranks.

    Raises:
        ArrayError: `peers` is something else; or, when training begins, it is "shift_one" and the number of ranks
            is odd.
    """

    peers: Literal["all", "shift_one", "one_peer_exponential"] = "all"

    payload = "weight"
    window = Window(Point.FORWARD, Point.BACKWARD)

    def __post_init__(self) -> None:
        if self.peers not in PEERS:
            raise ArrayError(f"Decentralized: peers is {self.peers!r}, expected one of {', '.join(PEERS)}")

    def check(self, dtype: str) -> None:
        """Supports floating-point dtypes."""
        check_floating(self, dtype)

    def check_size(self, size: int) -> None:
        """Supports only even numbers of ranks with "shift_one"."""
        if self.peers == "shift_one":
            topology.shift_one(0, size, 0)  # raises on an odd number

    def init(self, bucket: Bucket, comm: Communicator) -> Averaged:
        """See `Algorithm.init`. Collective."""
        return Averaged(bucket.flat.copy())

    def exchange(self, bucket: Bucket, comm: Communicator, state: Averaged) -> None:
        """Write the average of the weights to `state.average`; the weights stay as they are. Collective."""
        x, average, s = bucket.flat, state.average, state.round
        if self.peers == "all" or comm.size == 1:
            comm.allreduce(x, out=average, op="avg")
        else:
            if self.peers == "shift_one":
                dest = source = topology.shift_one(comm.rank, comm.size, s)
            else:
                dest, source = topology.one_peer_exponential(comm.rank, comm.size, s)
            comm.sendrecv(x, average, dest=dest, source=source, tag=UNLABELLED)
            kernels.of(x).midpoint(x, average, out=average)
        state.round += 1

    def commit(self, bucket: Bucket, state: Averaged) -> None:
        """x <- average."""
        bucket.flat[...] = state.average
