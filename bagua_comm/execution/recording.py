"""Steps that enqueue work on a device, recorded during one call and replayed by later ones.

The host takes longer to work out the arguments of a kernel than to launch it. A call on arrays at the addresses
of an earlier one enqueues the same kernels and messages, so it can replay them. Unlike a CUDA graph, a replay
runs on any stream, and each of its steps can be watched and captured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar


class Recording:
    """The steps of one call, in order. They hold addresses instead of arrays, and so keep no memory alive."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], object]] = []
        self.is_complete = True
        """Whether the steps depend on addresses alone. A step that depends on more clears it."""

    def replay(self) -> None:
        """Enqueue the steps again, on the current stream."""
        for step in self.steps:
            step()


def recorded(body: Callable[[], object]) -> Recording:
    """Call `body`, and record the steps of this thread meanwhile."""
    recording, before = Recording(), _current.get()
    try:
        _current.set(recording)
        body()
    finally:
        _current.set(before)
    return recording


def unrecorded(body: Callable[[], object]) -> None:
    """Call `body`, and record nothing meanwhile."""
    before = _current.get()
    try:
        _current.set(None)
        body()
    finally:
        _current.set(before)


_current: ContextVar[Recording | None] = ContextVar("the recording in progress", default=None)

current = _current.get
"""Return the recording of this thread and context in progress, or None."""
