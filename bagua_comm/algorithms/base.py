"""The contract of algorithms: a payload, a window, and an exchange.

An algorithm is a frozen dataclass of settings. It says what its buckets hold (`payload`) and between which points
of a training step they may be exchanged (`window`). The engine calls `exchange` on its lane, once for each bucket
and window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeAlias

from ..arrays import FLOATS, Array
from ..averages.base import briefly, form_of_class
from ..bucket import Bucket, Plan, TensorSpec
from ..comm import Communicator
from ..comm.weights import MISSING, PARTLY
from ..errors import ArrayError, UnsupportedError, how_to_call

Payload: TypeAlias = str
"""The contents of buckets: "grad" or "weight". To type checkers `payload = "grad"` is a `str`."""

State: TypeAlias = Any
"""A dataclass. A checkpoint holds its arrays and numbers, except `TRANSIENT` ones."""

TRANSIENT = {"transient": True}
"""Metadata of a field that no later step reads: checkpoints leave it out."""

REPLICATED = {"alike": True}
"""Metadata of an array that has the same bytes on all ranks: a checkpoint loads on any rank, on any number of
ranks. An array without this mark belongs to its rank."""

CHUNK = {"chunk": True}
"""Metadata of a nested state whose arrays cover a part of the bucket that depends on the rank and on the nodes.
They are saved with a description of the part, and load into the same part on the same nodes."""

MEAN = {"reshape": "mean"}
"""Metadata of an array that differs between ranks and of which only the mean matters, as of residuals of error
feedback: on another number of ranks, each rank gets the mean."""

RECREATED = {"reshape": "anew"}
"""Metadata of an array that differs between ranks and that `init` makes from the weights, as replicas of
neighbours' weights: on another number of ranks, `init` makes it again."""

OWN_NUMBER = {"reshape": "mean", "own_number": True}
"""Metadata of a number that differs between ranks, or None: on another number of ranks, each gets the mean."""

SAME_PATH = {"same_path": True}
"""Metadata of a nested state whose fields are saved as fields of the outer state."""

HANDED_OVER = {**MEAN, "handed_over": True}
"""Metadata of an array that exists only between a new plan and the next exchange."""

HOLD_HINT = "GradientAllReduce(Reproducible(addends=M))"
"""An algorithm that keeps addends, for error messages."""


class Point(Enum):
    """Points of a training step, in order."""

    FORWARD = "the forward pass begins"
    GRADIENT = "the gradients of a bucket are complete"
    BACKWARD = "the backward pass has ended"
    STEP = "the optimizer has stepped"


@dataclass(frozen=True)
class Window:
    """The part of training in which a bucket may be exchanged: from `opens` until `closes`, `delay` steps later.

    Training waits for the exchange when the window closes.

    With a `delay`, exchanges outlive steps, and several buckets may be under way. The window opens at `STEP` and
    closes at `FORWARD`. A bucket leaves only in steps in which `communicates` is true for its state; `begin` is
    called in every step. The state has a `Pending`, by the name `pending`. An exchange may neither read nor write
    `bucket.flat`, which training changes meanwhile: `begin` copies what is sent.

    Raises:
        ArrayError: `delay` is not an integer of at least 0, or it is positive for another window.
    """

    opens: Point
    closes: Point
    delay: int = 0

    def __post_init__(self) -> None:
        check_integer("Window", "delay", self.delay, least=0)
        if self.delay and (self.opens, self.closes) != (Point.STEP, Point.FORWARD):
            raise ArrayError(
                f"Window: delay is {self.delay} for a window from {self.opens} to {self.closes}, expected one "
                "from Point.STEP to Point.FORWARD"
            )


@dataclass
class Pending:
    """Whether an exchange that outlives steps is under way; a part of the state of an algorithm.

    The engine counts. A checkpoint holds the number: where training continues from it, what was received before
    is written back in the same step.
    """

    steps: int = 0
    """How many times the optimizer has to step until the window closes, plus one; 0 if nothing is under way."""

    def begin(self, delay: int) -> None:
        """Record that an exchange begins."""
        self.steps = delay + 1

    def count(self) -> None:
        """Record that the optimizer has stepped."""
        self.steps -= self.steps > 1

    def end(self) -> None:
        """Record that the result has been written back."""
        self.steps = 0


