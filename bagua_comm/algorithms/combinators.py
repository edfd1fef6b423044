"""Algorithms made of algorithms: `every` communicates in some steps only, `after` is a warm-up.

For instance:

    every(4, Decentralized("shift_one"))
    after(1000, GradientAllReduce(), AsyncModelAverage())
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from ..bucket import Bucket, Plan, TensorSpec
from ..comm import Communicator
from ..errors import ArrayError
from .base import (
    Algorithm,
    Combinator,
    Payload,
    Rounds,
    State,
    Window,
    check_algorithm_argument,
    check_integer,
    runs_in_rounds,
)


@dataclass
class Interval:
    """State of `Every`: that of its algorithm, and whether this step communicates."""

    inner: State
    due: bool = False


@dataclass(frozen=True)
class Every(Combinator):
    """`algorithm` in one of `n` steps, starting with the first; see `every`."""

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
    def drifts(self) -> bool:
        """Whether weights differ between ranks: they do if some steps do not communicate."""
        return self.n > 1 or self.algorithm.drifts

    def check_size(self, size: int) -> None:
        """Supports the numbers of ranks of its algorithm."""
        self.algorithm.check_size(size)

    def init(self, bucket: Bucket, comm: Communicator) -> Interval:
        """See `Algorithm.init`. Collective."""
        return Interval(self.algorithm.init(bucket, comm))

    def hold(self, bucket: Bucket, state: Interval) -> None:
        """Keep an addend of this step's exchange; refused if some steps have none."""
        if self.n > 1:
            raise ArrayError(
                f"hold: {self} averages nothing in some steps, and what is held then would go into the mean of "
                "another step; expected an algorithm that averages in each"
            )
        self.algorithm.hold(bucket, state.inner)

    def communicates(self, step: int, state: Interval) -> bool:
        """Whether this is one of the `n`th steps and its algorithm communicates in it."""
        return step % self.n == 0 and self.algorithm.communicates(step, state.inner)

    def begin(self, bucket: Bucket, state: Interval) -> None:
        """Decide whether this step communicates."""
        state.due = bucket.step % self.n == 0
        if state.due:
            self.algorithm.begin(bucket, state.inner)

    def exchange(self, bucket: Bucket, comm: Communicator, state: Interval) -> None:
        """Communicate if this step does. Collective."""
        if self._takes_part(state):
            self.algorithm.exchange(bucket, comm, state.inner)
        else:
            self.algorithm.skip(bucket, state.inner)

    def skip(self, bucket: Bucket, state: Interval) -> None:
        """See `Algorithm.skip`."""
        self.algorithm.skip(bucket, state.inner)

    def restart(self, bucket: Bucket, state: Interval) -> None:
        """See `Algorithm.restart`."""
        self.algorithm.restart(bucket, state.inner)

    def commit(self, bucket: Bucket, state: Interval) -> None:
        """Write back if this step communicated."""
        if self._takes_part(state):
            self.algorithm.commit(bucket, state.inner)

    def _takes_part(self, state: Interval) -> bool:
        """Whether this step communicates, or an exchange of an earlier step is under way."""
        pending = self.pending(state)
        return state.due or (pending is not None and pending.steps > 0)


@dataclass(frozen=True)
class After(Algorithm):
    """`first` for `steps` steps, then `then`; see `after`.

    The engine calls the phases themselves, each with a state of its own.
    """

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
    def payload(self) -> Payload:  # type: ignore[override]
        """The payload of the first step."""
        return self.phase(0).payload

    @property
    def window(self) -> Window | Rounds:  # type: ignore[override]
        """The window of the first step."""
        return self.phase(0).window

    @property
    def phases(self) -> tuple[Algorithm, ...]:
        """The phases of `first`, then the phases of `then`."""
        return (*(self.first.phases if self.steps else ()), *self.then.phases)

    def phase(self, step: int) -> Algorithm:
        """The phase of `first`, or of `then`, whose steps are counted from its beginning."""
        if step < self.steps:
            return self.first.phase(step)
        return self.then.phase(step - self.steps)

    @property
    def lends(self) -> str | None:
        """See `Algorithm`; that of the first step's algorithm."""
        return self.phase(0).lends

    @property
    def equal_start(self) -> bool:
        """Whether the algorithm of the first step needs equal weights."""
        return self.phase(0).equal_start

    @property
    def drifts(self) -> bool:
        """Whether weights differ between ranks in one of the phases."""
        return any(phase.drifts for phase in self.phases)

    def check(self, dtype: str) -> None:
        """Supports the dtypes that both support."""
        for phase in self.phases:
            phase.check(dtype)

    def check_size(self, size: int) -> None:
        """Supports the numbers of ranks that both support."""
        for phase in self.phases:
            phase.check_size(size)

    def check_plan(self, plan: Plan) -> None:
        """Supports the buckets that both support."""
        for phase in self.phases:
            phase.check_plan(plan)

    def groups(self, tensors: Sequence[TensorSpec]) -> list[int]:
        """Tensors are in one group if they are in every phase."""
        numbers: dict[tuple[int, ...], int] = {}
        found = (phase.groups(tensors) for phase in self.phases)
        of_phases = ([0] * len(tensors) if each is None else each for each in found)
        return [numbers.setdefault(row, len(numbers)) for row in zip(*of_phases, strict=True)]


def every(n: int, algorithm: Algorithm) -> Every:
    """Communicate in one of `n` steps only, starting with the first.

    Meant for algorithms that exchange weights. If gradients are not averaged in some steps, ranks drift apart for
    good, and a UserWarning says so; accumulate them instead. In the other steps, a rank trains as while its
    engine is stopped (`Engine.stop`).

    Raises:
        ArrayError: `n` is not a positive integer, `algorithm` is not an algorithm, or it begins its exchanges by
            time.
    """
    found = Every(n, algorithm)
    alone = next((phase for phase in algorithm.phases if phase.payload == "grad"), None)
    if n > 1 and alone is not None:
        warnings.warn(
            f"every: {alone} averages gradients, so that ranks drift apart for good in the steps without it; sum "
            f"the gradients of {n} steps instead, or use an algorithm that exchanges weights, such as DiLoCo",
            stacklevel=2,
        )
    return found


def after(steps: int, first: Algorithm, then: Algorithm) -> After:
    """Use `first` for this number of steps as a warm-up, and `then` in all further steps.

    `then` counts steps from its own beginning, and starts with the weights as they are. But if weights differ
    between ranks under `first`, and `then` needs equal ones, as all algorithms that exchange gradients and DiLoCo
    do, they become the mean of all ranks when the last step of `first` ends, as by
    `bagua_torch.DistributedDataParallel.switch`; `Point.STEP` is collective then. An `Engine` alone averages the
    weights in its storage. The state of `first` is dropped, with its residuals of error feedback.

    Raises:
        ArrayError: `steps` is not an integer of at least 0, or `first` or `then` is not an algorithm.
    """
    return After(steps, first, then)
