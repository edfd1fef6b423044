"""The program of a rank: what its training thread and its lane do in each step, with sizes and without times.

`tracing` records a program from the code that trains; `replay` runs it on all ranks. Operations are tuples, whose
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

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

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
    """What a rank does in some steps of training, after its state has been made."""

    trainer: list[Op] = field(default_factory=list)
    tasks: list[list[Op]] = field(default_factory=list)
    """The operations of the lane, by task."""
    exchanges: list[Exchange] = field(default_factory=list)
    steps: int = 0
    interval_s: float | None = None
    """If exchanges run in rounds, for which no step waits: the least time between two rounds."""
