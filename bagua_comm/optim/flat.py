"""Optimizers of flat arrays, one bucket at a time: SGD, Adam and QAdam."""

from __future__ import annotations

from dataclasses import dataclass

from .. import arrays, kernels
from ..arrays import Array
from ..errors import ArrayError
from .settings import Saved, check_settings


@dataclass
class SGDState(Saved):
    """State of `SGD`."""

    buffer: Array


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, with (Nesterov) momentum and weight decay.

    >>> import numpy as np
    >>> weight, sgd = np.ones(2), SGD(lr=0.5)
    >>> sgd.step(weight, np.array([1.0, -1.0]), sgd.init(weight))
    >>> weight
    array([0.5, 1.5])
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_settings(self)
        if self.nesterov and not self.momentum:
            raise ArrayError(f"{self}: nesterov is true, which needs a momentum above 0")

    def init(self, weight: Array) -> SGDState:
        """A state of zeros for this array of weights."""
        return SGDState(arrays.zeros_like(weight))

    def step(self, weight: Array, grad: Array, state: SGDState) -> None:
        """Change `weight` by one step along `grad`; arrays of one shape."""
        kernels.of(weight).sgd_step(
            weight,
            grad,
            state.buffer,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
        )


@dataclass
class AdamState(Saved):
    """State of `Adam`."""

    momentum: Array
    variance: Array
    step: int = 0


@dataclass(frozen=True)
class Adam:
    """Adam; `weight_decay` is added to the gradient. Kingma and Ba, arXiv 1412.6980."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_settings(self)

    def init(self, weight: Array) -> AdamState:
        """A state of zeros for this array of weights."""
        return AdamState(arrays.zeros_like(weight), arrays.zeros_like(weight))

    def step(self, weight: Array, grad: Array, state: AdamState) -> None:
        """Change `weight` by one step along `grad`; arrays of one shape."""
        run, m, v = kernels.of(weight), state.momentum, state.variance
        state.step += 1
        run.adam_moments(weight, grad, m, v, betas=self.betas, weight_decay=self.weight_decay)
        b1, b2 = self.betas
        run.adam_step(
            weight, m, v, lr=self.lr, eps=self.eps, corrections=(1 - b1**state.step, 1 - b2**state.step)
        )


@dataclass
class QAdamState(Saved):
    """State of `QAdam`; the momentum is in the algorithm's state."""

    variance: Array
    step: int = 0


@dataclass(frozen=True)
class QAdam:
    """Adam whose variance is frozen after `warmup_steps`: the optimizer for `algorithms.QAdam`.

    From then on the algorithm, which must have the same `warmup_steps` and beta, updates and averages the
    momentum, and this optimizer only adds the weight decay to it. The bias correction of the variance is frozen
    with the variance. A weight without a gradient in the warm-up has no variance, and does not change.
    Source: arXiv 2102.02888.
    """

    lr: float = 1e-3
    warmup_steps: int = 100
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_settings(self)

    def init(self, weight: Array) -> QAdamState:
        """A state of zeros for this array of weights."""
        return QAdamState(arrays.zeros_like(weight))

    def step(self, weight: Array, grad: Array, state: QAdamState, momentum: Array) -> None:
        """Change `weight` by one step; `momentum` is the array in the state of the algorithm for this bucket."""
        run, (b1, b2) = kernels.of(weight), self.betas
        state.step += 1
        if state.step <= self.warmup_steps:
            run.adam_moments(
                weight, grad, momentum, state.variance, betas=self.betas, weight_decay=self.weight_decay
            )
        elif self.weight_decay:
            run.add_scaled(momentum, weight, (1 - b1) * self.weight_decay)
        frozen = min(state.step, self.warmup_steps)
        run.adam_step(
            weight,
            momentum,
            state.variance,
            lr=self.lr,
            eps=self.eps,
            corrections=(1 - b1**state.step, 1 - b2**frozen),
        )
