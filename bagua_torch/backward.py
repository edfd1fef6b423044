"""Watching backward passes: when one begins, which gradients are complete, and when it has ended.

This file knows PyTorch's autograd and nothing of ranks, buckets or streams. It uses public hooks only: a tensor
hook on each parameter (its gradient was computed), `register_post_accumulate_grad_hook` (it was accumulated),
and `register_multi_grad_hook` (which gradients this pass computes, once it has computed the last of them).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import FrameType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

Callback = TypeVar("Callback", bound=Callable[..., Any])


class BackwardWatch:
    """Calls back in the course of each backward pass over `parameters`.

    The watch follows a pass only while it is `armed`. It disarms itself when a pass has ended; a new watch is not
    armed. A pass ends when every parameter that takes part in it has its gradient. A pass that another pass
    starts (reentrant checkpoints do that) is a pass of its own; the outer one then ends when all parameters
    have a gradient.

    Bound methods among the callbacks are held weakly, so that a watch keeps no object alive. Once the object is
    gone, its callback does nothing. What a callback raises, `backward()` raises.

    Args:
        parameters: The parameters to watch, by name.
        began: Called before the first gradient of an armed pass is accumulated.
        before: Called before a gradient is accumulated, in every pass, with the name and whether the watch is
            armed.
        after: Called when a gradient of an armed pass is accumulated, with the name.
        ended: Called after the last gradient of an armed pass, with the names of all parameters that got a
            gradient, and whether another pass started this one and goes on.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        began: Callable[[], None],
        before: Callable[[str, bool], None],
        after: Callable[[str], None],
        ended: Callable[[set[str], bool], None],
    ) -> None:
        self.armed = False
        """Whether the pass that goes on, or else the next one, is followed."""
        self._names = list(parameters)
        self._began, self._before = _weakly(began), _weakly(before)
        self._after, self._ended = _weakly(after), _weakly(ended)
        self._without_gradient: set[str] = set()  # parameters between their two hooks
        self._computed: dict[str, torch.Tensor] = {}  # gradients, between their first hook and their last
        self.reset()
        self._hooks: list[Any] = []
        self._attach(parameters)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def arm_at(self, output: Any) -> None:
        """If armed, arm once more when a backward pass goes through `output`, which a module returned.

        Passes of other outputs may come first, and disarm the watch.
        """
        if not self.armed:
            return
        waiting = [True]

        def reached(_: torch.Tensor) -> None:
            if waiting:
                waiting.clear()
                self.armed = True

        for tensor in _tensors_in(output):
            if tensor.grad_fn is not None:
                hooked: Any = tensor  # torch leaves this method untyped
                hooked.register_hook(reached)

    @property
    def unfinished(self) -> bool:
        """Whether a pass has begun that has not ended: it goes on, or it has failed."""
        return bool(self._complete)

    @property
    def owner(self) -> object | None:
        """The object whose method `ended` is, if it is a method and the object is still there."""
        return getattr(self._ended(), "__self__", None)

    def end(self) -> None:
        """End the pass now: the caller knows that no gradient is to come."""
        complete = self._complete
        self.reset()
        self.armed = _inside_a_pass()  # the outer pass goes on
        if ended := self._ended():
            ended(complete, self.armed)

    def reset(self) -> None:
        """Disarm, and forget the pass that has begun, if one has."""
        self.armed = False
        self._begun = False
        self._complete: set[str] = set()
        self._expected: set[str] | None = None
        """The parameters that get a gradient in this pass, as far as that is known."""

    def remove(self) -> None:
        """Remove all hooks; the watch calls back no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _attach(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Register all hooks, in the order in which they are to run.

        `register_multi_grad_hook` keeps all gradients of a pass in memory until it has the last of them. So the
        hook before it puts a stand-in of one element into the gradient's place, and the hook behind it takes
        that out again.
        """
        hooked: dict[str, Any] = dict(parameters)  # torch leaves these methods untyped
        for name, parameter in hooked.items():
            self._hooks.append(parameter.register_hook(_FirstHook(self, name, parameter)))
        multi = register_multi_grad_hook(tuple(parameters.values()), self._all_are_computed, mode="all")
        self._hooks.append(multi)
        for name, parameter in hooked.items():
            self._hooks.append(parameter.register_hook(self._last_hook(name)))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._accumulated(name)))

    def _last_hook(self, name: str) -> Callable[[torch.Tensor], torch.Tensor | None]:
        return lambda _: self._computed.pop(name, None)

    def _accumulated(self, name: str) -> Callable[[torch.Tensor], None]:
        def accumulated(_: torch.Tensor) -> None:
            if name in self._without_gradient:
                self._without_gradient.remove(name)
            elif self.armed:
                self._complete.add(name)
                if after := self._after():
                    after(name)
                if len(self._complete) == len(self._names) or self._complete == self._expected:
                    self.end()

        return accumulated

    def _all_are_computed(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """The pass has computed all its gradients; the last may still have to be accumulated.

        A pass inside another one comes here with its own gradients only, and then PyTorch does not call for the
        outer pass.
        """
        if self.armed:
            names = {name for name, g in zip(self._names, gradients, strict=True) if g is not None}
            self._expected = names | (self._expected or set())
            if self._complete == self._expected:
                self.end()


class _FirstHook:
    """The hook that runs first on a gradient: it says that the gradient is there, and hides it."""

    def __init__(self, watch: BackwardWatch, name: str, parameter: nn.Parameter) -> None:
        self.watch, self._name = watch, name
        zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        self._stand_in = zero.expand(parameter.shape)

    def __call__(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        watch, name = self.watch, self._name
        if watch.armed and not watch._complete:
            watch._expected = None  # of an earlier pass that failed before its first gradient
            if not watch._begun:
                watch._begun = True
                if began := watch._began():
                    began()
        if gradient is None:  # a Function may make none; the other hooks run all the same
            watch._without_gradient.add(name)
        elif before := watch._before():
            before(name, watch.armed)
        if (
            gradient is None or gradient.layout is not torch.strided
        ):  # autograd takes no stand-in of another layout
            watch._computed.pop(name, None)  # of a pass that failed
            return None
        watch._computed[name] = gradient
        return self._stand_in


def watches_of(parameter: torch.Tensor) -> list[BackwardWatch]:
    """All watches that have hooks on `parameter`."""
    hooks = (parameter._backward_hooks or {}).values()
    return [hook.watch for hook in hooks if isinstance(hook, _FirstHook)]


def _weakly(callback: Callback) -> Callable[[], Callback | None]:
    """A function that gives `callback`; if that is a method, only as long as its object is there."""
    if isinstance(callback, MethodType):
        return weakref.WeakMethod(callback)
    return lambda: callback


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a module returned, as far as they can be found."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors_in(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors_in(value)
    elif is_dataclass(output):
        for part in fields(output):
            yield from _tensors_in(getattr(output, part.name))


def _inside_a_pass() -> bool:
    """Whether another backward pass started this one, as reentrant checkpoints do."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals is vars(torch.autograd.function):  # it runs the backward() of a Function
            return True
        frame = frame.f_back
    return False
