"""Error feedback: the error of a quantized mean is added to the next one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .. import arrays
from ..arrays import Array
from ..comm import Communicator
from ..errors import ArrayError
from .base import InPlace
from .quantized import Quantized, QuantizedMean


@dataclass(frozen=True)
class ErrorFeedback:
    """A quantized mean with error feedback: the error of each mean is added to the next one.

    Errors do not accumulate: the sum of the means, plus the mean of the ranks' residuals, equals the sum of the
    exact means. Both quantizations are compensated: of the array of each rank, and of the mean. The cost is one
    more array like the averaged one, and two more decodings. The residual of an element whose error is not finite
    is reset to zero.

    Each bound average serves one array; algorithms bind one for every bucket, and checkpoints hold the residuals.
    Do not combine it with dynamic loss scaling, which changes the unit of the gradients.

    Source: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error
    Feedback Fixes SignSGD", arXiv 1901.09847; both ways: Tang et al., "DoubleSqueeze", arXiv 1905.05957.

    >>> import numpy as np
    >>> from bagua_comm import MinMaxUInt8
    >>> from bagua_comm.testing import run_ranks
    >>> def body(comm):
    ...     mean, x = ErrorFeedback(Quantized(MinMaxUInt8())).bind(comm), np.array([0, 0.3, 255], np.float32)
    ...     return (sum(mean(x.copy()) for _ in range(10)) / 10).round(3)
    >>> run_ranks(2, body)[0]
    array([  0. ,   0.3, 255. ], dtype=float32)
    """

    inner: Quantized = field(default_factory=Quantized)

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Quantized):
            raise ArrayError(f"ErrorFeedback: inner is {self.inner!r}, expected Quantized(codec)")
        if self.inner.min_bytes is not None:
            raise ArrayError(
                f"ErrorFeedback: inner has min_bytes={self.inner.min_bytes}, expected None to quantize all"
            )

    def bind(self, comm: Communicator, like: Array | None = None) -> InPlace:
        """See `Average.bind`."""
        mean = QuantizedMean(comm, replace(self.inner, min_bytes=0))
        if like is not None:
            mean.prepare(like)
        return _Feedback(mean)

    def check(self, dtype: str) -> None:
        """Accept the dtypes of the codec."""
        self.inner.check(dtype)


@dataclass
class _Feedback:
    """A bound `ErrorFeedback`, and its residual."""

    mean: QuantizedMean
    residual: Array | None = field(default=None, metadata={"reshape": "mean"})
    """The error of earlier means on this rank. Only its mean over the ranks is significant."""

    def __call__(self, x: Array) -> Array:
        if self.residual is None:
            self.residual = arrays.zeros_like(arrays.as_array(x))
        return self.mean(x, self.residual)
