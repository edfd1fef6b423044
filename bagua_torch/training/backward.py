"""Watching backward passes: when one begins, which gradients are complete, and when it has ended.

This file knows PyTorch's autograd and nothing of ranks, buckets or streams. Each parameter has two hooks, which
do little, since models have many small parameters: a tensor hook (its gradient was computed), and one of
`register_post_accumulate_grad_hook` (it was accumulated). The last of these tells the end of a pass, if all
parameters got a gradient; else a callback of the autograd engine does, like that of PyTorch's own FSDP.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ..errors import MisuseError

Callback = TypeVar("Callback", bound=Callable[..., Any])


class BackwardWatch:
    """Calls back in the course of each backward pass over `parameters`.

    The watch follows a pass only while it is `armed`. It disarms itself when a pass has ended; a new watch is not
    armed. A pass ends when all parameters have a gradient, or when PyTorch has nothing left to compute in it. A
    pass that another pass starts (reentrant checkpoints do that) is a pass of its own, if it computes a gradient
    before the outer one does.

    Gradients that a pass accumulates while the watch is not armed are in `strays`, unless the pass goes through
    an output of which `leave_at` was called, or `leaves` is set.

    Bound methods among the callbacks are held weakly, so that a watch keeps no object alive. Once the object is
    gone, its callback does nothing. What a callback raises, `backward()` raises. `torch.autograd.grad` of
    parameters raises `MisuseError` while the watch is armed: it accumulates nothing.

    Args:
        parameters: The parameters to watch, by name.
        groups: Their names, in groups of which each name is in one.
        began: Called before the first gradient of an armed pass is accumulated.
        before: Called before a gradient is accumulated in a pass that is not followed, with the name.
        after: Called when the last gradient of a group is accumulated in an armed pass, with the group's index.
        ended: Called after the last gradient of an armed pass, with the names of all parameters that got a
            gradient, and whether another pass started this one and goes on.
        came: Called when a pass comes to an output of which `arm_at` or `leave_at` was called.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: Sequence[Sequence[str]],
        *,
        began: Callable[[], None],
        before: Callable[[str], None],
        after: Callable[[int], None],
        ended: Callable[[set[str], bool], None],
        came: Callable[[], None] = lambda: None,
    ) -> None:
        self.armed = False
        """Whether the pass that goes on, or else the next one, is followed."""
        self.leaves = False
        """Whether passes that are not followed are meant to be so."""
        self.strays: dict[str, int] = {}
        """The parameters that got a gradient in a pass that should have been followed; their versions then."""
        self._begun = self._computed = False  # whether `began` was called, and a gradient computed
        self._task = -1  # PyTorch's number of the pass in which the latest hook ran
        self._left_task = -1  # PyTorch's number of the latest pass that is left alone
        self.count = 0
        """How many parameters are watched."""
        self.began, self.before = _weakly(began), _weakly(before)
        self.after, self.ended, self.came = _weakly(after), _weakly(ended), _weakly(came)
        self._owner = weakref.ref(ended.__self__) if isinstance(ended, MethodType) else _nobody
        self._by_name: dict[str, _Hooks] = {}
        self._hooks: list[Any] = []
        # As long as these are here, all gradients are accumulated on the stream that was current then.
        self._edges: list[Any] = []
        self.add(parameters, groups)

    def add(self, parameters: Mapping[str, nn.Parameter], groups: Sequence[Sequence[str]]) -> None:
        """Watch these parameters, too; `groups` has the names of all. Forget the pass that has begun, if any."""
        self.count += len(parameters)
        self._by_name.update((name, _Hooks(self, name)) for name in parameters)
        self.regroup(groups)
        for name, parameter in parameters.items():
            hooked: Any = parameter  # torch leaves these methods untyped
            self._hooks.append(hooked.register_hook(self._by_name[name].computed))
            self._hooks.append(hooked.register_post_accumulate_grad_hook(self._by_name[name].accumulated))
            self._edges.append(get_gradient_edge(parameter))

    def regroup(self, groups: Sequence[Sequence[str]]) -> None:
        """Watch the same parameters in other groups, and forget the pass that has begun, if one has."""
        self._groups = [_Group(index, len(names)) for index, names in enumerate(groups)]
        for group, names in zip(self._groups, groups, strict=True):
            for name in names:
                self._by_name[name].group = group
        self.reset()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def arm_at(self, output: Any) -> None:
        """Follow every backward pass that goes through `output`, which a module returned."""

        def reached(_: torch.Tensor) -> None:
            before, complete = self.armed, self.complete
            self.armed = True
            self.came()
            queue_callback(lambda: self._came_by(complete, armed=before))

        _hook(output, reached)

    def _came_by(self, complete: set[str], *, armed: bool) -> None:
        """A pass has ended that came by an output; `complete` and `armed` are what they were before it did."""
        if not self._begun:  # else `_pass_has_ended` comes next
            self.armed = armed and complete is self.complete

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave_at(self, output: Any) -> None:
        """Expect that passes through `output`, which a module returned, are not followed."""

        def reached(_: torch.Tensor) -> None:
            self._left_task = torch._C._current_graph_task_id()
            self.came()

        _hook(output, reached)

    def stray(self, name: str, parameter: torch.Tensor) -> None:
        """A gradient was accumulated in a pass that is not followed: note it, unless that is as it should be."""
        task = torch._C._current_graph_task_id()
        if task == self._left_task or any(watch.follows(task) for watch in watches_of(parameter)):
            return
        if _inside_a_pass():  # as in a reentrant checkpoint of a pass that may be left alone
            self._left_task = task
            return
        self.strays[name] = parameter._version

    def follows(self, task: int) -> bool:
        """Whether the pass of this number is, or was, followed by this watch."""
        return task == self._task

    @property
    def unfinished(self) -> bool:
        """Whether a pass has begun that has not ended: it goes on, or it has failed."""
        return bool(self.complete)

    @property
    def owner(self) -> object | None:
        """The object whose method `ended` is, if it is a method and the object is still there."""
        return self._owner()

    def begin(self, *, computed: bool) -> None:
        """A hook of an armed pass runs, and nothing was accumulated yet; `computed`: a gradient was computed."""
        task = torch._C._current_graph_task_id()
        if task != self._task:  # else a pass that has failed would tell what this one computes
            self._task, self._computed = task, False
        self._computed = self._computed or computed
        complete = self.complete
        queue_callback(lambda: self._pass_has_ended(complete))
        if not self._begun:
            self._begun = True
            self.began()

    def _pass_has_ended(self, complete: set[str]) -> None:
        """PyTorch has nothing left to compute in the pass of `complete`; it may have ended before."""
        if complete is not self.complete:
            return
        if self._computed and not complete:
            self._forget_pass()
            raise MisuseError(
                "DistributedDataParallel: torch.autograd.grad of parameters is not supported; expected that "
                "backward() accumulates their gradients"
            )
        self.end()

    def end(self) -> None:
        """End the pass now: the caller knows that no gradient is to come."""
        complete = self.complete
        self.reset()
        self.armed = _inside_a_pass()  # the outer pass goes on
        self.ended(complete, self.armed)

    def reset(self) -> None:
        """Disarm, and forget the pass that has begun, if one has."""
        self.armed = False
        self._forget_pass()

    def _forget_pass(self) -> None:
        self._begun = self._computed = False
        self.complete: set[str] = set()
        """The parameters that got a gradient in this pass so far; another set in each pass."""
        for group in self._groups:
            group.missing = group.size

    def remove(self) -> None:
        """Remove all hooks; the watch calls back no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._edges.clear()


class _Group:
    """How many gradients of a group are missing in this pass."""

    __slots__ = ("index", "missing", "size")

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.size = self.missing = size


class _Hooks:
    """The two hooks of one parameter, which autograd runs one behind the other."""

    __slots__ = ("_made", "_name", "group", "watch")
    group: _Group

    def __init__(self, watch: BackwardWatch, name: str) -> None:
        self.watch, self._name = watch, name
        self._made = True

    def computed(self, gradient: torch.Tensor | None) -> None:
        """The gradient is there. A Function may make none, and then the other hook runs all the same."""
        watch = self.watch
        self._made = made = gradient is not None
        if watch.armed:
            if not watch.complete:
                watch.begin(computed=made)
        elif made:
            watch.before(self._name)

    def accumulated(self, parameter: torch.Tensor) -> None:
        """The gradient is in `p.grad`."""
        watch = self.watch
        if not self._made:
            return
        if watch.armed:
            complete, group = watch.complete, self.group
            if self._name in complete:
                raise MisuseError(
                    f"DistributedDataParallel: {self._name!r} got two gradients in one backward pass"
                )
            complete.add(self._name)
            group.missing -= 1
            if not group.missing:
                watch.after(group.index)
                if len(complete) == watch.count:
                    watch.end()
        elif not watch.leaves:
            watch.stray(self._name, parameter)


def watches_of(parameter: torch.Tensor) -> list[BackwardWatch]:
    """All watches that have hooks on `parameter`."""
    hooks = [getattr(hook, "__self__", None) for hook in (parameter._backward_hooks or {}).values()]
    return [hook.watch for hook in hooks if isinstance(hook, _Hooks)]


def _weakly(callback: Callback) -> Callback:
    """`callback`; if that is a method, it does nothing once its object, which is held weakly, is gone."""
    if not isinstance(callback, MethodType):
        return callback
    owner, function = weakref.ref(callback.__self__), callback.__func__

    def call(*args: Any) -> None:
        if (there := owner()) is not None:
            function(there, *args)

    return cast(Callback, call)


def _nobody() -> None:
    return None


def queue_callback(call: Callable[[], None]) -> None:
    """Call when PyTorch has nothing left to compute in the pass that goes on, if it does not fail.

    If no pass goes on, call now.
    """
    if torch._C._current_graph_task_id() == -1:
        call()
    else:
        torch.autograd.Variable._execution_engine.queue_callback(call)


def _hook(output: Any, reached: Callable[[torch.Tensor], None]) -> None:
    """Have `reached` called whenever a backward pass comes to a tensor in `output`, which a module returned."""
    for tensor in _tensors_in(output, set()):
        if tensor.grad_fn is not None:
            hooked: Any = tensor  # torch leaves this method untyped
            hooked.register_hook(reached)


def _tensors_in(output: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors in what a module returned, as far as they can be found; `seen` has the ids of what was."""
    if isinstance(output, torch.Tensor):
        yield output
        return
    if isinstance(output, _LEAVES) or id(output) in seen:
        return
    seen.add(id(output))
    values: list[Any] = []
    if isinstance(output, Mapping):
        values += output.values()
    elif isinstance(output, (list, tuple)):
        values += output
    if is_dataclass(output):
        values += [getattr(output, part.name) for part in fields(output)]
    values += getattr(output, "__dict__", {}).values()
    for value in values:
        yield from _tensors_in(value, seen)


_LEAVES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    FunctionType,
    MethodType,
    ModuleType,
    nn.Module,
)
"""Types of values in which no output is looked for."""


def _inside_a_pass() -> bool:
    """Whether another backward pass started this one, as reentrant checkpoints do."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals is vars(torch.autograd.function):  # it runs the backward() of a Function
            return True
        frame = frame.f_back
    return False
