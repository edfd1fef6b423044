"""Muon: momentum whose matrices are made semi-orthogonal, on one process or by owners over ranks.

Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; weight decay and the factor
"match_rms_adamw" by Liu et al., Muon is scalable for LLM training, arXiv 2502.16982.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .. import arrays
from ..arrays import Array
from ..comm import Communicator
from ..errors import ArrayError
from .newton_schulz import adjustment, orthogonalize
from .owners import Matrix, Owners
from .settings import Saved, check_settings


@dataclass(eq=False)
class MuonState(Saved):
    """State of `Muon` for one matrix, or for the rows of it that a rank has."""

    momentum: Array


@dataclass(frozen=True)
class Muon:
    """Muon, for the matrices of hidden layers; use Adam for vectors, embeddings and the last layer.

    m <- mu m + (1 - mu) g, with Nesterov's u = mu m + (1 - mu) g; w <- (1 - lr weight_decay) w - lr f O(u), where
    O(u) has the singular vectors of u and singular values near 1. For a matrix (m, n) the factor f is
    sqrt(max(1, m / n)), or 0.2 sqrt(max(m, n)) with `adjust_lr_fn="match_rms_adamw"`: changes are then as large
    as those of AdamW. Without a codec of `Owners`, the bits depend neither on the number of ranks nor on which of
    them have which rows.

    >>> import numpy as np
    >>> weights, muon = [np.zeros((2, 2))], Muon(lr=0.1)
    >>> muon.step(weights, [np.diag([3.0, 1.0])], [muon.init(weights[0])])
    >>> weights[0].round(2)
    array([[-0.08,  0.  ],
           [ 0.  , -0.11]])
    """

    lr: float = 0.02
    momentum: float = 0.95
    weight_decay: float = 0.0
    nesterov: bool = True
    adjust_lr_fn: str = "original"

    def __post_init__(self) -> None:
        check_settings(self)

    def init(self, weight: Array) -> MuonState:
        """A state of zeros for a matrix, (m, n), or for this rank's rows of one.

        Raises:
            ArrayError: `weight` is no matrix, or not of float32 or float64.
        """
        if weight.ndim != 2 or arrays.dtype_name(weight.dtype) not in ("float32", "float64"):
            raise ArrayError(
                f"Muon: weight is {arrays.dtype_name(weight.dtype)} {weight.shape}, expected a matrix of float32 "
                "or float64; use Adam for vectors, embeddings and the last layer"
            )
        return MuonState(arrays.zeros_like(weight))

    def step(
        self,
        weights: Sequence[Array],
        grads: Sequence[Array],
        states: Sequence[MuonState],
        owners: Owners | None = None,
        rows: Sequence[Sequence[int] | None] | None = None,
    ) -> None:
        """Change all matrices by one step along their gradients.

        Collective with `owners`.

        Args:
            weights: Matrices, (m, n), or this rank's rows of them; of one dtype.
            grads: Their gradients, averaged over the ranks.
            states: The result of `init` for each.
            owners: If given, its ranks share the computing. Else this rank has whole matrices, and computes all.
            rows: For each matrix the numbers of rows of all ranks, (p,), the same on every rank; None for one
                that all ranks have, with equal gradients, as with an `Engine`.

        Raises:
            ArrayError: Arrays do not fit each other, or `rows`. Raised before a weight changes.
            CommMismatch: Ranks have other settings or shapes, or one of them a wrong argument. Raised on all.
        """
        owners = owners or Owners()
        matrices = owners.agree("Muon.step", self, lambda: _matrices(weights, grads, states, rows, owners.comm))

        def moved(index: int) -> Array:
            return self.move(grads[index], states[index].momentum)

        for index, update in owners.map(orthogonalize, matrices, moved, states.__getitem__):
            self.change(weights[index], update, matrices[index].shape)

    def move(self, grad: Array, momentum: Array) -> Array:
        """Move the momentum in place, and return what is to be orthogonalized; also of tensors.

        Products are rounded before they are added, so that no bit depends on where an element lies.
        """
        momentum *= self.momentum
        momentum += (1 - self.momentum) * grad
        return self.momentum * momentum + (1 - self.momentum) * grad if self.nesterov else momentum

    def change(self, weight: Array, update: Array, shape: tuple[int, int]) -> None:
        """Change rows of a matrix of this shape in place, by those of the orthogonalized one; also of tensors."""
        weight *= 1 - self.lr * self.weight_decay
        weight -= self.lr * adjustment(self.adjust_lr_fn, shape) * update


def _matrices(
    weights: Sequence[Array],
    grads: Sequence[Array],
    states: Sequence[MuonState],
    rows: Sequence[Sequence[int] | None] | None,
    comm: Communicator | None,
) -> Iterator[Matrix]:
    """Yield the matrices of which a rank has these rows; raise `ArrayError` if arrays do not fit."""
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    rows = [None] * len(weights) if rows is None else rows
    numbers = len(weights), len(grads), len(states), len(rows)
    if len(set(numbers)) > 1:
        raise ArrayError(f"Muon.step: {numbers} weights, grads, states and rows, expected equally many of each")
    for weight, grad, state, spread in zip(weights, grads, states, rows, strict=True):
        fits = {(each.shape, each.dtype) for each in (weight, grad, state.momentum)} == {
            (weight.shape, weights[0].dtype)
        }
        if (
            not fits
            or weight.ndim != 2
            or (spread is not None and (len(spread) != size or spread[rank] != len(weight)))
        ):
            raise ArrayError(
                f"Muon.step: a weight is {arrays.dtype_name(weight.dtype)} {weight.shape} with a gradient of "
                f"{arrays.dtype_name(grad.dtype)} {grad.shape} and rows={spread}, expected matrices of one "
                f"dtype, gradients and states like them, and the numbers of rows of {size} ranks, or None"
            )
        total = len(weight) if spread is None else sum(spread)
        yield Matrix((total, weight.shape[1]), None if spread is None else tuple(spread))