@dataclass
class StepWeights:
    """The weights of this rank in the steps since the last exchange of a bucket; a part of its state.

    The engine counts. A checkpoint holds the sum. On another number of ranks each begins with the mean of the
    sums, as it begins with the mean of the weights of the model: the steps of a rank that is gone are in both.
    """

    sum: float | None = field(default=None, metadata=OWN_NUMBER)
    """None if no step had a weight."""

    def add(self, weight: float) -> None:
        """Add the weight of a step, or `MISSING`: either all steps have one, or none."""
        if self.sum is None:
            self.sum = weight
        elif (self.sum == MISSING) == (weight == MISSING):
            worse = min(self.sum, weight)  # below 0 it is none: what else a rank sends
            self.sum = worse if worse < 0 else self.sum + weight
        else:
            self.sum = PARTLY


@dataclass(frozen=True)
class Rounds:
    """Rounds of exchanges beside training, for which no step waits.

    A round begins after an optimizer step, at least `interval_s` seconds after the previous round began. Its
    results are written back after the first optimizer step that follows its end.
    """

    interval_s: float = 0.0


class Default:
    """A property that a field of a subclass, with or without a default of its own, may replace."""

    def __init__(self, function: Any) -> None:
        self._function, self.__doc__ = function, function.__doc__

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            raise AttributeError("a class has none, so that dataclasses find no default of a field")
        return self._function(instance)


class Algorithm:
    """A communication method: the base class of all, for frozen dataclasses of settings.

    A subclass sets `payload` and `window`, as assignments in the class or as fields, and defines `init` and
    `exchange`. The other members have defaults.
    """

    payload: Payload
    """The contents of the buckets: "grad", gradients, or "weight", weights."""

    window: Window | Rounds
    """When a bucket may be exchanged."""

    # What it exchanges ------------------------------------------------------------------------------

    @property
    def lends(self) -> str | None:
        """The name of the array in its state that is averaged in place of the gradient.

        Default: None, the gradient itself is averaged.
        """
        return None

    def lent(self, state: State) -> Array:
        """The array that `lends` names. Default: the field of this name in `state`."""
        found: Array = getattr(state, str(self.lends))
        return found

    @property
    def weighs(self) -> bool:
        """Whether its means over all ranks take weights, from `comm.context.weighting`; see `Engine.weight`.

        If it exchanges weights of the model, its state has a `StepWeights`. Default: False.
        """
        return False

    @property
    def addends(self) -> int | None:
        """Total number of addends of all ranks in a mean. Default: None, each rank has one."""
        return None

    @property
    def equal_start(self) -> bool:
        """Whether all ranks must have the same weights when it begins.

        If they differ then, they are averaged. Default: whether it exchanges gradients.
        """
        return self.payload == "grad"

    @property
    def drifts(self) -> bool:
        """Whether ranks' weights differ while it is used. Default: whether it exchanges weights."""
        return self.payload == "weight"

    @property
    def phases(self) -> tuple[Algorithm, ...]:
        """All algorithms that this one uses during training, in order. Default: itself alone."""
        return (self,)

    def phase(self, step: int) -> Algorithm:
        """The algorithm to use in this training step; one of `phases`. Default: itself."""
        return self

    def check(self, dtype: str) -> None:
        """Raise `UnsupportedError` unless it supports this dtype. Default: it supports all."""

    def check_size(self, size: int) -> None:
        """Raise `ArrayError` unless it supports this number of ranks. Default: it supports all."""

    def check_plan(self, plan: Plan) -> None:
        """Raise `ArrayError` unless it can exchange these buckets. Default: it can exchange any."""

    def groups(self, tensors: Sequence[TensorSpec]) -> Sequence[int] | None:
        """The argument `groups` of `Plan.pack`: the group of each tensor; a bucket has tensors of one group.

        Default: None, any tensors may share a bucket.
        """
        return None

    # A step -----------------------------------------------------------------------------------------

    def init(self, bucket: Bucket, comm: Communicator) -> State:
        """Make the state that `exchange` keeps between steps.

        Collective.
        """
        raise NotImplementedError

    def hold(self, bucket: Bucket, state: State) -> None:
        """Keep what the bucket holds as one addend of the next exchange, and leave zeros in it.

        Default: raise `ArrayError`.
        """
        raise ArrayError(f"hold: {self} keeps no addends; {HOLD_HINT} does")

    def communicates(self, step: int, state: State) -> bool:
        """Whether the exchange of this step communicates; the same on all ranks. Default: True.

        Called between two exchanges, with the number of steps since the algorithm began.
        """
        return True

    def pending(self, state: State) -> Pending | None:
        """The part of the state that says whether an exchange outlives steps; see `Window.delay`.

        Default: the field `pending` of `state`; None if there is none.
        """
        found: Pending | None = getattr(state, "pending", None)
        return found

    def step_weights(self, state: State) -> StepWeights | None:
        """The part of the state with the weights of this rank since the last exchange; see `weighs`.

        Default: the field `weights` of `state`; None if there is none.
        """
        found: StepWeights | None = getattr(state, "weights", None)
        return found

    def begin(self, bucket: Bucket, state: State) -> None:
        """Prepare an exchange, on the caller's thread, before the bucket leaves. Default: nothing."""

    def exchange(self, bucket: Bucket, comm: Communicator, state: State) -> None:
        """Communicate. Runs on the lane; may write to `bucket.flat` only if training waits for it (`Window`).

        Collective.
        """
        raise NotImplementedError

    def skip(self, bucket: Bucket, state: State) -> None:
        """Called in place of `exchange` in a step without communication, as in a stopped engine.

        Default: nothing; the bucket keeps what this rank has computed.
        """

    def commit(self, bucket: Bucket, state: State) -> None:
        """Write the result back, on the caller's thread, when the window closes. Default: nothing."""

    def restart(self, bucket: Bucket, state: State) -> None:
        """Begin anew from the weights in the bucket, which the program has replaced on all ranks.

        What the state keeps of earlier weights becomes these, and momenta and residuals become zero. Steps are
        counted on, so that ranks continue to exchange in the same steps. It sends nothing. Default: nothing, for
        algorithms whose state keeps nothing of weights.
        """

    def defines(self, method: str) -> bool:
        """Whether it replaces the default of this method."""
        return getattr(getattr(self, method), "__func__", None) is not getattr(Algorithm, method)


