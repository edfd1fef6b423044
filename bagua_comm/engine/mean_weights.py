"""The weights of this rank in the means of an engine: its tokens or samples, by step.

    payload "grad"      the weight of a step, or one for each addend that is held: exchanged on the lane when the
                        backward pass begins, before the first bucket, so that the pass hides it
    payload "weight"    the sum of the weights since the last exchange of a bucket, in the state of its algorithm:
                        exchanged before each

In steps without weights nothing is sent, until a step has had one. From then on all ranks exchange theirs in each
step, so that one that has set none is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..algorithms.base import Algorithm, State, name_of
from ..bucket import Bucket
from ..comm import Communicator
from ..comm.weights import LATE, MISSING, NEGATIVE, NO_NUMBER, SET_AFTER, Weigh, agree_traced, weight_of_pass
from ..errors import ArrayError, UnsupportedError, warn
from ..execution.lane import Lane
from ..trace import Tracer


class MeanWeights:
    """The weights of this rank, from where the program sets them to the means that they are for.

    Args:
        lane: The lane on which buckets are exchanged.
        tracer: Where the spans of their exchanges go.
    """

    def __init__(self, lane: Lane[Communicator], tracer: Tracer) -> None:
        self._lane, self._tracer = lane, tracer
        self.now: float | None = None
        """The weight of this step; None if the program has set none."""
        self._held: list[float | None] = []
        """The weights of the addends of this step that the engine holds."""
        self.is_open = self.used = False
        """Whether the backward pass has begun; whether one has used the weight."""
        self.in_each_step = False
        """Whether all ranks exchange weights in each step; the same on all ranks."""
        self.of_last_pass: float | None = None
        """The weight that a backward pass has used, if that of the next one is set before its step has ended."""
        self.of_pass: Weigh | None = None
        """The weights of the present backward pass; None if its mean is plain."""
        self._skips = self._late = self._has_warned = False

    def begin_phase(self, algorithm: Algorithm, states: Sequence[State]) -> None:
        """Weigh the means of this algorithm from now on; `states` has one state for each bucket."""
        self._of_weights, self._addends = algorithm.payload == "weight", algorithm.addends
        self.of_pass = None
        weighs = self._of_weights and algorithm.weighs
        found = map(algorithm.step_weights, states if weighs else ())
        self._sums = [each for each in found if each is not None]
        if weighs and len(self._sums) != len(states):
            raise ArrayError(
                f"{algorithm} weighs changes of weights, but its state has no StepWeights; expected one as its "
                "field `weights`"
            )

    def set(self, weight: object, phases: Sequence[Algorithm]) -> None:
        """Set the weight of this step, for an algorithm of these phases.

        Raises:
            ArrayError: The backward pass has begun. The next exchange of weights raises it on all ranks.
            UnsupportedError: The algorithm makes no mean over all ranks.
        """
        for phase in phases:
            if not phase.weighs:
                raise UnsupportedError(
                    f"weight: {name_of(phase)} makes no weighted mean over all ranks; expected one that does, "
                    'such as GradientAllReduce, QAdam or DiLoCo, and not by an average with divide="senders": an '
                    "algorithm that sets weighs = True"
                )
        self._late |= self.is_open
        found = weight_of_pass(weight, has_begun=self.is_open)
        if self.used and self._of_weights:
            self.of_last_pass = self._value()
        self.now, self.used = found, False

    def hold(self) -> None:
        """Take the weight as that of an addend, which the engine holds."""
        self._held.append(self.now)
        self.now = None

    @property
    def fit_any_share(self) -> bool:
        """Whether means are right if ranks have unequal numbers of microbatches; the same on all ranks."""
        return self.in_each_step or self._addends is not None

    @property
    def are_due(self) -> bool:
        """Whether ranks exchange weights in this step, if it averages gradients."""
        have_one = self.now is not None or self._held.count(None) < len(self._held)
        return self.in_each_step or have_one or self._late

    def open(self, *, exchanges: bool) -> None:
        """Begin a backward pass: exchange the weights on the lane, if they are due and it `exchanges` gradients.

        Collective.
        """
        self.is_open, self.used, self.of_pass = True, True, None
        if self._of_weights or not exchanges:
            return
        self.in_each_step = True
        mine, counts = [*self._held, self.now], None
        if self._addends is not None:
            comm = self._lane.comm
            counts = comm.flight.health.counts(comm.group, self._addends)
            expected = counts[comm.rank]  # the average refuses another number
            mine = [*mine, *([0.0] * expected)][:expected]
        mine, self._late = [LATE] * len(mine) if self._late else mine, False
        self._lane.submit(self._agree_for_pass, mine, counts)  # the lane runs it before the buckets
        self.of_pass = lambda: self._agreed

    def close(self) -> None:
        """End a backward pass."""
        self.is_open, self._held = False, []

    def since_exchange(self, bucket: Bucket) -> Weigh | None:
        """Return the weights since the last exchange of a bucket, which comes next; None if its mean is plain."""
        mine = self._sums[bucket.index]
        found, mine.sum = mine.sum, None
        if found is None and not self.in_each_step and not self._late:
            return None
        self.in_each_step = True
        return partial(agree_traced, self._lane.comm, self._tracer, [LATE if self._late else found])

    def end_step(self) -> None:
        """Count the weight of the step that ends; until then, the program may replace it."""
        weight, self.of_last_pass = self.of_last_pass, None
        if weight is None:
            weight = self._value()
            if self.used or self._of_weights:
                self.now, self.used = None, False
        skips, self._skips = self._skips, False
        for each in self._sums:
            if weight != MISSING or (not skips and (self.in_each_step or each.sum is not None)):
                each.add(min(weight, 0.0) if skips else weight)
        self.is_open = False

    def skip(self) -> None:
        """Count the step that ends next with weight 0: no optimizer has stepped by its gradients."""
        self._skips = True

    def _value(self) -> float:
        """The weight of this step in a sum of weights, where a negative number could hide."""
        weight = MISSING if self.now is None else self.now
        return NEGATIVE if weight < 0 and weight not in (MISSING, NO_NUMBER) else weight

    def forget_used(self) -> None:
        """Forget the weight if a backward pass has used it, since another step begins."""
        self.is_open = False
        if self.used:
            self.now, self.used = None, False

    def drop_step(self) -> None:
        """Forget what belongs to a step that is lost, and whose backward pass may have raised."""
        self.forget_used()
        self._held, self.of_last_pass, self._late = [], None, False

    @property
    def unused(self) -> float | None:
        """The weight, if no backward pass has used it yet; else None."""
        return None if self.used else self.now

    def check_used(self) -> None:
        """Raise `ArrayError` if the weight was set after the backward pass. For the time before a step.

        The next exchange of weights raises it on all ranks.
        """
        late = not self._of_weights or self.of_last_pass is not None
        if self.now is not None and not self.used and late:
            self.now, self._late = None, True
            raise ArrayError(SET_AFTER)

    def _agree_for_pass(self, mine: list[float | None], counts: Sequence[int] | None) -> None:
        self._agreed = agree_traced(self._lane.comm, self._tracer, mine, counts)
        if self._agreed is None and not self._has_warned:
            self._has_warned = True
            if self._lane.comm.rank == 0:
                warn("weight: no rank has set one for this backward pass, as for earlier ones; its mean is plain")
