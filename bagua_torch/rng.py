"""PyTorch's default generators, which all threads of a process share."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

exclusive = threading.RLock()
"""Held while a thread uses the generators, or changes their state.

Without it two threads that read and set the state may wait for each other for ever: PyTorch 2.13 holds the mutex
of a generator while it makes a Python object, and the garbage collector may then give up the interpreter's lock.
"""


@contextmanager
def fork(devices: Sequence[int] = ()) -> Iterator[None]:
    """In the body, the generators of the CPU and of these devices may be used; afterwards they go on as before.

    It may be entered again inside.
    """
    with exclusive, torch.random.fork_rng(devices):
        yield