# Type checkers see properties; at run time, fields of subclasses may take their names.
for _name, _value in tuple(vars(Algorithm).items()):
    if isinstance(_value, property):
        setattr(Algorithm, _name, Default(_value.fget))


class Combinator(Algorithm):
    """Base class of algorithms that wrap another one, their field `algorithm`.

    A combinator defines the members of `Algorithm` that are not here, or refuses algorithms that have them. Its
    state holds the state of the inner algorithm as its field `inner`.
    """

    algorithm: Algorithm

    def _with(self, algorithm: Algorithm) -> Algorithm:
        """A copy of this combinator around another algorithm."""
        changed: Any = replace(self, algorithm=algorithm)  # type: ignore[type-var]
        return changed  # type: ignore[no-any-return]

    @property
    def payload(self) -> Payload:  # type: ignore[override]
        """The payload of its algorithm."""
        return self.algorithm.payload

    @property
    def window(self) -> Window | Rounds:  # type: ignore[override]
        """The window of its algorithm."""
        return self.algorithm.window

    @property
    def phases(self) -> tuple[Algorithm, ...]:
        """The phases of its algorithm, each wrapped in this combinator."""
        return tuple(map(self._with, self.algorithm.phases))

    def phase(self, step: int) -> Algorithm:
        """The phase of its algorithm, wrapped in this combinator."""
        return self._with(self.algorithm.phase(step))

    @property
    def lends(self) -> str | None:
        """See `Algorithm`; that of its algorithm."""
        return self.algorithm.lends

    def lent(self, state: State) -> Array:
        """See `Algorithm`; that of its algorithm."""
        return self.algorithm.lent(state.inner)

    @property
    def weighs(self) -> bool:
        """Whether the means of its algorithm take weights."""
        return self.algorithm.weighs

    @property
    def addends(self) -> int | None:
        """See `Algorithm`; that of its algorithm."""
        return self.algorithm.addends

    @property
    def equal_start(self) -> bool:
        """Whether its algorithm needs equal weights when it begins."""
        return self.algorithm.equal_start

    def check(self, dtype: str) -> None:
        """Supports the dtypes of its algorithm."""
        self.algorithm.check(dtype)

    def check_plan(self, plan: Plan) -> None:
        """Supports the buckets of its algorithm."""
        self.algorithm.check_plan(plan)

    def groups(self, tensors: Sequence[TensorSpec]) -> Sequence[int] | None:
        """The groups of its algorithm."""
        return self.algorithm.groups(tensors)

    def pending(self, state: State) -> Pending | None:
        """See `Algorithm`; that of its algorithm."""
        return self.algorithm.pending(state.inner)

    def step_weights(self, state: State) -> StepWeights | None:
        """See `Algorithm`; that of its algorithm."""
        return self.algorithm.step_weights(state.inner)

    def communicates(self, step: int, state: State) -> bool:
        """Whether its algorithm communicates in this step."""
        return self.algorithm.communicates(step, state.inner)


