"""The contract of the models that are trained: `Model` and `Steps`, their data and constants."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

MICROBATCHES, IMAGES = 12, 8
"""Microbatches of a step, over all ranks, by default, and images of one: 12 are shared evenly by 1, 2, 3, 4 and 6
ranks."""

LR, MOMENTUM, ADAM_LR = 0.1, 0.9, 3e-3


class Data:
    """Images (n, 64) and labels (n,) of the digits, the same on all ranks.

    Args:
        file: An npz file with both.
        microbatches: How many a step has, over all ranks; at least one for each.
    """

    def __init__(self, file: Path, microbatches: int = MICROBATCHES) -> None:
        self.microbatches = microbatches
        with np.load(file) as digits:
            self.images, self.labels = digits["images"], digits["labels"]

    def microbatch(self, step: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The images and labels of one microbatch of a step."""
        count = len(self.labels) // IMAGES
        begin = (step * self.microbatches + number) % count * IMAGES
        return self.images[begin : begin + IMAGES], self.labels[begin : begin + IMAGES]


class Model(ABC):
    """Weights, and the state of the optimizer.

    Args:
        data: The training data.
        algorithm: The algorithm by which ranks exchange.
        alike: Whether all ranks have the same weights after each step of it.
    """

    def __init__(self, data: Data, algorithm: Any, *, alike: bool) -> None:
        self.data, self.algorithm, self.alike = data, algorithm, alike
        self.holds = getattr(getattr(algorithm, "average", None), "addends", None) is not None
        """Whether each microbatch is an addend of its own."""

    @abstractmethod
    def weights(self) -> list[np.ndarray]:
        """All weights, sharing memory with the model."""

    @abstractmethod
    def parts(self) -> dict[str, Any]:
        """The parts of a `State`, by name."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state that must be restored after a failure."""

    @abstractmethod
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""

    def make(self, comm: Any, state: Any) -> None:  # noqa: B027 - most models do not depend on the ranks
        """Make what depends on the ranks, and register it with the state. Collective."""

    @abstractmethod
    def connect(self, comm: Any, *, init_sync: bool = True) -> Steps:
        """Make the `Steps` on these ranks; with `init_sync`, all begin with rank 0's weights, unless restored.

        Collective.
        """

    def digest(self) -> str:
        """A short hash of the weights."""
        return digest_of(self.weights())

    def total(self) -> float:
        """The sum of all weights."""
        return float(sum(np.sum(weight, dtype=np.float64) for weight in self.weights()))

    def average(self, comm: Any) -> None:
        """Average the weights if they differ between ranks under this algorithm. Collective."""
        if not self.alike:
            for weight in (each for each in self.weights() if each.dtype.kind == "f"):
                weight[...] = comm.allreduce(weight, op="avg")


def digest_of(weights: Iterable[np.ndarray]) -> str:
    """A short hash of arrays."""
    joined = hashlib.sha256()
    for weight in weights:
        joined.update(np.ascontiguousarray(weight).data)
    return joined.hexdigest()[:16]


class Steps(ABC):
    """Training steps on the ranks of a communicator."""

    engine: Any

    @abstractmethod
    def take(self, step: int) -> None:
        """Take one step. Collective."""

    def settle(self) -> None:
        """Complete the last step. Collective."""
        self.engine.settle()

    @abstractmethod
    def close(self) -> None:
        """Finish. Collective."""
