"""The contract of algorithms: a payload, a window, and an exchange.

An algorithm is a frozen dataclass of settings. It says what its buckets hold (`payload`) and between which points
of a training step they may be exchanged (`window`). The engine calls `exchange` on its lane, once for each bucket
and window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol, TypeAlias

from ..arrays import FLOATS, Array
from ..averages.base import briefly, form_of_class
from ..bucket import Bucket, Plan, TensorSpec
from ..comm import Communicator
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
        """Note that an exchange begins."""
        self.steps = delay + 1

    def count(self) -> None:
        """Note that the optimizer has stepped."""
        self.steps -= self.steps > 1

    def end(self) -> None:
        """Note that the result has been written back."""
        self.steps = 0


@dataclass(frozen=True)
class Rounds:
    """Rounds of exchanges beside training, for which no step waits.

    A round begins after an optimizer step, at least `interval_s` seconds after the previous round began. Its
    results are written back after the first optimizer step that follows its end.
    """

    interval_s: float = 0.0


class Algorithm(Protocol):
    """A communication method; a frozen dataclass.

    It must have the four members below; `payload` and `window` may be properties, fields or plain assignments in
    the class. It may have the other members of `WithDefaults`, which has a default for each that is missing.

    Algorithms and averages are Protocols, because they inherit nothing: any dataclass with these members is one.
    Codecs and transports are base classes, because a subclass inherits most of its behaviour: the checks of
    arguments from `Codec`, and derived collectives from `Transport`.
    """

    @property
    def payload(self) -> Payload:
        """The contents of the buckets: "grad", gradients, or "weight", weights.

        A class sets it by `payload = "grad"`, without an annotation: pyright takes no `ClassVar` for a property.
        """

    @property
    def window(self) -> Window | Rounds:
        """When a bucket may be exchanged."""

    def init(self, bucket: Bucket, comm: Communicator) -> State:
        """Make the state that `exchange` keeps between steps.

        Collective.
        """

    def exchange(self, bucket: Bucket, comm: Communicator, state: State) -> None:
        """Communicate. Runs on the lane; may write to `bucket.flat` only if training waits for it (`Window`).

        Collective.
        """


class GroupedAlgorithm(Algorithm, Protocol):
    """An algorithm of this library: it also has `groups`, so that any of them fits one program."""

    def groups(self, tensors: Sequence[TensorSpec]) -> Sequence[int] | None:
        """The argument `groups` of `Plan.pack`, with which it can exchange the buckets of these tensors."""


class Ungrouped:
    """Base class of algorithms that exchange any buckets."""

    def groups(self, tensors: Sequence[TensorSpec]) -> Sequence[int] | None:
        """The argument `groups` of `Plan.pack`: None, since any tensors may share a bucket."""
        return None


class WithDefaults:
    """An algorithm with defaults for its optional members.

    Made by `with_defaults`. Code that runs an algorithm calls this object and asks for no method.

    Args:
        algorithm: The algorithm.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm

    @property
    def payload(self) -> Payload:
        """See `Algorithm.payload`."""
        return self.algorithm.payload

    @property
    def window(self) -> Window | Rounds:
        """See `Algorithm.window`."""
        return self.algorithm.window

    @property
    def lends(self) -> str | None:
        """Optional: the name of the array in its state that is averaged in place of the gradient.

        Default: None, the gradient itself is averaged.
        """
        name: str | None = getattr(self.algorithm, "lends", None)
        return name

    def lent(self, state: State) -> Array:
        """Optional: the array that `lends` names. Default: the field of this name in `state`."""
        method = getattr(self.algorithm, "lent", None)
        found: Array = getattr(state, str(self.lends)) if method is None else method(state)
        return found

    @property
    def equal_start(self) -> bool:
        """Optional: whether all ranks must have the same weights when it begins.

        If they differ then, they are averaged. Default: whether it exchanges gradients.
        """
        return bool(getattr(self.algorithm, "equal_start", self.payload == "grad"))

    @property
    def drifts(self) -> bool:
        """Optional: whether ranks' weights differ while it is used. Default: whether it exchanges weights."""
        return bool(getattr(self.algorithm, "drifts", self.payload == "weight"))

    @property
    def phases(self) -> tuple[Algorithm, ...]:
        """Optional: all algorithms that this one uses during training, in order.

        Default: itself alone.
        """
        return tuple(getattr(self.algorithm, "phases", (self.algorithm,)))

    def phase(self, step: int) -> Algorithm:
        """Optional: the algorithm to use in this training step; one of `phases`. Default: itself."""
        phase = getattr(self.algorithm, "phase", None)
        found: Algorithm = self.algorithm if phase is None else phase(step)
        return found

    def check(self, dtype: str) -> None:
        """Optional: raise `UnsupportedError` unless it supports this dtype. Default: it supports all."""
        self._call("check", dtype)

    def check_size(self, size: int) -> None:
        """Optional: raise `ArrayError` unless it supports this number of ranks. Default: it supports all."""
        self._call("check_size", size)

    def init(self, bucket: Bucket, comm: Communicator) -> State:
        """See `Algorithm.init`. Collective."""
        return self.algorithm.init(bucket, comm)

    def check_plan(self, plan: Plan) -> None:
        """Optional: raise `ArrayError` unless it can exchange these buckets. Default: it can exchange any."""
        self._call("check_plan", plan)

    def groups(self, tensors: Sequence[TensorSpec]) -> Sequence[int]:
        """Optional: the group of each tensor; a bucket has tensors of one group alone. Default: 0 for all.

        None is the same as 0 for all.
        """
        method = getattr(self.algorithm, "groups", None)
        found = None if method is None else method(tensors)
        return [0] * len(tensors) if found is None else list(found)

    def pending(self, state: State) -> Pending | None:
        """Optional: the part of the state that says whether an exchange outlives steps; see `Window.delay`.

        Default: the field `pending` of `state`; None if there is none.
        """
        method = getattr(self.algorithm, "pending", None)
        found: Pending | None = getattr(state, "pending", None) if method is None else method(state)
        return found

    def hold(self, bucket: Bucket, state: State) -> None:
        """Optional: keep what the bucket holds as one addend of the next exchange, and leave zeros in it.

        Default: raise `ArrayError`.
        """
        method = getattr(self.algorithm, "hold", None)
        if method is None:
            raise ArrayError(f"hold: {self.algorithm} keeps no addends; {HOLD_HINT} does")
        method(bucket, state)

    def communicates(self, step: int, state: State) -> bool:
        """Optional: whether the exchange of this step communicates; the same on all ranks. Default: True.

        Called between two exchanges, with the number of steps since the algorithm began.
        """
        method = getattr(self.algorithm, "communicates", None)
        return method is None or bool(method(step, state))

    def begin(self, bucket: Bucket, state: State) -> None:
        """Optional: prepare an exchange, on the caller's thread, before the bucket leaves. Default: nothing."""
        self._call("begin", bucket, state)

    def exchange(self, bucket: Bucket, comm: Communicator, state: State) -> None:
        """See `Algorithm.exchange`. Collective."""
        self.algorithm.exchange(bucket, comm, state)

    def skip(self, bucket: Bucket, state: State) -> None:
        """Optional: called in place of `exchange` in a step without communication, as in a stopped engine.

        Default: nothing; the bucket keeps what this rank has computed.
        """
        self._call("skip", bucket, state)

    def commit(self, bucket: Bucket, state: State) -> None:
        """Optional: write the result back, on the caller's thread, when the window closes.

        Default: nothing.
        """
        self._call("commit", bucket, state)

    @property
    def commits(self) -> bool:
        """Whether it defines `commit`."""
        return getattr(self.algorithm, "commit", None) is not None

    def restart(self, bucket: Bucket, state: State) -> None:
        """Optional: begin anew from the weights in the bucket, which the program has replaced on all ranks.

        What the state keeps of earlier weights becomes these, and momenta and residuals become zero. Steps are
        counted on, so that ranks continue to exchange in the same steps. It sends nothing. Default: nothing, for
        algorithms whose state keeps nothing of weights.
        """
        self._call("restart", bucket, state)

    @property
    def restarts(self) -> bool:
        """Whether it defines `restart`: its state keeps something of earlier weights."""
        core = core_of(self.algorithm)
        return self.payload == "weight" and getattr(core, "restart", None) is not None

    def _call(self, name: str, *args: Any) -> None:
        method = getattr(self.algorithm, name, None)
        if method is not None:
            method(*args)


