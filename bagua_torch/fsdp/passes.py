"""Backward passes, and what must be done when one ends, or raises.

PyTorch keeps what a pass has computed in gradients, which `zero_grad` and `reset_iter_state` clear. What this
package keeps besides, it completes when the pass ends, and takes back when the pass raises.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .torch_names import observe_backward, running_backward

_Call = Callable[[], None]


class BackwardPasses:
    """The backward passes that run: one, or several if one is within another."""

    def __init__(self) -> None:
        self._calls: dict[int, dict[_Call, _Call | None]] = {}
        """By the number of a pass: what to call if it raises, and what if it ends."""

    def at_end(self, undo: _Call, done: _Call | None = None) -> bool:
        """Call `done` when the running pass ends, or `undo` if it raises; each once, in order.

        Returns whether a pass is running; otherwise nothing will be called.
        """
        number = running_backward()
        if number is None:
            return False
        if number not in self._calls:
            self._calls[number] = {}
            observe_backward(partial(self._end, number))
        self._calls[number].setdefault(undo, done)
        return True

    def _end(self, number: int, raised: bool) -> None:
        for undo, done in self._calls.pop(number).items():
            call = undo if raised else done
            if call is not None:
                call()
