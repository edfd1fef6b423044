"""`State`: the objects and values of a training that survive a change of its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..comm.public_methods import public_method
from ..errors import ArrayError, CommError
from .changes import Callback, Change
from .snapshot.parts import Part


@dataclass
class Commits:
    """The costs of the commits of this process so far."""

    count: int = 0
    nbytes: int = 0
    """Bytes that the last one copied."""
    sent_bytes: int = 0
    """Bytes that the last one sent to the buddy."""
    last_ms: float = 0.0
    total_ms: float = 0.0

    def add(self, nbytes: int, sent_bytes: int, ms: float) -> None:
        """Count one commit."""
        self.count += 1
        self.nbytes, self.sent_bytes, self.last_ms = nbytes, sent_bytes, ms
        self.total_ms += ms


class Committer(Protocol):
    """The training in progress; see `session.Session`."""

    def commit(self) -> None:
        """Commit the state. Collective."""

    def register_parts(self, given: Mapping[str, object]) -> None:
        """Commit and restore these too. Collective."""


@dataclass
class Internals:
    """The fields of a `State`, in one attribute: its other attributes are parts."""

    parts: dict[str, Part]
    callbacks: list[Callback] = field(default_factory=list)
    history: list[Change] = field(default_factory=list)
    """The changes of the training, the oldest first."""
    noticed_s: float = 0.0
    """When this process noticed the last of them, by `time.monotonic`."""
    commits: Commits = field(default_factory=Commits)
    session: Committer | None = None
    """The training in progress."""


class State:
    """The objects and values of a training, which `elastic.run` restores when a rank has died.

    Each part is an attribute: `state.model` is the model that was given, and `state.step += 1` replaces a plain
    value. All ranks give the same names.

    At the start all ranks receive the values of rank 0. After a change of the ranks, all receive those of the
    last commit. Values that differ between ranks at a commit, marked or not, are also copied to another rank,
    the buddy. If the number of ranks is unchanged, a replacement process receives that rank's private state. On
    another number of ranks, each `Own(...)` is restored by its rule. Among unmarked values that differ, arrays
    of floats become their mean over all ranks, and everything else becomes that of rank 0.

    The engine of an algorithm, and so `bagua_torch.DistributedDataParallel`, need not be given: one that is
    created in the function that `elastic.run` calls is restored with the state. Give a model that `fully_shard`
    shards, and its optimizer, to `register` in that function.

    Args:
        parts: Objects with `state_dict` and `load_state_dict` (modules, optimizers, schedulers, samplers); arrays
            of NumPy or CuPy and tensors, which are restored in place; plain values: None, bool, int, float,
            complex, str, bytes; and lists, tuples and dicts of all these. Such a container is replaced by one
            with the same objects and arrays, whose values are restored. Wrap private state of a rank in
            `Own(value, rule)`.

    Raises:
        ArrayError: A name is taken by this class, or an `Own` has no rule.
        UnsupportedError: A value cannot be saved; the message names it.

    >>> state = State(step=0, rates=[0.1, 0.01])
    >>> state.step += 1
    >>> state.step, state.rates
    (1, [0.1, 0.01])
    """

    _internals: Internals

    def __init__(self, **parts: object) -> None:
        check_names(parts)
        self.__dict__["_internals"] = Internals({name: Part(name, given) for name, given in parts.items()})

    @public_method("State.commit")
    def commit(self) -> None:
        """Save everything in memory; training resumes from the last commit if a rank dies.

        Collective. Call it between two steps. It copies all parts once; values that differ between ranks are
        sent to the buddy. If a rank dies meanwhile, the previous commit stays valid on all ranks.

        Raises:
            ArrayError: A part cannot be saved any more, or a training step is in progress; on all ranks.
                The previous commit is still valid.
            UnsupportedError: The same, for values that no checkpoint can hold.
            CommError: A rank died, or it is called outside of the function that `elastic.run` calls. Do not catch
                it: `elastic.run` resumes from there.
        """
        session = self._internals.session
        if session is None:
            raise CommError("commit: there is no training; call it in the function that elastic.run calls")
        session.commit()

    @public_method("State.register")
    def register(self, **parts: object) -> None:
        """Commit objects that the function has made, as well, and restore them from the last commit.

        Collective. Call it in the function that `elastic.run` calls, each time with the same names, before the
        first step. It is for a model that `fully_shard` has sharded over the ranks of `comm`, and its optimizer:
        each rank receives its slabs of the sharded tensors, on any number of ranks, from the memory of the ranks
        that hold them. At the start nothing is restored, and nothing is broadcast.

        A commit before the first call keeps the objects as they were; a later one is refused until all are
        registered again.

        Args:
            parts: Objects with `state_dict` and `load_state_dict`, and all else that `State` takes.

        Raises:
            ArrayError: A name is taken, or an object does not fit what was committed under its name; or ranks
                give other names, or sharded tensors of other shapes or dtypes. Raised on all ranks.
            UnsupportedError: An object cannot be saved; on all ranks.
            CommError: A rank died, or it is called outside of the function that `elastic.run` calls.
        """
        session = self._internals.session
        if session is None:
            raise CommError("register: there is no training; call it in the function that elastic.run calls")
        session.register_parts(parts)

    @property
    def commits(self) -> Commits:
        """The costs of the commits of this process so far, in bytes and milliseconds."""
        return self._internals.commits

    def on_change(self, callback: Callback) -> Callback:
        """Register `callback(change)`, called on every rank when ranks have changed, before training resumes.

        The state is that of the last commit then, and modifications by the callback are kept. Can be used as a
        decorator. An error in the callback ends the training on this rank.

        Args:
            callback: Called with a `Change`.
        """
        if not callable(callback):
            raise ArrayError(f"on_change: callback is {callback!r}, expected a function of a Change")
        self._internals.callbacks.append(callback)
        return callback

    @property
    def history(self) -> list[Change]:
        """The changes of the ranks so far, the oldest first; see `Change`."""
        return list(self._internals.history)

    def __getattr__(self, name: str) -> Any:
        """The value of a part."""
        parts = self._internals.parts if "_internals" in self.__dict__ else {}
        if name not in parts:
            raise AttributeError(f"State has no part {name!r}, only {', '.join(map(repr, parts)) or 'none'}")
        return parts[name].value

    def __setattr__(self, name: str, value: object) -> None:
        """Replace a plain value."""
        parts = self._internals.parts
        if name not in parts:
            known = ", ".join(map(repr, parts)) or "none"
            raise AttributeError(f"State has no part {name!r}, only {known}; give all parts to State(...)")
        part = parts[name]
        if part.is_plain or value is part.value:
            part.value = value
            return
        how = "change its values in place" if part.is_array else "load another state into it"
        raise ArrayError(f"State: {name} is a {type(part.value).__name__}, which cannot be replaced; {how}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._internals.parts]

    def __repr__(self) -> str:
        types = (f"{name}={type(part.value).__name__}" for name, part in self._internals.parts.items())
        return f"<State {', '.join(types)}>"


def check_names(names: Iterable[str]) -> None:
    """Raise `ArrayError` if one of the names of parts is a name of `State` itself."""
    taken = [name for name in names if name.startswith("_") or hasattr(State, name)]
    if taken:
        raise ArrayError(f"State: {taken[0]!r} cannot be the name of a part; it is a name of State itself")


def internals_of(state: State) -> Internals:
    """The interface of a state to the loop and the session; parts may have any other name."""
    return state._internals
