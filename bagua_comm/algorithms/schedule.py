"""Algorithms made of algorithms: how often one communicates, and when one gives way to the next.

For instance:

    every(4, Decentralized("shift_one"))
    after(1000, GradientAllReduce(), AsyncModelAverage())
"""

from __future__ import annotations

from dataclasses import dataclass

from ..bucket import Bucket
from ..comm import Communicator
from ..errors import ArrayError
from .base import (
    Algorithm,
    Payload,
    Point,
    State,
    Window,
    check_algorithm_argument,
    check_dtype,
    check_integer,
    phase_of,
    phases_of,
)


@dataclass
class Interval:
    """What `Every` keeps: the state of its algorithm, and whether this step communicates."""

    inner: State
    due: bool = False


@dataclass(frozen=True)
class Every:
    """`algorithm` in one of `n` steps, beginning with the first; see `every`."""

    n: int
    algorithm: Algorithm

    def __post_init__(self) -> None:
        check_integer("every", "n", self.n, least=1)
        check_algorithm_argument("every", "algorithm", self.algorithm)
        if any(phase.window.closes is Point.NEVER for phase in phases_of(self.algorithm)):
            raise ArrayError(
                f"every: rounds of {self.algorithm} begin by time, not by steps, so ranks would not agree on the "
                "steps left out; give it a longer interval_s"
            )

    def __repr__(self) -> str:
        return f"every({self.n}, {self.algorithm!r})"

    @property
    def payload(self) -> Payload:
        """Its algorithm's."""
        return self.algorithm.payload

    @property
    def window(self) -> Window:
        """Its algorithm's."""
        return self.algorithm.window

    @property
    def phases(self) -> tuple[Algorithm, ...]:
        """Its algorithm's, each in one of `n` steps."""
        return tuple(Every(self.n, phase) for phase in phases_of(self.algorithm))

    def phase(self, step: int) -> Algorithm:
        """See `Algorithm.phase`."""
        return Every(self.n, phase_of(self.algorithm, step))

    def check(self, dtype: str) -> None:
        """What its algorithm takes."""
        check_dtype(self.algorithm, dtype)

    def check_size(self, size: int) -> None:
        """What its algorithm takes."""
        if hasattr(self.algorithm, "check_size"):
            self.algorithm.check_size(size)

    def init(self, bucket: Bucket, comm: Communicator) -> Interval:
        """See `Algorithm.init`. Collective."""
        return Interval(self.algorithm.init(bucket, comm))

    def begin(self, bucket: Bucket, state: Interval) -> None:
        """Decide whether this step communicates."""
        state.due = bucket.step % self.n == 0
        if state.due and hasattr(self.algorithm, "begin"):
            self.algorithm.begin(bucket, state.inner)

    def exchange(self, bucket: Bucket, comm: Communicator, state: Interval) -> None:
        """Communicate, if it is time to. Collective."""
        if state.due:
            self.algorithm.exchange(bucket, comm, state.inner)

    def commit(self, bucket: Bucket, state: Interval) -> None:
        """Write back, if anything was communicated."""
        if state.due and hasattr(self.algorithm, "commit"):
            self.algorithm.commit(bucket, state.inner)


@dataclass(frozen=True)
class After:
    """`first` for `steps` steps, `then` from there on; see `after`."""

    steps: int
    first: Algorithm
    then: Algorithm

    def __post_init__(self) -> None:
        check_integer("after", "steps", self.steps, least=0)
        check_algorithm_argument("after", "first", self.first)
        check_algorithm_argument("after", "then", self.then)

    def __repr__(self) -> str:
        return f"after({self.steps}, {self.first!r}, {self.then!r})"

    @property
    def payload(self) -> Payload:
        """What is exchanged in the first step."""
        return self.phase(0).payload

    @property
    def window(self) -> Window:
        """When, in the first step."""
        return self.phase(0).window

    @property
    def phases(self) -> tuple[Algorithm, ...]:
        """Those of `first`, then those of `then`."""
        return (*(phases_of(self.first) if self.steps else ()), *phases_of(self.then))

    def phase(self, step: int) -> Algorithm:
        """See `Algorithm.phase`."""
        if step < self.steps:
            return phase_of(self.first, step)
        return phase_of(self.then, step - self.steps)

    def check(self, dtype: str) -> None:
        """What both take."""
        for phase in self.phases:
            check_dtype(phase, dtype)

    def init(self, bucket: Bucket, comm: Communicator) -> State:
        """See `Algorithm.init`. Collective."""
        return self.phase(0).init(bucket, comm)

    def exchange(self, bucket: Bucket, comm: Communicator, state: State) -> None:
        """See `Algorithm.exchange`; the engine asks the phases themselves. Collective."""
        self.phase(bucket.step).exchange(bucket, comm, state)


def every(n: int, algorithm: Algorithm) -> Every:
    """Communicate in one of `n` steps only, beginning with the first.

    Meant for algorithms of weights. Gradients that are not averaged let the ranks drift apart for good; to
    average less often, accumulate them.

    Raises:
        ArrayError: `n` is not a positive integer, or `algorithm` is none, or one that goes by time.
    """
    return Every(n, algorithm)


def after(steps: int, first: Algorithm, then: Algorithm) -> After:
    """Use `first` for so many steps, and `then` from there on: a warm-up.

    `then` begins anew, with the weights as they are, and counts steps from there.

    Raises:
        ArrayError: `steps` is not an integer of at least 0, or one of the two is no algorithm.
    """
    return After(steps, first, then)
