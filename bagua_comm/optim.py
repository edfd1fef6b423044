"""Optimizers of flat arrays, one bucket at a time, for training without a framework.

    optimizer = SGD(lr=0.1, momentum=0.9)
    states = [optimizer.init(bucket.flat) for bucket in weights]
    optimizer.step(weight, grad, state)         # in place, after the gradients are averaged

They are frozen dataclasses of settings; the formulas are those of `torch.optim`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import arrays, kernels
from .arrays import Array
from .errors import ArrayError


class _Saved:
    """The state of an optimizer for one array, which `elastic.State` and `Checkpoints` can hold."""

    def state_dict(self) -> dict[str, Any]:
        """Its fields by name; the arrays are its own, not copies."""
        return dict(vars(self))

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict`, whose arrays are copied.

        Raises:
            ArrayError: It is of another optimizer, or for an array of another shape.
        """
        fields = vars(self)
        if set(saved) != set(fields):
            raise ArrayError(
                f"{type(self).__name__}: the saved state has {', '.join(sorted(saved)) or 'nothing'}, expected "
                f"{', '.join(sorted(fields))}; load it into the optimizer that saved it"
            )
        for name, value in fields.items():
            ours, shape = np.shape(value), np.shape(saved[name])
            if ours != shape:
                raise ArrayError(f"{type(self).__name__}: {name} has shape {ours}, but {shape} was saved")
        for name, value in fields.items():
            if isinstance(value, int):
                setattr(self, name, int(saved[name]))
            else:
                value[...] = saved[name]


@dataclass
class SGDState(_Saved):
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
        _check_settings(self)
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
class AdamState(_Saved):
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
        _check_settings(self)

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
class QAdamState(_Saved):
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
        _check_settings(self)

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


_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("lr", "eps", "weight_decay"), ("a number of at least 0", lambda value: value >= 0)),
    "momentum": ("a number of at least 0 and below 1", lambda value: 0 <= value < 1),
    "betas": ("two numbers of at least 0 and below 1", lambda value: all(0 <= value[i] < 1 for i in (0, 1))),
    "warmup_steps": ("an integer of at least 1", lambda value: value in range(1, 2**63)),
}
"""For each setting, the values that are valid, as text and as a test."""


def _check_settings(optimizer: object) -> None:
    """Raise `ArrayError` if a setting of an optimizer is out of its range."""
    for name, (expected, fits) in _RANGES.items():
        if not hasattr(optimizer, name):
            continue
        value = getattr(optimizer, name)
        try:
            fine = bool(fits(value))
        except (TypeError, IndexError):
            fine = False
        if not fine:
            raise ArrayError(f"{type(optimizer).__name__}: {name} is {value!r}, expected {expected}")
