"""Steps that enqueue work on a device, recorded during one call and replayed by later ones.

The host takes longer to work out the arguments of a kernel than to launch it. A call on arrays at the addresses
of an earlier one enqueues the same kernels and messages, so it can replay them. Unlike a CUDA graph, a replay
runs on any stream, and each of its steps can be watched and captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar


class Recording:
    """The steps of one call, in order. They hold addresses instead of arrays, and so keep no memory alive."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], object]] = []
        self.is_complete = True
        """Whether the steps are all that the call did. A step that depends on more than addresses clears it."""

    def replay(self) -> None:
        """Enqueue the steps again, on the current stream."""
        for step in self.steps:
            step()


@contextlib.contextmanager
def recorded() -> Iterator[Recording]:
    """In the body of `with`, record the steps of this thread."""
    recording = Recording()
    token = _current.set(recording)
    try:
        yield recording
    finally:
        _current.reset(token)


_current: ContextVar[Recording | None] = ContextVar("the recording in progress", default=None)

current = _current.get
"""Return the recording of this thread and context in progress, or None."""
