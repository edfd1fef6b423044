"""PyTorch's default random number generators, which all threads of a process share."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

exclusive = threading.RLock()
"""Lock to hold while using the generators or changing their state.

Without it, two threads that read and set the state can deadlock: PyTorch 2.13 holds the mutex of a generator
while it constructs a Python object, and the garbage collector may then release the interpreter lock.
"""


@contextmanager
def fork(devices: Sequence[int] = ()) -> Iterator[None]:
    """Restore the states of the generators of the CPU and of these devices on exit. Reentrant."""
    with exclusive, torch.random.fork_rng(devices):
        yield