def with_defaults(algorithm: Algorithm | WithDefaults) -> WithDefaults:
    """Return `algorithm` with defaults for its optional members."""
    return algorithm if isinstance(algorithm, WithDefaults) else WithDefaults(algorithm)


class Combinator:
    """Base class of algorithms that wrap another one, their field `algorithm`.

    A combinator has every member of `WithDefaults`. It defines those that are not here, or refuses algorithms
    that have them. Its state holds the state of the inner algorithm as its field `inner`.
    """

    algorithm: Algorithm

    @property
    def _inner(self) -> WithDefaults:
        return with_defaults(self.algorithm)

    def _with(self, algorithm: Algorithm) -> Algorithm:
        """A copy of this combinator around another algorithm."""
        changed: Any = replace(self, algorithm=algorithm)  # type: ignore[type-var]
        return changed  # type: ignore[no-any-return]

    @property
    def payload(self) -> Payload:
        """The payload of its algorithm."""
        return self._inner.payload

    @property
    def window(self) -> Window | Rounds:
        """The window of its algorithm."""
        return self._inner.window

    @property
    def phases(self) -> tuple[Algorithm, ...]:
        """The phases of its algorithm, each wrapped in this combinator."""
        return tuple(map(self._with, phases_of(self.algorithm)))

    def phase(self, step: int) -> Algorithm:
        """The phase of its algorithm, wrapped in this combinator."""
        return self._with(phase_of(self.algorithm, step))

    @property
    def lends(self) -> str | None:
        """See `WithDefaults`; that of its algorithm."""
        return self._inner.lends

    def lent(self, state: State) -> Array:
        """See `WithDefaults`; that of its algorithm."""
        return self._inner.lent(state.inner)

    @property
    def equal_start(self) -> bool:
        """Whether its algorithm needs equal weights when it begins."""
        return self._inner.equal_start

    def check(self, dtype: str) -> None:
        """Supports the dtypes of its algorithm."""
        self._inner.check(dtype)

    def check_plan(self, plan: Plan) -> None:
        """Supports the buckets of its algorithm."""
        self._inner.check_plan(plan)

    def groups(self, tensors: Sequence[TensorSpec]) -> Sequence[int]:
        """The groups of its algorithm."""
        return self._inner.groups(tensors)

    def pending(self, state: State) -> Pending | None:
        """See `WithDefaults`; that of its algorithm."""
        return self._inner.pending(state.inner)

    def communicates(self, step: int, state: State) -> bool:
        """Whether its algorithm communicates in this step."""
        return self._inner.communicates(step, state.inner)


