"""What a training keeps when its ranks change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ArrayError, CommError
from .changes import Callback, Change, History
from .snapshot.parts import Part

if TYPE_CHECKING:
    from .session import Session


@dataclass
class Commits:
    """What the commits of this process cost so far."""

    count: int = 0
    nbytes: int = 0
    """Bytes copied by the last one."""
    sent_bytes: int = 0
    """Bytes that the last one sent to the buddy."""
    last_ms: float = 0.0
    total_ms: float = 0.0

    def add(self, nbytes: int, sent_bytes: int, ms: float) -> None:
        """Count one commit."""
        self.count += 1
        self.nbytes, self.sent_bytes, self.last_ms = nbytes, sent_bytes, ms
        self.total_ms += ms


class State:
    """What `elastic.run` brings back when a rank has died: the objects and values of a training.

    Each part is an attribute: `state.model` is the model that was given, and `state.step += 1` replaces a plain
    value. All ranks give the same names.

    At the start all ranks get rank 0's. After a change of the ranks, all get what the last commit kept. What
    differs between ranks at a commit, marked or not, is copied to another rank as well, the buddy. If as many
    ranks train as before, a process that takes a place takes over what was the own of that rank. On another
    number of ranks, what is in `Own(...)` comes by its rule; of what differs without being marked, arrays of
    floats become the mean of all ranks', and everything else is rank 0's.

    The engine of an algorithm, and so `bagua_torch.DistributedDataParallel`, needs no line here: one that is made
    in the function that `elastic.run` calls is kept with the state.

    Args:
        parts: Objects with `state_dict` and `load_state_dict` (modules, optimizers, schedulers, samplers); arrays
            of NumPy or CuPy and tensors, which come back in place; plain values: None, bool, int, float, complex,
            str, bytes, and lists, tuples and dicts of these and of arrays. Any of them in `Own(value, rule)` if
            it belongs to its rank.

    Raises:
        ArrayError: A name is taken by this class, or an `Own` has no rule.
        UnsupportedError: Something cannot be kept; the message names it.

    >>> state = State(step=0, rates=[0.1, 0.01])
    >>> state.step += 1
    >>> state.step, state.rates
    (1, [0.1, 0.01])
    """

    def __init__(self, **parts: Any) -> None:
        taken = [name for name in parts if name.startswith("_") or hasattr(State, name)]
        if taken:
            raise ArrayError(f"State: {taken[0]!r} cannot be the name of a part; it is a name of State itself")
        own = self.__dict__
        own["_parts"] = {name: Part(name, given) for name, given in parts.items()}
        own["_callbacks"] = []
        own["_session"] = None
        own["_history"] = History()
        own["_commits"] = Commits()

    def commit(self) -> None:
        """Keep everything as it is now, in memory: what training goes on from if a rank dies from here on.

        Collective. Call it between two steps. It copies all parts once; what differs between ranks goes to the
        buddy. A rank that dies in the middle leaves the commit before as it was, on all ranks.

        Raises:
            ArrayError: A part cannot be kept any more, or a training step is under way; on all ranks alike. The
                commit before is still there.
            UnsupportedError: The same, for what no checkpoint can hold.
            CommError: A rank died, or it is called outside of the function that `elastic.run` calls. Let it pass:
                `elastic.run` goes on from there.
        """
        self._running("commit").commit()

    @property
    def commits(self) -> Commits:
        """What commits cost so far on this process: bytes and milliseconds."""
        commits: Commits = self.__dict__["_commits"]
        return commits

    def on_change(self, callback: Callback) -> Callback:
        """Have `callback(change)` called on every rank when ranks have changed, before training is entered again.

        The state is that of the last commit then, and what the callback changes is kept. It may be used as a
        decorator. An error in it ends the training on this rank.

        Args:
            callback: Called with a `Change`.
        """
        if not callable(callback):
            raise ArrayError(f"on_change: callback is {callback!r}, expected a function of a Change")
        self.__dict__["_callbacks"].append(callback)
        return callback

    @property
    def history(self) -> list[Change]:
        """The changes of the ranks so far, the oldest first; see `Change`."""
        history: History = self.__dict__["_history"]
        return history.as_list()

    def _running(self, call: str) -> Session:
        session: Session | None = self.__dict__["_session"]
        if session is None:
            raise CommError(f"{call}: there is no training; call it in the function that elastic.run calls")
        return session

    def __getattr__(self, name: str) -> Any:
        """The part of this name."""
        parts: dict[str, Part] = self.__dict__.get("_parts", {})
        if name not in parts:
            raise AttributeError(f"State has no part {name!r}, only {', '.join(map(repr, parts)) or 'none'}")
        return parts[name].value

    def __setattr__(self, name: str, value: Any) -> None:
        """Replace a plain value."""
        parts: dict[str, Part] = self.__dict__["_parts"]
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
        return [*super().__dir__(), *self.__dict__["_parts"]]

    def __repr__(self) -> str:
        kinds = (f"{name}={type(part.value).__name__}" for name, part in self.__dict__["_parts"].items())
        return f"<State {', '.join(kinds)}>"
