"""The arguments of a call of a process group, in each form that `torch.distributed.ProcessGroup` takes.

Most of its methods have several signatures. One takes an object with the options of the call, and others take the
options themselves, by position or by name:

    reduce(tensors, opts)    reduce(tensor, root, op, timeout)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from .work import LaneWork

_OPTIONS = ("op", "root", "timeout")


class Options(NamedTuple):
    """The options of a call."""

    op: dist.ReduceOp | None = None
    """A reduction; None for the sum."""
    root: int = 0
    timeout_s: float | None = None
    """The time limit; None for that of the group."""
    asynchronous: bool = True


def in_any_form(*names: str) -> Callable[[Callable[..., LaneWork]], Callable[..., LaneWork]]:
    """Let a method take its arguments in any form, and get its options as `options`.

    Args:
        names: PyTorch's names of the arguments; of those that have two, both, as "tensors|tensor". Those of
            options come last: they are recognised by their types.
    """
    places = [name.split("|") for name in names if name not in _OPTIONS]
    accepted = {"opts", *(name for name in names if name in _OPTIONS)}

    def decorate(method: Callable[..., LaneWork]) -> Callable[..., LaneWork]:
        own = [*inspect.signature(method).parameters][1 : len(places) + 1]
        own_name = {alias: name for name, aliases in zip(own, places, strict=True) for alias in aliases}

        @functools.wraps(method)
        def call(self: object, *args: Any, **named: Any) -> LaneWork:
            given, values = args[: len(places)], args[len(places) :]
            if len(values) == 1 and not named and hasattr(values[0], "asyncOp"):  # as torch.distributed calls
                return method(self, *given, options=_combined(values[0], {}))
            rest = {own_name[name]: named.pop(name) for name in tuple(named) if name in own_name}
            options = _options(method.__name__, values, named, accepted)
            return method(self, *given, **rest, options=options)

        return call

    return decorate


def _options(call: str, values: Iterable[object], named: Mapping[str, object], accepted: set[str]) -> Options:
    """Return the options of a call, from what was given by position, and by name.

    Raises:
        TypeError: There are others, or one twice.
    """
    found: dict[str, Any] = {}
    for name, value in [*((_name_of(value), value) for value in values), *named.items()]:
        if value is None:
            continue
        if name not in accepted or name in found or ("opts" in found and name != "timeout"):
            raise TypeError(
                f"{call}: unexpected argument {name}={value!r}; expected {' or '.join(sorted(accepted))}, once"
            )
        found[name] = value
    return _combined(found.pop("opts", None), found)


def _combined(opts: object, found: Mapping[str, Any]) -> Options:
    """Return the options in an object of PyTorch, and others by name, which count first."""
    timeout: Any = found.get("timeout") or getattr(opts, "timeout", None)
    limited = timeout is not None and timeout > timedelta(0)
    return Options(
        found.get("op", getattr(opts, "reduceOp", None)),
        int(found.get("root", getattr(opts, "rootRank", 0))),
        timeout.total_seconds() if limited else None,
        getattr(opts, "asyncOp", True),
    )


def _name_of(value: object) -> str:
    """Return the name of an option, by the type of its value."""
    if isinstance(value, timedelta):
        return "timeout"
    if isinstance(value, int):
        return "root"
    return "op" if isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType)) else "opts"
