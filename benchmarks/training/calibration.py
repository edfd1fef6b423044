"""The cost model's rates that explain measured step times best."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from bagua_comm.errors import ArrayError
from bagua_comm.planning.costmodel import Cluster, CodecRates, Job, Method, Rates, predict


class Measurement(NamedTuple):
    """A step time that was measured."""

    method: Method
    job: Job
    cluster: Cluster
    step_s: float


_NOISE = 0.03
"""Relative error of measured step times, which calibration does not try to explain."""

_OUTLIER = 0.15
"""Larger errors count in proportion to their size, and not to its square: Huber's loss."""

_SPREADS = np.array([1.0, 1.0, 1.0, 0.3, 0.3])
"""How far, in natural logarithms, calibration expects each factor of `_scaled` to be from 1."""


class Predicted(Protocol):
    """The prediction of a step."""

    @property
    def step_s(self) -> float:
        """Seconds of the step."""

    @property
    def wire_bytes(self) -> float:
        """Bytes that a rank sends in a step."""


Predictor: TypeAlias = "Callable[[Method, Job, Cluster, Rates], Predicted]"


def calibrate(
    measurements: Iterable[Measurement], start: Rates | None = None, predict: Predictor = predict
) -> Rates:
    """The rates that explain measured step times best.

    Five factors on `start` are fitted: on the work of network bytes, on that of codecs, on that of sums and
    copies, and on the two shares of the line rate. A factor stays 1 where the measurements do not depend on it.
    `predict` is the model to calibrate: the cost model, or the simulator. The fit is least squares of the
    logarithms of step times by the Levenberg-Marquardt method, with Huber's loss and a normal prior.

    Raises:
        ArrayError: There is no measurement, or a time is not positive.
    """
    points, start = list(measurements), start or Rates()
    if not points:
        raise ArrayError("calibrate: there is no measurement")
    for point in points:
        if not 0 < point.step_s < math.inf:
            raise ArrayError(f"calibrate: step_s of {point.method!r} is {point.step_s!r}, expected seconds")
    measured = np.log([point.step_s for point in points])
    highest = np.log([100.0, 100.0, 100.0, 1 / start.direct, 1 / start.ring])
    prior = (_NOISE / _SPREADS) ** 2

    def errors(logs: _Vector) -> _Vector:
        rates = _scaled(start, logs)
        return np.log([predict(p.method, p.job, p.cluster, rates).step_s for p in points]) - measured

    def cost(error: _Vector, logs: _Vector) -> float:
        far = np.abs(error)
        huber = np.where(far <= _OUTLIER, far**2, _OUTLIER * (2 * far - _OUTLIER))
        return float(huber.sum() + (prior * logs**2).sum())

    logs, damping = np.zeros(len(prior)), 1e-2
    error = errors(logs)
    for _ in range(100):
        slopes = np.stack(
            [(errors(logs + d) - errors(logs - d)) / 2e-3 for d in 1e-3 * np.eye(len(logs))], axis=1
        )
        weights = np.minimum(1.0, _OUTLIER / np.maximum(np.abs(error), 1e-12))
        normal = slopes.T @ (weights[:, None] * slopes) + np.diag(prior)
        gradient = slopes.T @ (weights * error) + prior * logs
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
        trial = np.clip(logs - step, -math.log(100.0), highest)
        trial_error = errors(trial)
        gain = cost(error, logs) - cost(trial_error, trial)
        if gain > 0:
            logs, error, damping = trial, trial_error, damping / 3
            if gain < 1e-9:
                break
        else:
            damping *= 4
            if damping > 1e6:
                break
    return _scaled(start, logs)


_Vector: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


def _scaled(rates: Rates, logs: _Vector) -> Rates:
    """Times the exponentials of `logs`: network work, work of codecs, of sums and copies, and the two shares."""
    network, coding, memory, direct, ring = (float(factor) for factor in np.exp(logs))

    def slower(codec: CodecRates) -> CodecRates:
        return CodecRates(codec.encode / coding, codec.decode / coding, codec.combine / coding)

    return dataclasses.replace(
        rates,
        minmax=slower(rates.minmax),
        cast=slower(rates.cast),
        add=rates.add / memory,
        copy=rates.copy / memory,
        network_s_per_byte=rates.network_s_per_byte * network,
        direct=min(1.0, rates.direct * direct),
        ring=min(1.0, rates.ring * ring),
    )
