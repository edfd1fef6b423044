"""What an algorithm is: a payload, a window, and an exchange.

An algorithm is a frozen dataclass of settings. It says what its buckets hold (`payload`) and between
which points of a training step a bucket may be exchanged (`window`); the engine calls `exchange` on its
lane once per bucket and window, `begin` before it and `commit` when the window closes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol, TypeAlias

from ..arrays import FLOATS
from ..bucket import Bucket
from ..comm import Communicator
from ..errors import ArrayError, UnsupportedError

Payload: TypeAlias = Literal["grad", "weight"]

State: TypeAlias = Any
"""A dataclass; its arrays and numbers are what a checkpoint holds, but for those that are `transient`."""


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
    """When a bucket may be exchanged: from `opens` until `closes`.

    A window from ALWAYS to NEVER is open all the time: a round of exchanges begins at a STEP, at the earliest
    `interval_s` after the one before, and is committed at the first STEP after its end. Nothing waits for it.
    """

    opens: Point
    closes: Point
    interval_s: float = 0.0


class Algorithm(Protocol):
    """A communication method; a frozen dataclass.

    It need not have `check`, and may have four more methods. `check_size(size)` raises if it does not support
    this number of ranks. `begin(bucket, state)` prepares an exchange when the window opens, and `commit(bucket,
    state)` writes back what was communicated when it closes; both run on the caller's thread. `phase(step)` gives
    the algorithm to use in a training step, if it is not always the same, and the property `phases` all of them.
    The attribute `lends` names an array of its state that the optimizer uses as its own.
    """

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


TRANSIENT = {"transient": True}
"""Metadata of a state's field that holds nothing from one step to the next: no checkpoint has it."""

ALIKE = {"alike": True}
"""Metadata of an array in a state that has the same bytes on all ranks: a checkpoint loads on any rank, on any
number of ranks. An array without this mark is its rank's own."""


def phase_of(algorithm: Algorithm, step: int) -> Algorithm:
    """What `algorithm` is in this training step."""
    if hasattr(algorithm, "phase"):
        phase: Algorithm = algorithm.phase(step)
        return phase
    return algorithm


def phases_of(algorithm: Algorithm) -> tuple[Algorithm, ...]:
    """All that `algorithm` is in the course of training, in order."""
    return tuple(getattr(algorithm, "phases", (algorithm,)))


def lent_by(algorithm: Algorithm) -> str:
    """The name of the array of its state that `algorithm` lends to the optimizer; empty if it lends nothing."""
    return getattr(algorithm, "lends", "")


def check_algorithm_argument(owner: str, name: str, value: object) -> None:
    """Raise `ArrayError` unless `value` is an algorithm."""
    if isinstance(value, type) or not hasattr(value, "exchange"):
        raise ArrayError(f"{owner}: {name} is {value!r}, expected an algorithm such as ByteGrad()")


def check_integer(owner: str, name: str, value: object, *, least: int) -> None:
    """Raise `ArrayError` unless `value` is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArrayError(f"{owner}: {name} is {value!r}, expected an integer of at least {least}")


def check_average_argument(owner: str, value: object) -> None:
    """Raise `ArrayError` unless `value` is an Average."""
    if isinstance(value, type) or not hasattr(value, "bind"):
        raise ArrayError(
            f"{owner}: average is {value!r}, expected an Average such as Exact() or Quantized(MinMaxUInt8())"
        )


def check_average(average: Any, dtype: str) -> None:
    """Raise `UnsupportedError` unless `average` takes this dtype; one without `check` takes every one."""
    if hasattr(average, "check"):
        average.check(dtype)


def check_dtype(algorithm: Any, dtype: str) -> None:
    """Raise `UnsupportedError` unless `algorithm` takes this dtype; one without `check` takes every one."""
    if hasattr(algorithm, "check"):
        algorithm.check(dtype)


def check_floating(algorithm: object, dtype: str) -> None:
    """Raise `UnsupportedError` unless `dtype` is a floating-point one."""
    if dtype not in FLOATS:
        raise UnsupportedError(f"{algorithm} cannot average {dtype}")
