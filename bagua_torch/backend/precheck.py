"""`precheck`: compare all calls of a step between the ranks.

Each rank records the calls that it makes in the block: the text of each collective call, and how many messages it
sends to each rank and receives; those of process groups by dtype, size and tag. The records are compared at the
end by a replay, in which a call ends when all ranks of its communicator have come to it. Calls of the program
are one sequence, in any communicator. Those of a lane are a sequence of their own, since lanes run beside the
program.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import get_ident
from typing import NamedTuple, TypeAlias

import numpy as np

from bagua_comm import BaguaError, CommAborted, CommError, CommMismatch, Communicator
from bagua_comm.arrays import text_row, texts_of
from bagua_comm.comm.prepared import signature
from bagua_comm.execution.lane import Lane
from bagua_comm.flight.entries import is_of
from bagua_comm.flight.recorder import HEAD, NUMBER
from bagua_comm.hooks import CallView
from bagua_comm.launch.cli import count
from bagua_comm.transports.plan import MAX_CALLS

from ..entry import communicator_of
from .messages import observers

_TEXT_BYTES = 256
"""The size of the message of a rank whose block has ended: the text of the exception that has ended it, or ""."""

_SIZED = {"allgather", "allreduce", "alltoall", "broadcast", "reduce_scatter"}
"""Calls with arrays of one size on all ranks, unless they have counts."""


class _Step(NamedTuple):
    """A collective call in the block, the same on all its ranks."""

    group: str
    ranks: tuple[int, ...]
    """The ranks of the communicator, in the world."""
    text: str


class _Message(NamedTuple):
    """A message from one rank to another, which are ranks of the world."""

    group: str
    source: int
    dest: int
    text: str = ""
    """Dtype, size and tag of a message of a process group. Receives of communicators compare those themselves."""


_Ordered: TypeAlias = tuple[str, int, int, int]
"""Messages of a process group that arrive in order: the group, the ranks of the world, and the tag."""


@dataclass
class _Record:
    """The calls of one rank in the block."""

    sequences: dict[str, list[_Step]] = field(default_factory=lambda: defaultdict(list))
    """The collective calls of the program, by "", and of each lane, by its communicator."""
    sent: Counter[_Message] = field(default_factory=Counter)
    received: Counter[_Message] = field(default_factory=Counter)
    order_sent: dict[_Ordered, int] = field(default_factory=dict)
    """Checksums of the dtypes and sizes of messages that are in order."""
    order_received: dict[_Ordered, int] = field(default_factory=dict)
    unknown: set[tuple[str, int]] = field(default_factory=set)
    """Communicators in which a call of this rank does not name its peers, and the rank."""
    plans: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By communicator: the calls that become its plan if all its ranks have made them."""


class _Watch:
    """Records the calls of this rank: a hook of its communicator.

    Args:
        comm: The communicator of the block.
        own: The group of the one derived from it whose calls are no part of the block.
    """

    def __init__(self, comm: Communicator, own: str) -> None:
        self._of, self._own, self._flight, self._thread = comm.group, own, comm.flight, get_ident()
        self._calls: list[tuple[int, _Step]] = []
        self._record = _Record()
        self._noted = {group: plan.noted for group, plan in self._flight.plans.items()}

    def __call__(self, view: CallView) -> None:
        """Record a call."""
        group, ranks, peers = view.group, self._flight.groups[view.group], view.detail
        if group == self._own:
            return
        if view.collective:
            call, ring = (group, True, view.name), reversed(tuple(self._flight.ring))
            head = next(each[HEAD] for each in ring if (each[HEAD][:3], each[NUMBER]) == (call, view.number))
            text = signature(head)
            if view.name in _SIZED and "counts" not in peers:
                text += f" of {np.prod(head[4], dtype=int)} elements"
            self._calls.append((get_ident(), _Step(group, ranks, text)))
            return
        mine = ranks[view.comm.rank]
        if peers.get("dest") is not None:
            self._record.sent[_Message(group, mine, ranks[peers["dest"]])] += 1
        if peers.get("source") is not None:
            self._record.received[_Message(group, ranks[peers["source"]], mine)] += 1
        if not {"dest", "source"} & peers.keys():
            self._record.unknown.add((group, mine))

    def message(self, comm: Communicator, call: str, peers: Sequence[int], tag: int, text: str) -> None:
        """Record a message of a process group; see `messages.observers`."""
        if is_of(comm.group, self._of):
            mine, other, *rest = (self._flight.groups[comm.group][rank] for rank in (comm.rank, *peers))
            if rest:
                self._record.unknown.add((comm.group, mine))
                return
            source, dest = (mine, other) if call == "send" else (other, mine)
            found, order = self._record.received, self._record.order_received
            if call == "send":
                found, order = self._record.sent, self._record.order_sent
            found[_Message(comm.group, source, dest, f"{text} with tag {tag}")] += 1
            key = comm.group, source, dest, tag
            order[key] = zlib.crc32(text.encode(), order.get(key, 0))

    def record(self) -> _Record:
        """Return the record; waits for the tasks of lanes."""
        lanes = [lane for lane in tuple(self._flight.lanes) if isinstance(lane, Lane)]
        for lane in lanes:
            lane.drain()
        beside = {lane.comm.group for lane in lanes}
        beside |= {step.group for thread, step in self._calls if thread != self._thread}
        for _, step in self._calls:
            self._record.sequences[step.group if step.group in beside else ""].append(step)
        for group, plan in tuple(self._flight.plans.items()):
            count = plan.noted - self._noted.get(group, 0)
            is_seen = is_of(group, self._of) and group != self._own
            if is_seen and 0 < count <= MAX_CALLS and not plan.in_force:
                self._record.plans[group] = plan.latest(count)
        return self._record


