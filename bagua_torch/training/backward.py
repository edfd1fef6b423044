"""Observation of backward passes: their beginning, complete gradients, and their end.

This file depends on PyTorch's autograd alone, not on ranks, buckets or streams. Each parameter has two hooks: a
tensor hook (its gradient was computed), and one of `register_post_accumulate_grad_hook` (it was accumulated).
They do little, since models have many small parameters. If all parameters get a gradient, the last hook ends the
pass; otherwise a callback of the autograd engine does, like that of PyTorch's FSDP.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ..errors import MisuseError


class WeakCall:
    """A hook that calls a function, or a method whose object it holds weakly.

    Once the object is gone, the hook does nothing. A copy does nothing either, as that of a copied module.

    Args:
        function: The function or the method.
        handles: The handles of all hooks of the same object.
    """

    def __init__(self, function: Callable[..., object] | None = None, handles: Sequence[Any] = ()) -> None:
        self._function: Callable[[], Callable[..., object] | None] = (
            weakref.WeakMethod(function) if isinstance(function, MethodType) else lambda: function
        )
        self._handles = handles

    def __call__(self, *given: object) -> Any:
        """Call the function, if its object is there."""
        function = self._function()
        return function(*given) if function is not None else None

    def __reduce__(self) -> tuple[type[WeakCall], tuple[()]]:
        return WeakCall, ()

    @property
    def owner(self) -> object | None:
        """The object of the method; None if it is a function, or the object is gone."""
        return getattr(self._function(), "__self__", None)

    def remove_if_dead(self) -> None:
        """Remove all hooks of the object, if it is gone."""
        if self._function() is None:
            for handle in self._handles:
                handle.remove()


class EagerWeakCall(WeakCall):
    """A `WeakCall` that compiled graphs omit, so that they do not break at its call."""

    def __call__(self, *given: object) -> Any:
        """Call the method, if its object is there."""
        return None if torch.compiler.is_compiling() else super().__call__(*given)


class BackwardWatch:
    """Calls back during each backward pass over `parameters`.

    The watch follows a pass only while it is `armed`. It disarms itself at the end of a pass; a new watch is not
    armed. A pass ends when all parameters have a gradient, or when PyTorch has computed everything in it. A pass
    within another one (as of reentrant checkpoints) counts separately, if it computes a gradient before the outer
    pass does.

    Gradients that a pass accumulates while the watch is not armed are in `local` if the pass goes through an
    output given to `leave_at`, or `leaves` is set, and otherwise in `strays`.

    Bound methods among the callbacks are held weakly, so that a watch keeps no object alive. Once the object is
    gone, its callback does nothing. An exception in a callback is raised by `backward()`. `torch.autograd.grad`
    of parameters raises `MisuseError` while the watch is armed, since it accumulates nothing.

    Args:
        parameters: The parameters to watch, by name.
        groups: Their names, each in one group.
        began: Called before the first gradient of an armed pass is accumulated.
        before: Called before a gradient is accumulated in a pass that is not followed, with the name.
        after: Called when the last gradient of a group is accumulated in an armed pass, with the group's index.
        ended: Called after the last gradient of an armed pass, with the names of all parameters that got a
            gradient, and whether the pass runs within another one.
        reached: Called when a pass reaches an output given to `arm_at` or `leave_at`.
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
        reached: Callable[[], None] = lambda: None,
    ) -> None:
        self.armed = False
        """Whether the present pass, or else the next one, is followed."""
        self.leaves = False
        """Whether passes that are not followed are intended."""
        self.strays: dict[str, int] = {}
        """Parameters with a gradient of a pass that should have been followed, and their versions then."""
        self.local: dict[str, int] = {}
        """The same for passes that are not followed by intention: these gradients stay on this rank."""
        self._begun = self._computed = False  # whether `began` was called, and a gradient computed
        self.outputs: dict[int, bool] = {}
        """Whether a pass has reached each output, by number, of those for which `arm_at` expects one."""
        self._armed = 0  # number of outputs given to `arm_at`
        self._task = -1  # PyTorch's id of the pass in which the latest hook ran
        self._ignored_task = -1  # PyTorch's id of the latest pass that is not followed by intention
        self.count = 0
        """Number of watched parameters."""
        self.began, self.before, self.after = WeakCall(began), WeakCall(before), WeakCall(after)
        self.ended, self.reached = WeakCall(ended), WeakCall(reached)
        self._by_name: dict[str, _Hooks] = {}
        self._hooks: list[RemovableHandle] = []
        # As long as these exist, gradients are accumulated on the stream that was current when they were made.
        self._edges: list[GradientEdge] = []
        self.add(parameters, groups)

    def add(self, parameters: Mapping[str, nn.Parameter], groups: Sequence[Sequence[str]]) -> None:
        """Watch more parameters; `groups` has the names of all. Drops a pass that has begun."""
        self.count += len(parameters)
        self._by_name.update((name, _Hooks(self, name)) for name in parameters)
        self.regroup(groups)
        for name, parameter in parameters.items():
            hooked: Any = parameter  # torch leaves these methods untyped
            self._hooks.append(hooked.register_hook(self._by_name[name].computed))
            self._hooks.append(hooked.register_post_accumulate_grad_hook(self._by_name[name].accumulated))
            self._edges.append(get_gradient_edge(parameter))

    def regroup(self, groups: Sequence[Sequence[str]]) -> None:
        """Watch the same parameters in other groups. Drops a pass that has begun."""
        self._groups = [_Group(index, len(names)) for index, names in enumerate(groups)]
        for group, names in zip(self._groups, groups, strict=True):
            for name in names:
                self._by_name[name].group = group
        self.reset()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def arm_at(self, output: object, *, expected: bool = True) -> None:
        """Follow every backward pass that goes through `output`, which a module returned.

        Args:
            output: What the module returned.
            expected: Whether a pass through it is expected, so that it is in `outputs`.
        """
        number = self._armed = self._armed + 1

        def reached(_: torch.Tensor) -> None:
            if number in self.outputs:
                self.outputs[number] = True
            before, complete = self.armed, self.complete
            self.armed = True
            self.reached()
            queue_callback(lambda: self._pass_through_output_ended(complete, armed=before))

        if _hook(output, reached) and expected:
            self.outputs[number] = False

    def forget_outputs(self, *, reached: bool) -> None:
        """Forget all outputs; with `reached`, only those that a pass has reached."""
        self.outputs = dict.fromkeys((each for each, was in self.outputs.items() if reached and not was), False)

    def _pass_through_output_ended(self, complete: set[str], *, armed: bool) -> None:
        """Restore `armed`, if a pass through an output reached no parameter. The arguments are earlier values."""
        if not self._begun:  # otherwise `_pass_has_ended` comes next
            self.armed = armed and complete is self.complete

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave_at(self, output: object) -> None:
        """Do not follow passes through `output`, which a module returned, and do not report them as strays."""

        def reached(_: torch.Tensor) -> None:
            self._ignored_task = torch._C._current_graph_task_id()
            self.reached()

        _hook(output, reached)

    def record(self, name: str, parameter: torch.Tensor) -> None:
        """Record a gradient of a pass that this watch does not follow, unless another watch does."""
        task = torch._C._current_graph_task_id()
        hooks = parameter._backward_hooks or ()
        if len(hooks) > 1 and any(watch.follows(task) for watch in watches_of(parameter)):
            return
        if not self.leaves and task != self._ignored_task:
            if not _inside_a_pass():
                self.strays[name] = parameter._version
                return
            self._ignored_task = task  # as in a reentrant checkpoint of a pass that need not be followed
        self.local[name] = parameter._version

    def forget_gradients(self) -> None:
        """Forget the gradients of passes that were not followed."""
        self.strays.clear()
        self.local.clear()

    def follows(self, task: int) -> bool:
        """Whether this watch follows, or followed, the pass with this id."""
        return task == self._task

    @property
    def unfinished(self) -> bool:
        """Whether a pass has begun and not ended: it is running, or it has failed."""
        return bool(self.complete)

    @property
    def left(self) -> bool:
        """Whether a pass was not followed by intention: it went through an output given to `leave_at`, say."""
        return self._ignored_task != -1

    @property
    def owner(self) -> object | None:
        """The object whose method `ended` is; None if it is a function, or the object is gone."""
        return self.ended.owner

    def begin(self, *, computed: bool) -> None:
        """Note the first hook of an armed pass; `computed` says whether a gradient was computed."""
        task = torch._C._current_graph_task_id()
        if task != self._task:  # otherwise a failed pass would decide
            self._task, self._computed = task, False
        self._computed = self._computed or computed
        complete = self.complete
        queue_callback(lambda: self._pass_has_ended(complete))
        if not self._begun:
            self._begun = True
            self.began()

    def _pass_has_ended(self, complete: set[str]) -> None:
        """End the pass of `complete`, unless it has ended before."""
        if complete is not self.complete:
            return
        if self._computed and not complete:
            self._drop_pass()
            raise MisuseError(
                "DistributedDataParallel: torch.autograd.grad of parameters is not supported; expected that "
                "backward() accumulates their gradients"
            )
        self.end()

    def end(self) -> None:
        """End the pass now. Call it when no more gradients can follow."""
        complete = self.complete
        self.reset()
        self.armed = _inside_a_pass()  # for the outer pass
        self.ended(complete, self.armed)

    def reset(self) -> None:
        """Disarm, and drop a pass that has begun."""
        self.armed = False
        self._drop_pass()

    def _drop_pass(self) -> None:
        self._begun = self._computed = False
        self.complete: set[str] = set()
        """Parameters that got a gradient in this pass so far; a new set in each pass."""
        for group in self._groups:
            group.missing = group.size

    def remove(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._edges.clear()


class _Group:
    """The number of missing gradients of a group in this pass."""

    __slots__ = ("index", "missing", "size")

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.size = self.missing = size


class _Hooks:
    """The two hooks of one parameter, which autograd runs in this order."""

    __slots__ = ("_computed", "_name", "group", "watch")
    group: _Group

    def __init__(self, watch: BackwardWatch, name: str) -> None:
        self.watch, self._name = watch, name
        self._computed = True

    def computed(self, gradient: torch.Tensor | None) -> None:
        """The gradient was computed. It is None if a Function returned None; the other hook runs even so."""
        watch = self.watch
        self._computed = computed = gradient is not None
        if watch.armed:
            if not watch.complete:
                watch.begin(computed=computed)
        elif computed:
            watch.before(self._name)

    def accumulated(self, parameter: torch.Tensor) -> None:
        """The gradient is in `p.grad`."""
        watch = self.watch
        if not self._computed:
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
        else:
            watch.record(self._name, parameter)


def watches_of(parameter: torch.Tensor) -> list[BackwardWatch]:
    """All watches that have hooks on `parameter`."""
    hooks = [getattr(hook, "__self__", None) for hook in (parameter._backward_hooks or {}).values()]
    return [hook.watch for hook in hooks if isinstance(hook, _Hooks)]


def queue_callback(call: Callable[[], None]) -> None:
    """Call `call` at the end of the present backward pass, if it does not fail; at once outside of a pass."""
    if torch._C._current_graph_task_id() == -1:
        call()
    else:
        torch.autograd.Variable._execution_engine.queue_callback(call)


def _hook(output: object, reached: Callable[[torch.Tensor], None]) -> bool:
    """Call `reached` whenever a backward pass reaches a tensor in `output`, which a module returned.

    Returns:
        Whether there is a tensor that a backward pass may reach.
    """
    found = False
    for tensor in _tensors_in(output, set()):
        if tensor.grad_fn is not None:
            hooked: Any = tensor  # torch leaves this method untyped
            hooked.register_hook(reached)
            found = True
    return found


def _tensors_in(output: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors found in the output of a module; `seen` has the ids of visited objects."""
    if isinstance(output, torch.Tensor):
        yield output
        return
    if isinstance(output, _LEAVES) or id(output) in seen:
        return
    seen.add(id(output))
    values: list[object] = []
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
"""Types that are not searched for tensors."""


def _inside_a_pass() -> bool:
    """Whether another backward pass started this one, as reentrant checkpoints do."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals is vars(torch.autograd.function):  # it runs the backward() of a Function
            return True
        frame = frame.f_back
    return False
