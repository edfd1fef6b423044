"""Hooks: functions that are called before and after each call of a communicator, and when one fails.

    hook = comm.on(before=print)        # prints a `CallView` before every call
    hook.remove()

A hook sees the calls of its communicator and of all communicators derived from it by `dup`, `split`, `subgroup`,
`by_node` or `lane`, earlier or later. So a hook on the communicator of an engine sees the calls of the engine.
Hooks of calls on a lane run on the thread of the lane.

`before` runs before anything is sent. Its exception ends the call and is raised to the caller. The other ranks
would wait for this one, so it must then raise on all ranks. An exception of `after` is raised to the caller, too;
the call is complete by then, and the communicator remains usable. An exception of `failed` becomes a warning,
since the error of the call is raised. Hooks do not see the calls that hooks make.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from . import arrays
from .arrays import Array, Op
from .bucket import Bucket
from .errors import ArrayError
from .flight.entries import is_of

_log = logging.getLogger(__name__)


class Ranks(Protocol):
    """A communicator, to its hooks: `Communicator` is one."""

    rank: int
    size: int

    def allreduce(self, x: Array, *, op: Op) -> Array:
        """See `Communicator.allreduce`. Collective."""

    def broadcast_object(self, obj: object, *, root: int) -> Any:
        """See `Communicator.broadcast_object`. Collective."""


@dataclass(frozen=True)
class CallView:
    """A call as hooks see it.

    Attributes:
        comm: The communicator.
        name: The method, such as "allreduce".
        number: The number of the call, from 1 on, among the collective calls of its communicator or among the
            other ones.
        collective: Whether all ranks of its communicator make it.
        group: The name of its communicator, the same on all ranks; "world" for that of `connect`.
        detail: Further arguments, such as op, root and codec.
        x: The array that this rank sends, which hooks must not modify; None if it sends none. The first one of
            several messages.
        bucket: The bucket that an engine exchanges by this call; None outside of an engine.
        step: The training step of the bucket, counted from 0; None outside of an engine.
        result: In `after`, the array that the call filled on this rank; None if there is none.
        seconds: In `after` and `failed`, the duration of the call.
        error: In `failed`, the exception.
    """

    comm: Ranks = field(repr=False)
    name: str
    number: int
    collective: bool
    group: str
    detail: Mapping[str, Any]
    x: Array | None
    bucket: Bucket | None = field(default=None, repr=False)
    step: int | None = None
    result: Array | None = None
    seconds: float | None = None
    error: BaseException | None = None

    def __str__(self) -> str:
        array = "" if self.x is None else f"{arrays.dtype_name(self.x.dtype)}{list(self.x.shape)}"
        return f"{self.name}({array}) #{self.number} of {self.group}"


Listener = Callable[[CallView], object]
"""A function that `Communicator.on` registers."""


@dataclass(frozen=True, eq=False)
class Hook:
    """The handle that `Communicator.on` returns."""

    before: Listener | None
    after: Listener | None
    failed: Listener | None
    group: str
    """The name of the communicator. The names of those derived from it begin with it."""
    hooks: Hooks = field(repr=False)

    def remove(self) -> None:
        """Remove the functions; removing them again does nothing."""
        self.hooks.all = tuple(each for each in self.hooks.all if each is not self)

    def sees(self, group: str) -> bool:
        """Whether the hook sees the calls of the communicator of this name."""
        return is_of(group, self.group)


class Hooks:
    """The hooks on a communicator and those derived from it."""

    def __init__(self) -> None:
        self.all: tuple[Hook, ...] = ()
        """Replaced as a whole, so that other threads can read it at any time."""
        self._inside = threading.local()

    def add(self, group: str, before: Listener | None, after: Listener | None, failed: Listener | None) -> Hook:
        """Add a hook on the communicator `group`; see `Communicator.on`."""
        given = {"before": before, "after": after, "failed": failed}
        for name, function in given.items():
            if function is not None and not callable(function):
                raise ArrayError(f"on: {name} is {function!r}, expected a function of a CallView")
        if before is after is failed is None:
            raise ArrayError("on: there is nothing to call; give before=, after= or failed=")
        hook = Hook(before, after, failed, group, self)
        self.all = (*self.all, hook)
        return hook

    def call(self, moment: Literal["before", "after", "failed"], view: CallView) -> None:
        """Call the functions of this moment, unless the call was made by a hook."""
        if getattr(self._inside, "a_hook", False):
            return
        self._inside.a_hook = True
        try:
            for hook in self.all:
                function = getattr(hook, moment)
                if function is not None and hook.sees(view.group):
                    function(view)
        except Exception as exc:
            if moment != "failed":
                raise
            warnings.warn(f"a hook failed after {view} had failed: {exc!r}", RuntimeWarning, stacklevel=4)
        finally:
            self._inside.a_hook = False


# ---------------------------------------------------------------------------------------------------
# NaN and infinity
# ---------------------------------------------------------------------------------------------------


class NanWatch:
    """A hook that finds the first NaN or infinity that a rank is about to send.

    `comm.on(before=NanWatch())` checks every floating-point array before it is sent. The message names the rank
    and the element, and the bucket, parameter and step of an engine or a DistributedDataParallel.

    The check costs a pass over the array; for a device array the host waits for the device. With action "raise",
    the ranks also agree before every collective call, by a small allreduce.

    Args:
        action: "raise": raise `ArrayError` before a byte is sent, on all ranks, or on the sender of a message
            between two ranks. The communicator remains usable. "log": log an ERROR to the logger "bagua_comm",
            once on each rank, and send the array.

    Attributes:
        found: The first finding, as text; None if there is none.

    >>> from bagua_comm.testing import run_ranks
    >>> def body(comm):
    ...     comm.on(before=NanWatch())
    ...     try:
    ...         comm.allreduce(np.array([1, np.nan if comm.rank else 2.0]))
    ...     except ArrayError as exc:
    ...         return str(exc)
    >>> run_ranks(2, body)[0]
    'allreduce(float64[2]) #1 of world: rank 1 is about to send nan, in element 1 of an array of shape [2]'
    """

    def __init__(self, action: Literal["raise", "log"] = "raise") -> None:
        if action not in ("raise", "log"):
            raise ArrayError(f"NanWatch: action is {action!r}, expected 'raise' or 'log'")
        self.action = action
        self.found: str | None = None

    def __call__(self, call: CallView) -> None:
        """Check the array that is about to be sent."""
        mine = _first_in(call)
        text = None if mine is None else f"{call}: rank {call.comm.rank} is about to send {mine}"
        if self.action == "log":
            if text is not None and self.found is None:
                _log.error("%s", text)
            self.found = self.found or text
            return
        if call.collective:
            text = _of_first_rank(call.comm, text)
        if text is not None:
            self.found = self.found or text
            raise ArrayError(text)


def _of_first_rank(comm: Ranks, text: str | None) -> str | None:
    """Return the text of the first rank that has one; None if no rank has. Collective."""
    mine = comm.rank if text is not None else comm.size
    first = int(comm.allreduce(np.array(mine), op="min"))
    if first == comm.size:
        return None
    found: str = comm.broadcast_object(text, root=first)
    return found


def _first_in(call: CallView) -> str | None:
    """Describe the first NaN or infinity that the call is about to send; None if there is none."""
    x, bucket = call.x, call.bucket
    if bucket is not None and (x is None or not _is_float(x)):
        x = bucket.flat  # the array that is sent is encoded
    if x is None or not _is_float(x):
        return None
    at = _first_bad(x)
    if at is None:
        return None
    if bucket is None:
        return f"{x.reshape(-1)[at]}, in element {at} of an array of shape {list(x.shape)}"
    where = f"bucket {bucket.index} in step {call.step}"
    for name, view in bucket.views.items():
        inside = _first_bad(view)
        if inside is not None:
            value = view.reshape(-1)[inside]
            return f"{value}, in parameter {name!r}, element {inside} of shape {list(view.shape)}, of {where}"
    return f"{x.reshape(-1)[at]}, in element {at} of an array made from {where}"


def _is_float(x: Array) -> bool:
    return arrays.dtype_name(x.dtype) in arrays.FLOATS or x.dtype.kind == "c"


def _first_bad(x: Array) -> int | None:
    """Return the index of the first element of the flattened `x` that is not finite; None if all are."""
    if arrays.dtype_name(x.dtype) == "bfloat16":  # not all libraries support it; an exponent of ones
        bad = (x.reshape(-1).view(np.uint16) & 0x7F80) == 0x7F80
    else:
        bad = ~arrays.namespace(x).isfinite(x.reshape(-1))
    return int(bad.argmax()) if bool(bad.any()) else None