def _difference(records: Mapping[int, _Record]) -> str:
    """What differs between the records, by rank; "" if nothing does."""
    left = [(rank, deque(steps)) for rank, each in records.items() for steps in each.sequences.values()]
    while left:
        arrived: dict[_Step, list[deque[_Step]]] = defaultdict(list)
        for _, steps in left:
            arrived[steps[0]].append(steps)
        ended = [steps for step, those in arrived.items() if len(those) == len(step.ranks) for steps in those]
        if not ended:
            waiting = {rank: f"called {steps[0].text} in {steps[0].group}" for rank, steps in reversed(left)}
            ranks = left[0][1][0].ranks
            return ", ".join(f"rank {rank} {waiting.get(rank, 'made no other call')}" for rank in ranks)
        for steps in ended:
            steps.popleft()
        left = [each for each in left if each[1]]
    return _messages_that_differ(records.values())


def _messages_that_differ(records: Collection[_Record]) -> str:
    """Those from one rank to another of which not as many were received as sent; "" if there are none."""
    sent, received = Counter[_Message](), Counter[_Message]()
    for each in records:
        sent.update(each.sent)
        received.update(each.received)
    unknown = {of for each in records for of in each.unknown}
    found: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    for message in {**sent, **received}:
        group, source, dest, text = message
        if sent[message] != received[message] and not {(group, source), (group, dest)} & unknown:
            messages = count(sent[message], "message") + (f" of {text}" if text else "")
            found[group, source, dest].append(
                f"rank {source} sent {messages} to rank {dest} in {group}, which received {received[message]}"
            )
    if found:
        return ", ".join(next(iter(found.values())))
    received_as = {key: order for each in records for key, order in each.order_received.items()}
    for (group, source, dest, tag), order in [item for each in records for item in each.order_sent.items()]:
        if received_as.get((group, source, dest, tag), order) != order:
            return (
                f"rank {dest} receives the messages with tag {tag} from rank {source} in {group} in another "
                "order of dtypes and sizes than they are sent"
            )
    return ""


@contextmanager
def precheck(comm: Communicator | None = None) -> Iterator[None]:
    """Compare all calls that the ranks make in a `with` block, such as a step of training; raise if they differ.

    Collective. All ranks compare the calls of the block at its end: those of `comm`, and of all communicators and
    process groups that were made from it. It also finds what no comparison of single calls does: calls of several
    communicators in another order, and messages that no rank receives, also those of `dist.send`. Calls that are
    compared anyway raise at once, as outside of the block. Where calls follow agreed plans, those of the block
    become the plan: the next step begins without comparisons.

    An exception leaves the block of its rank at once; ranks that have come to the end of theirs then raise, too.

    Args:
        comm: The communicator; the default one if None.

    Raises:
        CommAborted: On another rank, the block ended by an exception.
        CommError: This block is inside of another one.
        CommMismatch: The calls differ. Names the first such call of each rank.
    """
    comm = communicator_of("precheck", comm)
    if comm.flight in observers:
        raise CommError("precheck: this block is inside of another one; use one around the whole step")
    beside = comm.dup()
    watch = _Watch(comm, beside.group)
    hook = comm.on(before=watch)
    observers[comm.flight] = watch.message
    try:
        yield
        _wait_for_all(beside)
        record = watch.record()
    except BaseException as exc:
        with suppress(BaguaError):  # if the connections are closed, the other ranks know
            _notify(beside, f"{type(exc).__name__}: {exc}")
        raise
    finally:
        hook.remove()
        observers.pop(comm.flight, None)
    members: Mapping[str, tuple[int, ...]] = comm.flight.groups
    records: dict[int, _Record] = dict(zip(members[beside.group], beside.allgather_object(record), strict=True))
    beside.close()
    if found := _difference(records):
        raise CommMismatch(f"precheck: the calls of the ranks differ: {found}")
    for group, calls in record.plans.items():
        if all(records[rank].plans.get(group) == calls for rank in members[group]):
            comm.flight.plans[group].adopt(calls)


def _notify(comm: Communicator, text: str) -> None:
    for peer in comm.host.others():
        comm.send(text_row(text, _TEXT_BYTES), dest=peer)


def _wait_for_all(comm: Communicator) -> None:
    """Wait until all ranks have come to the end of the block; raise if one has left it. Collective.

    A rank that has left it makes no further call, so that these are messages.
    """
    _notify(comm, "")
    missing, row = comm.host.others(), np.empty(_TEXT_BYTES, np.uint8)
    while missing:
        missing.remove(rank := comm.recv_any(row, sources=missing))
        if row.any():
            (text,) = texts_of(row[None])
            raise CommAborted(f"precheck: on rank {rank}, the block ended by an exception, {text}")
