"""Averages of weights on two levels: inside each node first, then among nodes.

    by_node(Decentralized("shift_one"))
    by_node(LowPrecisionDecentralized())
    by_node(every(4, Decentralized()))      inside each node in every step, among nodes in one of four
    every(4, by_node(Decentralized()))      both in one of four

A bucket is cut into L chunks, where L is the size of the smallest node; in each node, L ranks own one chunk each:

    y_n = mean over node n of x         reduce_scatter: an owner gets its chunk of y_n
    z = one step of `algorithm` on y    among the owners of the same chunk, one in each node
    x = z_n on all ranks of node n      allgather

So only one copy of the weights leaves a node, over the links of L ranks. Source: the hierarchical mode of Bagua,
Gan et al., arXiv 2107.01499, in which one rank of each node does what the owners do here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .. import arrays
from ..arrays import Array
from ..bucket import Bucket, BucketSpec, TensorSpec
from ..comm import Communicator
from ..errors import ArrayError
from ..transports.local import LocalTransport
from .base import (
    CHUNK,
    HOLD_HINT,
    TRANSIENT,
    Algorithm,
    Combinator,
    State,
    Window,
    check_algorithm_argument,
    core_of,
    runs_in_rounds,
)


class _NodeComms(NamedTuple):
    """Communicators of the two levels."""

    intra: Communicator
    """The ranks of this node."""
    across: Communicator
    """The owners of this rank's chunk, one in each node; a rank without a chunk is alone, with an empty one."""
    owners: int
    """Number of ranks of each node that own a chunk."""


@dataclass
class _State:
    """State of `ByNode`."""

    inner: State = field(metadata=CHUNK)
    chunk: Bucket = field(metadata=TRANSIENT)
    """The chunk of this rank: the mean of the node, then the result of `algorithm`."""
    result: Array = field(metadata=TRANSIENT)
    """All chunks of the node, and padding."""
    levels: _NodeComms = field(metadata=TRANSIENT)


