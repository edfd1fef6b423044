"""What an engine's algorithm keeps, as a tree for `Checkpoints.save` that loads on any number of ranks.

Arrays that are alike on all ranks are shared. Residuals of error feedback come to another number of ranks as
their mean, because the mean over the ranks is what later averages make up for. Replicas of weights are made anew
from the weights. What is none of these, or is of a part of a bucket, loads only on as many ranks as saved it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..algorithms.state import PER_BUCKET, StateHeader, relabelled
from ..engine import Engine
from ..errors import ArrayError
from .trees import Own, Rule

_OWN: dict[str, Rule] = {"mean": "mean", "anew": "drop"}


def tree_of_engine(engine: Engine) -> dict[str, Any]:
    """The algorithm's state as a tree in which what differs between ranks is marked.

    Call it between steps, and before the weights are copied, as `Engine.state_dict`.
    """
    saved, rules = engine.state_dict(), engine.reshape_rules()
    numbers: dict[str, dict[str, Any]] = {name: {} for name in saved["tensors"]}
    alike: dict[str, dict[str, Any]] = {}
    parts: dict[str, dict[str, dict[str, Any]]] = {"mean": {}, "anew": {}}
    fixed: dict[str, dict[str, Own]] = {}
    for name, pieces in saved["tensors"].items():
        for path, value in pieces.items():
            array = path.removesuffix(PER_BUCKET)  # what is saved beside an array goes where it goes
            rule = rules[name].get(array)
            if array + PER_BUCKET in pieces and rule != "anew":
                rule = None  # each rank has another part of its bucket
            if not hasattr(pieces[array], "dtype"):
                numbers[name][path] = value
            elif rule == "alike":
                alike.setdefault(name, {})[path] = value
            elif rule in parts:
                parts[rule].setdefault(name, {})[path] = value
            else:
                fixed.setdefault(name, {})[path] = Own(value)
    facts = {name: saved[name] for name in (*StateHeader._fields, "digest")}
    return {
        "facts": Own({**facts, "numbers": numbers}, "first"),
        "alike": alike,
        **{name: Own(part, _OWN[name]) for name, part in parts.items()},
        "fixed": fixed,
    }


def state_of_tree(engine: Engine, tree: Any) -> dict[str, Any]:
    """What `Engine.load_state_dict` takes, from what was saved of `tree_of_engine`.

    Raises:
        ArrayError: It is something else.
    """
    parts = ("facts", "alike", "mean", "anew", "fixed")
    if not isinstance(tree, Mapping) or set(tree) != set(parts):
        raise ArrayError(f"load_engine: the tree is a {type(tree).__name__}, expected what tree_of_engine gave")
    facts = dict(tree["facts"])
    tensors = {name: dict(numbers) for name, numbers in facts.pop("numbers").items()}
    for part in parts[1:]:
        for name, pieces in (tree[part] or {}).items():
            tensors[name].update(pieces)
    rank, size = engine.place
    return relabelled({**facts, "tensors": tensors}, rank=rank, size=size)


def load_engine(engine: Engine, tree: Any) -> None:
    """Go on from what was saved of `tree_of_engine`, also on another number of ranks.

    Collective. Load the weights first: replicas are made from them.

    Raises:
        ArrayError: The tree is something else, or does not fit the engine's algorithm and tensors.
    """
    engine.load_state_dict(state_of_tree(engine, tree))


# In memory, while training goes on ------------------------------------------------------------------------


def keep_engine(engine: Engine) -> dict[str, Any]:
    """As `tree_of_engine`, for a commit: alike on all ranks where the algorithm's state is.

    What no other number of ranks can load is dropped there, and made anew.

    Raises:
        ArrayError: A training step is under way.
    """
    engine.complete_step()
    tree = tree_of_engine(engine)
    fixed = {
        name: {path: Own(own.value, "drop") for path, own in pieces.items()}
        for name, pieces in tree["fixed"].items()
    }
    return {**tree, "facts": {**tree["facts"].value, "rank": 0}, "fixed": fixed}


def take_engine(engine: Engine, kept: Mapping[str, Any]) -> str | None:
    """Go on from what `keep_engine` gave; returns why not, if it is of another algorithm, or other ranks' alone.

    Collective, unless it is.

    Raises:
        ArrayError: It does not fit the engine's tensors.
    """
    theirs = kept["facts"]["algorithm"]
    if theirs != repr(engine.algorithm):
        return f"{theirs} was committed, and now the algorithm is {engine.algorithm}"
    fixed = {
        name: {path: own.value for path, own in pieces.items() if own.value is not None}
        for name, pieces in kept["fixed"].items()
    }
    parts = {name: kept[name].value for name in _OWN}
    try:
        load_engine(engine, {**kept, **parts, "fixed": fixed})
    except ArrayError as exc:  # on all ranks alike, and the engine is as it was
        if fixed == kept["fixed"] or not any(kept["fixed"].values()):
            raise
        return f"on another number of ranks nothing can be made of what it kept: {exc}"
    return None
