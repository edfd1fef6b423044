"""Steps that a GradScaler leaves out, since a gradient is not finite: it calls no hook of the optimizer then.

Where weights are exchanged, each rank has its own gradients, and one may leave out a step that others make. Its
exchange must begin even so, as they wait for it.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

Skipped = Callable[[torch.optim.Optimizer], object]
"""A function that is called with the optimizer whose step was left out."""

_SKIPPED: weakref.WeakKeyDictionary[torch.optim.Optimizer, OrderedDict[int, Skipped]] = (
    weakref.WeakKeyDictionary()
)
"""The functions to call, by optimizer."""


def on_skipped_step(optimizer: torch.optim.Optimizer, call: Skipped) -> RemovableHandle:
    """Call `call(optimizer)` after each `torch.amp.GradScaler.step(optimizer)` that leaves out its step."""
    _watch_scalers()
    calls = _SKIPPED.setdefault(optimizer, OrderedDict())
    handle = RemovableHandle(calls)
    calls[handle.id] = call
    return handle


def _watch_scalers() -> None:
    """Let every GradScaler say which steps it leaves out: PyTorch has no hook for that."""
    original = torch.amp.GradScaler.step
    if hasattr(original, "_says_skipped"):
        return

    @functools.wraps(original)
    def step(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        calls = _SKIPPED.get(optimizer)
        if not calls:
            return original(self, optimizer, *args, **kwargs)
        made: list[object] = []
        handle = optimizer.register_step_post_hook(lambda *_: made.append(None))
        try:
            result = original(self, optimizer, *args, **kwargs)
        finally:
            handle.remove()
        if not made:
            for call in list(calls.values()):
                call(optimizer)
        return result

    step._says_skipped = True  # type: ignore[attr-defined]
    setattr(torch.amp.GradScaler, "step", step)  # noqa: B010  (mypy refuses an assignment to a method)