@dataclass(frozen=True)
class ByNode(Combinator):
    """`algorithm` among nodes, on the mean of each node; see `by_node`."""

    algorithm: Algorithm

    def __post_init__(self) -> None:
        check_algorithm_argument("by_node", "algorithm", self.algorithm)
        for phase in self.algorithm.phases:
            if phase.payload != "weight":
                raise ArrayError(
                    f"by_node: {phase} exchanges gradients, expected an algorithm that exchanges weights; for "
                    "gradients, take Hierarchical(average)"
                )
            if does := _needs_whole_buckets(core_of(phase)):
                raise ArrayError(
                    f"by_node: {phase} {does}, but its state belongs to a chunk of the node's mean; "
                    "expected an algorithm that does not"
                )
            window = phase.window
            if isinstance(window, Window) and window.delay:
                raise ArrayError(
                    f"by_node: exchanges of {phase} outlive {window.delay} steps, and the mean of a node is made "
                    "in each; expected delay=0"
                )
        if runs_in_rounds(self.algorithm):
            raise ArrayError(
                f"by_node: no step waits for the rounds of {self.algorithm}, so the ranks of a node would not "
                "have the same weights; expected an algorithm with a window"
            )

    def __repr__(self) -> str:
        return f"by_node({self.algorithm!r})"

    @property
    def drifts(self) -> bool:
        """Whether weights differ between ranks under its algorithm."""
        return self.algorithm.drifts

    @property
    def weighs(self) -> bool:
        """Refused: the mean of a node is one of weights of the model."""
        return False

    def check_size(self, size: int) -> None:
        """Supports every number of ranks; `init` checks the number of nodes."""

    def init(self, bucket: Bucket, comm: Communicator) -> _State:
        """See `Algorithm.init`. Collective.

        Raises:
            ArrayError: Its algorithm does not support this number of nodes.
        """
        nodes, owners = len(comm.node_sizes), min(comm.node_sizes)
        if nodes > 1:
            self.algorithm.check_size(nodes)
        intra, across = comm.by_node()
        if intra.rank >= owners:
            across = Communicator([LocalTransport(timeout_s=comm.timeout_s)], device=comm.device)
        size = -(-bucket.flat.size // owners)
        mine = size if intra.rank < owners else 0
        spec = BucketSpec(bucket.spec.dtype, (TensorSpec("chunk", (mine,), bucket.spec.dtype),), mine)
        result = arrays.empty((owners * size,), bucket.flat.dtype, like=bucket.flat)
        flat = arrays.empty((mine,), bucket.flat.dtype, like=bucket.flat)
        chunk = Bucket(bucket.index, spec, flat, plan=bucket.plan)
        state = _State(None, chunk, result, _NodeComms(intra, across, owners))
        _reduce(bucket, comm, state)
        state.inner = self.algorithm.init(chunk, across)
        return state

    def hold(self, bucket: Bucket, state: _State) -> None:
        """Refused: addends are gradients, and weights are exchanged here."""
        raise ArrayError(f"hold: {self} keeps no addends; {HOLD_HINT} does")

    def begin(self, bucket: Bucket, state: _State) -> None:
        """Nothing: its algorithm begins on the lane, after the mean of the node is known."""

    def skip(self, bucket: Bucket, state: _State) -> None:
        """Nothing: algorithms with a `skip` are refused, since the mean of the node is not known then."""

    def exchange(self, bucket: Bucket, comm: Communicator, state: _State) -> None:
        """Average in the node, make a step of the algorithm among nodes, and gather its result. Collective."""
        intra, across, _ = state.levels
        chunk = state.chunk
        chunk.step = bucket.step
        _reduce(bucket, comm, state)
        self.algorithm.begin(chunk, state.inner)
        self.algorithm.exchange(chunk, across, state.inner)
        self.algorithm.commit(chunk, state.inner)
        intra.allgather(chunk.flat, state.result, counts=_counts(state))

    def commit(self, bucket: Bucket, state: _State) -> None:
        """x <- the result."""
        bucket.flat[...] = state.result[: bucket.flat.size]

    def restart(self, bucket: Bucket, state: _State) -> None:
        """Begin anew from the chunk of the weights, which all ranks of a node have."""
        intra, _, _ = state.levels
        state.result[: bucket.flat.size], state.result[bucket.flat.size :] = bucket.flat, 0
        first = intra.rank * state.chunk.flat.size  # 0 of a rank without a chunk
        state.chunk.flat[...] = state.result[first : first + state.chunk.flat.size]
        self.algorithm.restart(state.chunk, state.inner)


def _needs_whole_buckets(algorithm: Algorithm) -> str:
    """The work on the buckets of a rank beside their exchange, as text; "" for none."""
    if algorithm.lends:
        return "lends an array to optimizers"
    return "works in steps that communicate nothing" if algorithm.defines("skip") else ""


def _reduce(bucket: Bucket, comm: Communicator, state: _State) -> None:
    """Write this rank's chunk of the mean of the node to `state.chunk`. Collective."""
    flat = bucket.flat
    if flat.size < state.result.size:
        padded = comm.scratch.take("padded", state.result.shape, flat.dtype, like=flat)
        padded[: flat.size], padded[flat.size :] = flat, 0
        flat = padded
    state.levels.intra.reduce_scatter(flat, out=state.chunk.flat, op="avg", counts=_counts(state))


def _counts(state: _State) -> list[int]:
    """Number of elements that each rank of the node owns."""
    intra, _, owners = state.levels
    return [state.result.size // owners if rank < owners else 0 for rank in range(intra.size)]


def by_node(algorithm: Algorithm) -> ByNode:
    """Average weights inside each node, and communicate by `algorithm` among nodes, as if each were one rank.

    All ranks of a node get the same weights. Each node counts as one, whatever its number of ranks. On a single
    node this is the mean of its ranks. `Hierarchical` does the same for gradients.

    The state of the algorithm belongs to the chunk of a rank: a checkpoint loads on the same ranks of the same
    nodes, in the same buckets.

    Raises:
        ArrayError: `algorithm` is not an algorithm, exchanges gradients, begins its exchanges by time, lends
            an array to optimizers, or works in steps without communication; or, when training begins, it does
            not support this number of nodes.
    """
    return ByNode(algorithm)