def core_of(algorithm: Algorithm) -> Algorithm:
    """The innermost algorithm, without combinators."""
    return core_of(algorithm.algorithm) if isinstance(algorithm, Combinator) else algorithm


def name_of(algorithm: Algorithm) -> str:
    """The name of its class, with those of the algorithms that it wraps: "Every(DiLoCo)"."""
    inner = f"({name_of(algorithm.algorithm)})" if isinstance(algorithm, Combinator) else ""
    return type(algorithm).__name__ + inner


def keeps_weights(algorithm: Algorithm) -> bool:
    """Whether its state keeps something of earlier weights, which `restart` replaces."""
    return algorithm.payload == "weight" and core_of(algorithm).defines("restart")


def runs_in_rounds(algorithm: Algorithm) -> bool:
    """Whether `algorithm` exchanges in `Rounds` in one of its phases."""
    return any(isinstance(phase.window, Rounds) for phase in algorithm.phases)


def exchanges_weights(algorithm: Algorithm) -> bool:
    """Whether weights differ between ranks in one of the phases of `algorithm`.

    They do where weights are exchanged, and where gradients stay local in some steps.
    """
    return any(phase.drifts for phase in algorithm.phases)


def check_size(algorithm: Algorithm, size: int) -> None:
    """Raise `ArrayError` unless all phases of `algorithm` support this number of ranks."""
    for phase in algorithm.phases:
        phase.check_size(size)


def pack(algorithm: Algorithm, tensors: Iterable[TensorSpec], *, bucket_bytes: int, alignment: int = 1) -> Plan:
    """Fill buckets as `Plan.pack` does, so that `algorithm` can exchange them."""
    tensors = list(tensors)
    groups = algorithm.groups(tensors)
    return Plan.pack(tensors, bucket_bytes=bucket_bytes, alignment=alignment, groups=groups)


def needs_groups(algorithm: Algorithm, tensors: Sequence[TensorSpec]) -> bool:
    """Whether some of these tensors may share no bucket."""
    groups = algorithm.groups(tensors)
    return groups is not None and len(set(groups)) > 1


# Checks of arguments --------------------------------------------------------------------------------


def check_algorithm_argument(owner: str, name: str, value: object) -> None:
    """Raise `ArrayError` unless `value` is an algorithm."""
    if not isinstance(value, Algorithm):
        hint = _how_to_make_an_algorithm(value)
        raise ArrayError(f"{owner}: {name} is {value!r}, expected an algorithm such as ByteGrad(){hint}")
    missing = [each for each in ("payload", "window") if not hasattr(value, each)]
    phases = value.phases
    missing += [each for each in ("init", "exchange") if not all(phase.defines(each) for phase in phases)]
    kind = type(value).__name__
    if missing:
        raise ArrayError(
            f"{owner}: {name} is {value!r}, expected an algorithm with {' and '.join(missing)}; define "
            f"{'them' if len(missing) > 1 else 'it'} in class {kind}"
        )
    if hasattr(type(value), "__getattr__"):
        raise ArrayError(
            f"{owner}: {name} is {value!r}, whose __getattr__ is not asked for members that have a default; to "
            f"forward them, let {kind} inherit from bagua_comm.algorithms.base.Combinator"
        )


def _how_to_make_an_algorithm(value: object) -> str:
    """How to make an algorithm of a value that is none, as the end of a message; "" if that is not known."""
    if isinstance(value, str):
        return f"; bagua_comm.algorithms.from_name({value!r}) makes one of a known name, such as 'bytegrad'"
    form = form_of_class(value, "GradientAllReduce(Quantized({}))", "GradientAllReduce({})")
    if hint := how_to_call(value, form):
        return hint
    if callable(getattr(value, "exchange", None)) and not isinstance(value, type):
        return f"; let {type(value).__name__} inherit from bagua_comm.algorithms.Algorithm"
    if hasattr(value, "bind"):
        return f"; an average becomes one by GradientAllReduce({briefly(value)})"
    if hasattr(value, "wire_nbytes"):
        return f"; a codec becomes one by GradientAllReduce(Quantized({briefly(value)}))"
    return ""


def check_integer(owner: str, name: str, value: object, *, least: int) -> None:
    """Raise `ArrayError` unless `value` is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArrayError(f"{owner}: {name} is {value!r}, expected an integer of at least {least}")


def check_floating(algorithm: object, dtype: str) -> None:
    """Raise `UnsupportedError` unless `dtype` is a floating-point dtype."""
    if dtype not in FLOATS:
        raise UnsupportedError(f"{algorithm} cannot average {dtype}; expected a floating-point dtype")
