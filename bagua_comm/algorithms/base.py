"""What an algorithm is: a payload, a window, and an exchange.

An algorithm is a frozen dataclass of settings. It says what its buckets hold (`payload`) and between
which points of a training step a bucket may be exchanged (`window`); the engine calls `exchange` on its
lane once per bucket and step, within that window, and `commit` when the window closes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol, TypeAlias

from ..bucket import Bucket
from ..comm import Communicator

Payload: TypeAlias = Literal["grad", "weight"]

State: TypeAlias = Any
"""A dataclass; the arrays in it are what a checkpoint holds."""


class Point(Enum):
    """Points of a training step, in order."""

    ALWAYS = "from the first step on"
    FORWARD = "the forward pass begins"
    GRADIENT = "the gradients of a bucket are complete"
    BACKWARD = "the backward pass has ended"
    STEP = "the optimizer has stepped"
    NEVER = "not before the end of training"


@dataclass(frozen=True)
class Window:
    """When a bucket may be exchanged: from `opens` until `closes`."""

    opens: Point
    closes: Point


class Algorithm(Protocol):
    """A communication method; a frozen dataclass."""

    @property
    def payload(self) -> Payload:
        """What the buckets hold: gradients or weights."""

    @property
    def window(self) -> Window:
        """When a bucket may be exchanged."""

    def check(self, dtype: str) -> None:
        """Raise `UnsupportedError` unless buckets of this dtype can be exchanged."""

    def init(self, bucket: Bucket, comm: Communicator) -> State:
        """Make what `exchange` keeps between steps.

        Collective.
        """

    def exchange(self, bucket: Bucket, comm: Communicator, state: State) -> None:
        """Communicate. Runs on the lane; may write to `bucket.flat` only if the window allows it.

        Collective.
        """

    def commit(self, bucket: Bucket, state: State) -> None:
        """Write back what was communicated, when the window closes. Runs on the caller's thread."""
