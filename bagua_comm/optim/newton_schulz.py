"""The nearest semi-orthogonal matrix, approximately, by a Newton-Schulz iteration.

Five steps of an odd polynomial of degree five bring all singular values to about 1, from 0.7 to 1.2. Its
coefficients have the largest slope at 0.

Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .. import arrays
from ..arrays import Array

STEPS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
EPS = 1e-7
"""The least norm by which a matrix is divided."""


def newton_schulz(x: Array, add_product: Callable[[float, Array, float, Array, Array], Array]) -> Array:
    """Return X with all singular values near 1, where those of `x` are at most 1.

    In each step X <- a X + (b A + c A A) X with A = X X^T, over the shorter side.

    Args:
        x: A matrix, (m, n): an array or a tensor.
        add_product: Returns beta C + alpha A B of (beta, C, alpha, A, B).
    """
    a, b, c = COEFFICIENTS
    is_tall = x.shape[0] > x.shape[1]
    wide = x.T if is_tall else x
    for _ in range(STEPS):
        gram = wide @ wide.T
        wide = add_product(a, wide, 1.0, add_product(b, gram, c, gram, gram), wide)
    return wide.T if is_tall else wide


def orthogonalize(x: Array) -> Array:
    """Return the matrix of `newton_schulz` for an array (m, n) of any norm.

    >>> import numpy as np
    >>> np.linalg.svd(orthogonalize(np.diag([5.0, 1.0])), compute_uv=False).round(1)
    array([0.8, 0.7])
    """
    library = arrays.namespace(x)
    norm = library.maximum(library.sqrt((x * x).sum()), EPS)

    def add_product(beta: float, c: Array, alpha: float, a: Array, b: Array) -> Array:
        return beta * c + alpha * (a @ b)

    return newton_schulz(x / norm, add_product)


ADJUSTMENTS = "original", "match_rms_adamw"
"""The names of adjustments of the learning rate, those of `torch.optim.Muon`; see `adjustment`."""


def adjustment(name: str, shape: tuple[int, int]) -> float:
    """By which factor the learning rate of a matrix of this shape is larger.

    "original" is that of Jordan et al. With "match_rms_adamw" (Liu et al., Muon is scalable for LLM training,
    arXiv 2502.16982) changes are as large as those of AdamW, so that both take the same learning rate.

    >>> adjustment("original", (8, 2)), adjustment("match_rms_adamw", (100, 25))
    (2.0, 2.0)
    """
    m, n = shape
    return math.sqrt(max(1, m / n)) if name == "original" else 0.2 * math.sqrt(max(m, n))
