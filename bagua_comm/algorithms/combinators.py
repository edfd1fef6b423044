"""Algorithms made of algorithms: `every` says how often one communicates, `after` when one follows another.

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
    Around,
    Payload,
    Rounds,
    State,
    Window,
    check_algorithm_argument,
    check_integer,
    complete,
    phase_of,
    phases_of,
    runs_in_rounds,
)


@dataclass
class Interval:
    """What `Every` keeps: the state of its algorithm, and whether this step communicates."""

    inner: State
    due: bool = False


@dataclass(frozen=True)
class Every(Around):
    """`algorithm` in one of `n` steps, beginning with the first; see `every`."""

    n: int
    algorithm: Algorithm

    def __post_init__(self) -> None:
        check_integer("every", "n", self.n, least=1)
        check_algorithm_argument("every", "algorithm", self.algorithm)
        if runs_in_rounds(self.algorithm):
            raise ArrayError(
                f"every: rounds of {self.algorithm} begin by time, not by steps, so ranks would leave out "
                "different rounds; give it a longer interval_s instead"
            )

    def __repr__(self) -> str:
        return f"every({self.n}, {self.algorithm!r})"

    @property
    def phases(self) -> tuple[Algorithm, ...]:
        """The phases of its algorithm, each in one of `n` steps."""
        return tuple(Every(self.n, phase) for phase in phases_of(self.algorithm))

    def phase(self, step: int) -> Algorithm:
        """The phase of its algorithm, in one of `n` steps."""
        return Every(self.n, phase_of(self.algorithm, step))

    def check_size(self, size: int) -> None:
        """Takes the numbers of ranks of its algorithm."""
        self._inner.check_size(size)

    def init(self, bucket: Bucket, comm: Communicator) -> Interval:
        """See `Algorithm.init`. Collective."""
        return Interval(self._inner.init(bucket, comm))

    def begin(self, bucket: Bucket, state: Interval) -> None:
        """Decide whether this step communicates."""
        state.due = bucket.step % self.n == 0
        if state.due:
            self._inner.begin(bucket, state.inner)

    def exchange(self, bucket: Bucket, comm: Communicator, state: Interval) -> None:
        """Communicate, if this step does. Collective."""
        if state.due:
            self._inner.exchange(bucket, comm, state.inner)

    def commit(self, bucket: Bucket, state: Interval) -> None:
        """Write back, if this step communicated."""
        if state.due:
            self._inner.commit(bucket, state.inner)


@dataclass(frozen=True)
class After:
    """`first` for `steps` steps, `then` in all further steps; see `after`."""

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
        """The payload of the first step."""
        return self.phase(0).payload

    @property
    def window(self) -> Window | Rounds:
        """The window of the first step."""
        return self.phase(0).window

    @property
    def phases(self) -> tuple[Algorithm, ...]:
        """The phases of `first`, then the phases of `then`."""
        return (*(phases_of(self.first) if self.steps else ()), *phases_of(self.then))

    def phase(self, step: int) -> Algorithm:
        """The phase of `first`, or of `then`, which counts steps from its own beginning."""
        if step < self.steps:
            return phase_of(self.first, step)
        return phase_of(self.then, step - self.steps)

    def check(self, dtype: str) -> None:
        """Takes the dtypes that both take."""
        for phase in self.phases:
            complete(phase).check(dtype)

    def init(self, bucket: Bucket, comm: Communicator) -> State:
        """See `Algorithm.init`; the engine calls the phases themselves. Collective."""
        return self.phase(0).init(bucket, comm)

    def exchange(self, bucket: Bucket, comm: Communicator, state: State) -> None:
        """See `Algorithm.exchange`; the engine calls the phases themselves. Collective."""
        self.phase(bucket.step).exchange(bucket, comm, state)


def every(n: int, algorithm: Algorithm) -> Every:
    """Communicate in one of `n` steps only, beginning with the first.

    Meant for algorithms that exchange weights. Gradients that are not averaged let ranks drift apart for good; to
    average them less often, accumulate them.

    Raises:
        ArrayError: `n` is not a positive integer, `algorithm` is not an algorithm, or it begins its exchanges by
            time.
    """
    return Every(n, algorithm)


def after(steps: int, first: Algorithm, then: Algorithm) -> After:
    """Use `first` for this number of steps, and `then` in all further steps: a warm-up.

    `then` starts with the weights as they are, and counts steps from its own beginning.

    Raises:
        ArrayError: `steps` is not an integer of at least 0, or `first` or `then` is not an algorithm.
    """
    return After(steps, first, then)
