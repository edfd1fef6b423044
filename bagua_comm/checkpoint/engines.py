"""The state of an engine's algorithm, as a tree for `Checkpoints.save` that loads on any number of ranks.

Arrays that are equal on all ranks are shared. On another number of ranks, residuals of error feedback become
their mean, since later averages compensate the mean over the ranks. Replicas of weights are recreated from the
weights. All other state is dropped, and engines that need it refuse the tree. State of parts of buckets, which
depend on the nodes, loads only on the same nodes; elsewhere residuals begin with zeros, replicas are recreated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..algorithms.parts import PER_BUCKET, described
from ..algorithms.state import MOVED, StateHeader, rules_of, with_tensors
from ..engine import Engine
from ..errors import ArrayError
from .trees import Own, Rule

_OWN: dict[str, Rule] = {"mean": "mean", "anew": "drop"}


def tree_of_engine(engine: Engine) -> dict[str, Any]:
    """The algorithm's state as a tree, with per-rank values marked.

    Call it between steps, and before the weights are copied, as `Engine.state_dict`.
    """
    saved, pairs = engine.state_dict(), zip(engine.buckets, engine.states, strict=True)
    rules = {name: rules_of(state) for bucket, state in pairs for name in bucket.views}
    numbers: dict[str, dict[str, Any]] = {name: {} for name in saved["tensors"]}
    alike: dict[str, dict[str, Any]] = {}
    parts: dict[str, dict[str, dict[str, Any]]] = {"mean": {}, "anew": {}}
    fixed: dict[str, dict[str, Own]] = {}
    for name, pieces in saved["tensors"].items():
        for path, value in pieces.items():
            array = path.removesuffix(PER_BUCKET)  # values saved beside an array follow its rule
            rule = rules[name].get(array)
            if array + PER_BUCKET in pieces and rule != "anew":  # each rank has a different part of its bucket
                rule = "anew" if rule == "mean" and described(pieces[array + PER_BUCKET]) else None
            if not hasattr(pieces[array], "dtype"):
                numbers[name][path] = value
            elif rule == "alike":
                alike.setdefault(name, {})[path] = value
            elif rule in parts:
                parts[rule].setdefault(name, {})[path] = value
            else:
                fixed.setdefault(name, {})[path] = Own(value, "drop")
    facts = {name: saved[name] for name in (*StateHeader._fields, "digest")}
    return {
        "facts": Own({**facts, "numbers": numbers}, "first"),
        "alike": alike,
        **{name: Own(part, _OWN[name]) for name, part in parts.items()},
        "fixed": fixed,
    }


def state_of_tree(tree: object) -> dict[str, Any]:
    """The argument of `Engine.load_state_dict` from a tree of `tree_of_engine`.

    Raises:
        ArrayError: The tree is not from `tree_of_engine`, or it loads only on the number of ranks that saved it.
    """
    parts = ("facts", "alike", "mean", "anew", "fixed")
    if not isinstance(tree, Mapping) or set(tree) != set(parts):
        raise ArrayError(
            f"load_engine: the tree is a {type(tree).__name__}, expected the result of tree_of_engine"
        )
    facts = dict(tree["facts"])
    tensors = {name: dict(numbers) for name, numbers in facts.pop("numbers").items()}
    for part in parts[1:]:
        for name, pieces in (tree[part] or {}).items():
            tensors[name].update(pieces)
            if lost := [path for path, value in pieces.items() if value is None]:
                raise ArrayError(
                    f"load_engine: {lost[0].removesuffix(PER_BUCKET)!r} of {name!r} loads only on "
                    f"{facts['size']} ranks, as many as saved it; to go on without it, load the weights alone, "
                    "into the module itself (`.module` of the wrapper)"
                )
    return with_tensors({**facts, MOVED: True}, tensors)


def load_engine(engine: Engine, tree: object) -> None:
    """Load a tree of `tree_of_engine`, also on another number of ranks, or on other nodes.

    Collective. Load the weights first: replicas are made from them.

    Raises:
        ArrayError: The tree is not from `tree_of_engine`, or does not fit the engine's algorithm and tensors.
    """
    engine.load_state_dict(state_of_tree(tree))


# In memory, while training goes on ------------------------------------------------------------------------


def keep_engine(engine: Engine) -> dict[str, Any]:
    """As `tree_of_engine`, for a commit: equal on all ranks where the algorithm's state is.

    Raises:
        ArrayError: A training step is in progress.
    """
    engine.complete_step()
    tree = tree_of_engine(engine)
    return {**tree, "facts": {**tree["facts"].value, "rank": 0}}


def take_engine(engine: Engine, kept: Mapping[str, Any]) -> str | None:
    """Load the result of `keep_engine`; return the reason if it is of another algorithm, or only of other nodes.

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
    except ArrayError as exc:  # the same on all ranks, and the engine is unchanged
        if not any(kept["fixed"].values()):
            raise
        return f"on these ranks nothing can be made of what it kept: {exc}"
    return None
