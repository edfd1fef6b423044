"""Averages of weights with neighbours through a codec: ranks send the difference to what their peers have.

Every rank keeps replicas: copies of the weights as its peers have them. All ranks that hold the same replica
change it by the same decoded bytes, so that it stays equal on them, bit for bit. Only the difference to the
replica is quantized, and it is small.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .. import arrays, kernels, topology
from ..arrays import Array
from ..averages.coded import next_draws
from ..bucket import Bucket
from ..codecs import Codec, MinMaxUInt8
from ..codecs.base import check_codec_argument
from ..comm import Communicator
from ..transports.labels import UNLABELLED
from .base import RECREATED, TRANSIENT, Algorithm, Point, Window


@dataclass(frozen=True)
class _LowPrecision(Algorithm):
    """Base class of both algorithms: settings, window, checks."""

    codec: Codec = field(default_factory=MinMaxUInt8)

    payload = "weight"
    window = Window(Point.STEP, Point.FORWARD)

    def __post_init__(self) -> None:
        check_codec_argument(type(self).__name__, self.codec)

    def check(self, dtype: str) -> None:
        """Supports the dtypes of the codec."""
        check_codec_argument(type(self).__name__, self.codec, dtype)

    def _wire(self, bucket: Bucket, comm: Communicator, key: str) -> Array:
        """Scratch memory for one encoded bucket, (1, w)."""
        shape = (1, self.codec.wire_nbytes(bucket.flat.size, bucket.flat.dtype))
        return comm.scratch.take(key, shape, "uint8", like=bucket.flat)

    def _add_decoded(self, wire: Array, replica: Array, bucket: Bucket, comm: Communicator) -> None:
        """replica += decode(wire), by the same arithmetic on all ranks that hold this replica."""
        decoded = comm.scratch.take("decoded", (1, replica.size), replica.dtype, like=replica)
        self.codec.decode(wire, decoded)
        kernels.of(replica).add(replica, decoded[0], out=replica)
        bucket.clear_padding(replica)


@dataclass
class Replicas:
    """State of `LowPrecisionDecentralized`: on every rank r, weight(r) = right(r - 1) = left(r + 1)."""

    weight: Array = field(metadata=RECREATED)
    left: Array = field(metadata=RECREATED)
    right: Array = field(metadata=RECREATED)


@dataclass(frozen=True)
class LowPrecisionDecentralized(_LowPrecision):
    """Average weights with both neighbours on a ring: every rank sends them the quantized change of its weights.

    With w the replica of this rank's weights, L and R those of its neighbours', and x the weights that the
    optimizer made from w:

        c = encode(x + L/3 + R/3 - 5w/3)        sent to both neighbours
        w += decode(c)      L += decode(c of the left)      R += decode(c of the right)

    With Q for encoding and decoding, this is w <- w + Q[(L + R - 2w)/3 + (x - w)]. Every rank sends about two
    bytes for each weight. Weights differ between ranks; average them before evaluation.

    Source: DCD-PSGD, Tang et al., "Communication Compression for Decentralized Training", arXiv 1803.06443, in
    the form of Bagua (arXiv 2107.01499).

    Args:
        codec: The encoding of the changes.
    """

    def init(self, bucket: Bucket, comm: Communicator) -> Replicas:
        """See `Algorithm.init`. Collective."""
        weight = bucket.flat.copy()
        left, right = topology.ring(comm.rank, comm.size)
        state = Replicas(weight, arrays.empty_like(weight), arrays.empty_like(weight))
        _exchange_on_ring(comm, weight, state.left, state.right, left, right)
        return state

    def exchange(self, bucket: Bucket, comm: Communicator, state: Replicas) -> None:
        """Send the quantized change of the weights, and update all three replicas. Collective."""
        left, right = topology.ring(comm.rank, comm.size)
        delta = comm.scratch.take("delta", (1, bucket.flat.size), bucket.flat.dtype, like=bucket.flat)
        kernels.of(delta).ring_difference(bucket.flat, state.left, state.right, state.weight, out=delta[0])
        mine, from_left, from_right = (self._wire(bucket, comm, key) for key in ("mine", "left", "right"))
        self.codec.encode(delta, mine, draws=next_draws(comm, self.codec.random_seed))
        _exchange_on_ring(comm, mine, from_left, from_right, left, right)
        self._add_decoded(mine, state.weight, bucket, comm)
        self._add_decoded(from_left, state.left, bucket, comm)
        self._add_decoded(from_right, state.right, bucket, comm)

    def commit(self, bucket: Bucket, state: Replicas) -> None:
        """x <- w."""
        bucket.flat[...] = state.weight

    def restart(self, bucket: Bucket, state: Replicas) -> None:
        """w, L, R <- x: all ranks have the same weights now."""
        for replica in (state.weight, state.left, state.right):
            replica[...] = bucket.flat


@dataclass
class EdgeReplicas:
    """State of `LowPrecisionOnePeer` for each edge k: sent[k] on rank r equals received[k] on rank r + 2^k."""

    sent: Array = field(metadata=RECREATED)
    """(edges, elements): the weights of this rank as the peer ahead has them."""
    received: Array = field(metadata=RECREATED)
    """(edges, elements): the weights of the peer behind as this rank has them."""
    weight: Array = field(metadata=TRANSIENT)
    round: int = 0


@dataclass(frozen=True)
class LowPrecisionOnePeer(_LowPrecision):
    """Average weights with one peer at a time on the exponential graph, sending quantized differences.

    In round s ranks use edge k = s mod ceil(log2 p): rank r sends to r + 2^k and receives from r - 2^k. With S[k]
    the weights of this rank as the peer ahead has them, R[k] those of the peer behind as this rank has them, and
    x the weights:

        c = encode(x - S[k])      S[k] += decode(c)      R[k] += decode(c received)      x += (R[k] - S[k]) / 2

    R on one rank is S on another, so the sum of the weights over all ranks does not change. Every rank sends
    about one byte for each weight, half as much as `LowPrecisionDecentralized`, and keeps 2 ceil(log2 p)
    replicas. Weights differ between ranks; average them before evaluation.

    Source: the difference compression of CHOCO-Gossip, Koloskova et al., arXiv 1902.00340, on the one-peer
    exponential graph of Ying et al., arXiv 2110.13363.

    Args:
        codec: The encoding of the differences.
    """

    def init(self, bucket: Bucket, comm: Communicator) -> EdgeReplicas:
        """See `Algorithm.init`. Collective."""
        x, edges = bucket.flat, _edges(comm.size)
        sent, received = (arrays.empty((edges, x.size), x.dtype, like=x) for _ in range(2))
        sent[...] = received[...] = x
        state = EdgeReplicas(sent, received, weight=x.copy())
        for k in range(edges):
            dest, source = topology.one_peer_exponential(comm.rank, comm.size, k)
            comm.sendrecv(x, state.received[k], dest=dest, source=source, tag=UNLABELLED)
        return state

    def exchange(self, bucket: Bucket, comm: Communicator, state: EdgeReplicas) -> None:
        """Update the replicas of one edge, and compute the new weights. Collective."""
        round_, state.round = state.round, state.round + 1  # also alone: nodes may differ in size later
        if comm.size == 1:
            state.weight[...] = bucket.flat
            return
        x, k = bucket.flat, round_ % _edges(comm.size)
        dest, source = topology.one_peer_exponential(comm.rank, comm.size, round_)
        sent, received = state.sent[k], state.received[k]
        delta = comm.scratch.take("delta", (1, x.size), x.dtype, like=x)
        kernels.of(x).subtract(x, sent, out=delta[0])
        mine, theirs = self._wire(bucket, comm, "mine"), self._wire(bucket, comm, "theirs")
        self.codec.encode(delta, mine, draws=next_draws(comm, self.codec.random_seed))
        comm.sendrecv(mine, theirs, dest=dest, source=source, tag=UNLABELLED)
        self._add_decoded(mine, sent, bucket, comm)
        self._add_decoded(theirs, received, bucket, comm)
        kernels.of(x).move_half(x, received, sent, out=state.weight)

    def commit(self, bucket: Bucket, state: EdgeReplicas) -> None:
        """x <- the new weights."""
        bucket.flat[...] = state.weight

    def restart(self, bucket: Bucket, state: EdgeReplicas) -> None:
        """S[k], R[k] <- x: all ranks have the same weights now."""
        state.sent[...] = state.received[...] = bucket.flat


def _exchange_on_ring(
    comm: Communicator, mine: Array, from_left: Array, from_right: Array, left: int, right: int
) -> None:
    """Exchange with both neighbours. With two ranks they are one peer, and messages match in order."""
    sends = [(right, mine, UNLABELLED), (left, mine, UNLABELLED)]
    comm.exchange(sends, [(left, from_left, UNLABELLED), (right, from_right, UNLABELLED)])


def _edges(size: int) -> int:
    """Number of edges into a rank on the one-peer exponential graph: ceil(log2 size)."""
    return (size - 1).bit_length()
