"""A transport without peers: it records which messages a rank sends and receives, and with whom.

All calls are made by the code that trains: `Communicator`, and the collectives that `transports` derives from
exchanges, with the sizes of pieces that the transport over MPI chooses. Over NCCL, reductions and gathers are
NCCL's own, along rings.

Values do not move. Small arrays with values, by which ranks agree on settings, have the result that they have if
all ranks give the same.

A `Program` is what a rank does: its training thread and its lane in each step, with sizes and without times.
`tracing` records it from the code that trains; `replay` runs it on all ranks. Operations are tuples, whose
first element is one of these words:

    compute, seconds              the model computes
    work, rate, bytes             arithmetic or a copy; see `shapes.Rate`
    submit, task                  the training thread gives a task to the lane
    wait, task                    it waits for the end of a task
    begin, exchange               the lane begins an exchange of messages
    end, exchange                 it waits for the end of one
    step                          a training step ends
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from ...arrays import Array
from ...comm import Communicator
from ...comm.communicator import Nodes
from ...trace import NULL
from ...transports.base import Transport
from ...transports.flow import POINT_TO_POINT, Flow, Message, TransportFlow, Wait
from ...transports.mpi import tuning
from ..costmodel import Cluster
from .shapes import Rate, Shapes

Op: TypeAlias = "tuple[Any, ...]"

Group: TypeAlias = Literal["all", "inside", "across"]
"""Ranks that exchange with each other: all, those of a node, or one of each node."""


class Exchange(NamedTuple):
    """Messages that a rank of each group sends and receives at once."""

    group: Group
    peers: tuple[int, ...] | None
    """Offsets of the ranks whose messages it waits for, in its group; None for all of them."""
    inside_bytes: float
    """Bytes that the rank sends within its node."""
    node_bytes: float
    """Bytes that the ranks of a node send to other nodes together."""
    pairs: float
    """Pairs of ranks on a node and elsewhere that share its link."""
    messages: int
    """Messages that a rank sends, and that it receives."""
    hops: int = 1
    """Messages that follow one another."""
    is_ring: bool = False
    """Whether bytes pass from rank to rank, so that the share of the line rate of a ring is reached."""
    is_whole: bool = False
    """Whether long messages are sent at once, in place of in pieces."""
    wire_bytes: float = 0.0
    """Bytes that the rank sends."""


@dataclass
class Program:
    """The work of a rank in some steps of training, after its state has been made."""

    trainer: list[Op] = field(default_factory=list)
    tasks: list[list[Op]] = field(default_factory=list)
    """The operations of the lane, by task."""
    exchanges: list[Exchange] = field(default_factory=list)
    steps: int = 0
    interval_s: float | None = None
    """If exchanges run in rounds, for which no step waits: the least time between two rounds."""


class Recorder:
    """Records the operations of one rank into a program.

    Args:
        cluster: The ranks and nodes.
        ring: Whether reductions and gathers pass along rings; see `SimulatedTransport`.
    """

    def __init__(self, cluster: Cluster, *, ring: Literal["nccl", "gloo"] | None) -> None:
        self.cluster, self.ring, self.program = cluster, ring, Program()
        self.ops: list[Op] | None = None
        """Where operations are added; None while nothing is recorded."""

    def note(self, rate: Rate, nbytes: float) -> None:
        """Record work."""
        if self.ops is not None:
            last = self.ops[-1] if self.ops else ()
            if last[:2] == ("work", rate):
                self.ops[-1] = ("work", rate, last[2] + nbytes)
            else:
                self.ops.append(("work", rate, nbytes))

    def begin(self, exchange: Exchange) -> Wait:
        """Record the beginning of an exchange; the result records its end."""
        if self.ops is None:
            return lambda: None
        ops, number = self.ops, len(self.program.exchanges)
        self.program.exchanges.append(exchange)
        ops.append(("begin", number))
        return lambda: ops.append(("end", number))


class SimulatedTransport(Transport):
    """The transport of rank 0 of its node and job, to the ranks of a group.

    Args:
        recorder: Records exchanges.
        group: Which ranks of the cluster are in it.
    """

    name = "simulated"

    def __init__(self, recorder: Recorder, group: Group = "all") -> None:
        super().__init__()
        self.recorder, self.group = recorder, group
        c = recorder.cluster
        self.rank, self.timeout_s = 0, 60.0
        self.size = {"all": c.size, "inside": c.ranks_per_node, "across": c.nodes}[group]
        leaves_node = c.nodes > 1 and group != "inside"
        if leaves_node and recorder.ring is None:
            self.quantize_bytes = tuning.QUANTIZE_BYTES
        self._is_fast = not leaves_node or c.bandwidth_gbit / 8e-9 / c.ranks_per_node > tuning.FAST_BYTES_S

    # The contract of transports -------------------------------------------------------------------------

    def moves(self, x: Array) -> bool:
        """All arrays."""
        return True

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], *, tag: int = POINT_TO_POINT) -> None:
        """See `Transport.exchange`."""
        self.begin(sends, recvs, whole=True)()

    def label_carrier(self) -> Transport | None:
        """See `Transport.label_carrier`. Labels are part of the messages, and few of their bytes."""
        return None

    def split(self, color: int, key: int) -> Transport:
        """Not needed: `SimulatedCommunicator.by_node` knows both groups."""
        raise NotImplementedError

    def abort(self, exit_code: int = 1) -> None:
        """Nothing: there are no other ranks."""

    def agree_on_call(self, call: str, x: Array, *, by_messages: bool = False) -> Flow:
        """See `Transport.agree_on_call`: over MPI the ranks compare four numbers, unless they follow a plan."""
        if self.recorder.ring is None and not (by_messages and self._is_between_nodes()):
            self._agree(32)
        return _RecordedFlow(self, self._piece_bytes(x.nbytes, tuning.FAST_PIECE_BYTES, tuning.PACED_BYTES))

    def coded_piece_bytes(self, nbytes: int) -> int | None:
        """See `Transport.coded_piece_bytes`."""
        return self._piece_bytes(nbytes, tuning.FAST_CODED_PIECE_BYTES, tuning.PACED_CODED_BYTES)

    def _piece_bytes(self, nbytes: int, fast: int, paced: int) -> int | None:
        if self.recorder.ring is not None:
            return None
        return fast if self._is_fast else tuning.paced_bytes(nbytes, paced)

    def allreduce(self, x: Array, out: Array, op: str) -> None:
        """See `Transport.allreduce`."""
        if not isinstance(x, Shapes):
            self._agree(x.nbytes)
            out[...] = x * self.size if op == "sum" else x
        elif self.recorder.ring and self.size > 1:
            self._ring(x.nbytes)()
            self.recorder.note("add", x.nbytes)
            self._ring(x.nbytes)()
        else:
            super().allreduce(x, out, op)

    def allgather(self, x: Array, out: Array) -> None:
        """See `Transport.allgather`."""
        if not isinstance(x, Shapes):
            self._agree(x.nbytes * self.size)
            out.reshape(self.size, -1)[...] = x.reshape(-1)
        elif self.recorder.ring and self.size > 1:
            self._ring(out.nbytes)()
        else:
            super().allgather(x, out)

    def reduce_scatter(self, x: Array, out: Array, op: str) -> None:
        """See `Transport.reduce_scatter`."""
        if self.recorder.ring and self.size > 1:
            self._ring(x.nbytes)()
            self.recorder.note("add", x.nbytes)
        else:
            super().reduce_scatter(x, out, op)

    def broadcast(self, x: Array, root: int) -> None:
        """Nothing moves: only small arrays with values are broadcast."""
        self._agree(x.nbytes)

    # What is recorded -----------------------------------------------------------------------------------

    def begin(self, sends: Sequence[Message], recvs: Sequence[Message], *, whole: bool = False) -> Wait:
        """Record the beginning of an exchange; the result records its end."""
        sends = [(peer, x) for peer, x in sends if peer != self.rank]
        if not sends and not [peer for peer, _ in recvs if peer != self.rank]:
            return lambda: None
        self.sent_bytes += sum(x.nbytes for _, x in sends)
        is_long = any(x.nbytes > tuning.LONG_PIECE_BYTES for _, x in sends)
        is_whole = whole and is_long and self.recorder.ring is None
        return self.recorder.begin(self._exchange(sends, [peer for peer, _ in recvs], is_whole))

    def _exchange(self, sends: Sequence[Message], sources: Sequence[int], is_whole: bool) -> Exchange:
        c, size = self.recorder.cluster, self.size
        k = c.ranks_per_node
        inside = node = pairs = 0.0
        per_peer: dict[int, float] = {}
        for peer, x in sends:
            per_peer[peer] = per_peer.get(peer, 0.0) + x.nbytes
        if self.group == "all" and len(per_peer) < size - 1:  # few: where the peers of a node's other ranks are
            for peer, nbytes in per_peer.items():
                leaving = sum((local + peer) % size >= k for local in range(k)) if c.nodes > 1 else 0
                node, pairs = node + leaving * nbytes, pairs + leaving
                inside = max(inside, nbytes) if leaving < k else inside
        else:
            for peer, nbytes in per_peer.items():
                if self.group == "across" or (self.group == "all" and peer >= k):
                    node, pairs = node + k * nbytes, pairs + k
                else:
                    inside += nbytes
        peers = None if len(set(sources)) >= size - 1 and size > 2 else tuple(sources)
        return Exchange(
            self.group,
            peers,
            inside,
            node,
            pairs,
            len(sends),
            is_whole=is_whole,
            wire_bytes=sum(per_peer.values()),
        )

    def _agree(self, nbytes: int) -> None:
        """Record a collective of MPI on few bytes."""
        if self.size > 1:
            hops = max(1, math.ceil(math.log2(self.size)))
            k = self.recorder.cluster.ranks_per_node
            sent = float(nbytes) * k * self._is_between_nodes()
            self.recorder.begin(Exchange(self.group, None, 0.0, sent, k, hops, hops))()

    def _is_between_nodes(self) -> bool:
        return self.group == "across" or (self.group == "all" and self.recorder.cluster.nodes > 1)

    def _ring(self, nbytes: int) -> Wait:
        """Record that all but one of p chunks pass from each rank to the next one."""
        c, p = self.recorder.cluster, self.size
        sent = nbytes * (p - 1) / p
        self.sent_bytes += int(sent)
        on_node = {"all": min(c.ranks_per_node, p), "inside": p, "across": 1}[self.group]
        leaves = p > on_node
        hops = math.ceil(math.log2(p)) if self.recorder.ring == "nccl" else p - 1
        pairs = c.ranks_per_node / on_node
        node = sent * pairs if leaves else 0.0  # a ring leaves each node once
        inside = sent if on_node > 1 else 0.0
        return self.recorder.begin(
            Exchange(self.group, None, inside, node, pairs, hops, hops, is_ring=True, wire_bytes=sent)
        )


class _RecordedFlow(TransportFlow):
    """The exchanges of one collective call, which are recorded."""

    transport: SimulatedTransport

    def begin(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Wait:
        """See `Flow.begin`."""
        return self.transport.begin(sends, recvs)


class SimulatedCommunicator(Communicator):
    """The communicator of rank 0, which records what it sends."""

    def __init__(self, recorder: Recorder, group: Group = "all") -> None:
        c = recorder.cluster
        transport = SimulatedTransport(recorder, group)
        labels: dict[str, list[int]] = {
            "all": [rank // c.ranks_per_node for rank in range(c.size)],
            "inside": [0] * c.ranks_per_node,
            "across": list(range(c.nodes)),
        }
        super().__init__([transport], nodes=labels[group], tracer=NULL)
        self._recorder, self._levels = recorder, None

    def by_node(self) -> Nodes:
        """See `Communicator.by_node`."""
        if self._nodes is None:
            intra, inter = (SimulatedCommunicator(self._recorder, group) for group in ("inside", "across"))
            intra.counters = inter.counters = self.counters
            intra.context = inter.context = self.context
            self._nodes = Nodes(intra, inter)
        return self._nodes