def core_of(algorithm: Algorithm) -> Algorithm:
    """The innermost algorithm, without combinators."""
    return core_of(algorithm.algorithm) if isinstance(algorithm, Combinator) else algorithm


def name_of(algorithm: Algorithm) -> str:
    """The name of its class, with those of the algorithms that it wraps: "Every(DiLoCo)"."""
    inner = f"({name_of(algorithm.algorithm)})" if isinstance(algorithm, Combinator) else ""
    return type(algorithm).__name__ + inner


def phase_of(algorithm: Algorithm, step: int) -> Algorithm:
    """The algorithm that `algorithm` uses in this training step."""
    return with_defaults(algorithm).phase(step)


def phases_of(algorithm: Algorithm) -> tuple[Algorithm, ...]:
    """All algorithms that `algorithm` uses during training, in order."""
    return with_defaults(algorithm).phases


def runs_in_rounds(algorithm: Algorithm) -> bool:
    """Whether `algorithm` exchanges in `Rounds` in one of its phases."""
    return any(isinstance(with_defaults(phase).window, Rounds) for phase in phases_of(algorithm))


def exchanges_weights(algorithm: Algorithm) -> bool:
    """Whether weights differ between ranks in one of the phases of `algorithm`.

    They do where weights are exchanged, and where gradients stay local in some steps.
    """
    return any(with_defaults(phase).drifts for phase in phases_of(algorithm))


def check_size(algorithm: Algorithm, size: int) -> None:
    """Raise `ArrayError` unless all phases of `algorithm` support this number of ranks."""
    for phase in phases_of(algorithm):
        with_defaults(phase).check_size(size)


def pack(algorithm: Algorithm, tensors: Iterable[TensorSpec], *, bucket_bytes: int, alignment: int = 1) -> Plan:
    """Fill buckets as `Plan.pack` does, so that `algorithm` can exchange them."""
    tensors = list(tensors)
    groups = with_defaults(algorithm).groups(tensors)
    return Plan.pack(tensors, bucket_bytes=bucket_bytes, alignment=alignment, groups=groups)


def needs_groups(algorithm: Algorithm, tensors: Sequence[TensorSpec]) -> bool:
    """Whether some of these tensors may share no bucket."""
    return len(set(with_defaults(algorithm).groups(tensors))) > 1


# Checks of arguments --------------------------------------------------------------------------------


def check_algorithm_argument(owner: str, name: str, value: object) -> None:
    """Raise `ArrayError` unless `value` is an algorithm."""
    if isinstance(value, type) or not callable(getattr(value, "exchange", None)):
        hint = _how_to_make_an_algorithm(value)
        raise ArrayError(f"{owner}: {name} is {value!r}, expected an algorithm such as ByteGrad(){hint}")


def _how_to_make_an_algorithm(value: object) -> str:
    """How to make an algorithm of a value that is none, as the end of a message; "" if that is not known."""
    if isinstance(value, str):
        return f"; bagua_comm.algorithms.from_name({value!r}) makes one of a known name, such as 'bytegrad'"
    form = form_of_class(value, "GradientAllReduce(Quantized({}))", "GradientAllReduce({})")
    if hint := how_to_call(value, form):
        return hint
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
