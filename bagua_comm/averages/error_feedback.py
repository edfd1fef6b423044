"""Error feedback: the error of a quantized or sparse mean is added to the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

import numpy as np

from .. import arrays, kernels
from ..arrays import AnyArray, Array, LinearOp, Scratch
from ..codecs import Codec
from ..comm import Communicator
from ..errors import ArrayError, UnsupportedError, how_to_call
from .base import Average, InPlace, Shards, compare_settings, with_changed
from .coded import check_decay
from .quantized import Quantized, quantized_reduce_scatter
from .top_k import TopK

_Result = TypeVar("_Result")


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Average):
    """A quantized or sparse mean with error feedback: the error of each mean is added to the next one.

    With x the array of a rank, r its residual, Q the codec or the choice of `TopK`, b the `decay` and c the
    `retain`:

        r <- c r        v = x + (1 - b) r        mean of Q(v) over the ranks        r <- b r + v - Q(v)

    Errors do not accumulate: if c is 1, the sum of the means, plus the mean of the ranks' residuals, equals the
    sum of the exact means since the last reset. All quantizations are compensated: of the array of each rank,
    and, by `Quantized`, of the mean. The cost is one more array like the averaged one, and two more decodings.
    The residual of an element whose error is not finite is reset to zero.

    Each bound average serves one array; algorithms bind one for every bucket, and checkpoints hold the residuals,
    decoded, and the number of means since the last reset. Do not combine it with dynamic loss scaling, which
    changes the unit of the gradients.

    Args:
        inner: The quantized mean, without `min_bytes`; or `TopK`, the mean of the largest elements.
        decay: The part of the residual that each mean leaves in it, at least 0 and below 1. 0 adds each error
            whole, to the next mean. Above 0 what is added, (1 - b) r, is a moving average of errors, which varies
            less: for codecs of few bits. It is the e of LoCo: e <- b e + (1 - b) (v - Q(v)).
        reset_every: Set the residual to zero after this number of means, counted equally on all ranks; None for
            never.
        residual_codec: Encodes the residual between two means, as `MinMaxUInt8()`, which needs a quarter of the
            memory; None to keep it as it is. Decoded, one residual at a time is in scratch memory.
        retain: The part of the residual that is not forgotten before each mean, from 0 to 1. Below 1 what has
            waited for long counts less: the error decay of SparseLoCo, for sparse means, which send an element
            late.

    Raises:
        ArrayError: An argument is out of range.

    Source: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error
    Feedback Fixes SignSGD", arXiv 1901.09847; both ways: Tang et al., "DoubleSqueeze", arXiv 1905.05957; decay,
    resets and encoded residuals: Xie et al., "LoCo: Low-Bit Communication Adaptor", arXiv 2407.04480; `retain`:
    Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706.

    >>> import numpy as np
    >>> from bagua_comm import MinMaxUInt8
    >>> from bagua_comm.testing import run_ranks
    >>> def body(comm):
    ...     mean, x = ErrorFeedback(Quantized(MinMaxUInt8())).bind(comm), np.array([0, 0.3, 255], np.float32)
    ...     return (sum(mean(x.copy()) for _ in range(10)) / 10).round(3)
    >>> run_ranks(2, body)[0]
    array([  0. ,   0.3, 255. ], dtype=float32)
    """

    inner: Quantized | TopK = field(default_factory=Quantized)
    decay: float = 0.0
    reset_every: int | None = None
    residual_codec: Codec | None = None
    retain: float = 1.0
    has_residual = True

    def __post_init__(self) -> None:
        if not isinstance(self.inner, (Quantized, TopK)):
            found = type(self.inner).__name__
            advice = f"; or {found}(ErrorFeedback())" if found == "Hierarchical" else how_to_call(self.inner)
            raise ArrayError(
                f"ErrorFeedback: inner is {self.inner!r}, expected Quantized(codec) or TopK(){advice}"
            )
        if isinstance(self.inner, Quantized) and self.inner.min_bytes:
            raise ArrayError(
                f"ErrorFeedback: inner has min_bytes={self.inner.min_bytes}, expected None or 0 to quantize all"
            )
        for name, kind in (("decay", np.number), ("reset_every", np.integer), ("retain", np.number)):
            if isinstance(value := getattr(self, name), kind):
                object.__setattr__(self, name, value.item())
        check_decay("ErrorFeedback", self.decay)
        check_retain("ErrorFeedback", "retain", self.retain)
        for name in ("decay", "retain"):
            object.__setattr__(self, name, float(getattr(self, name)))  # ranks compare settings by their repr
        if self.reset_every is not None and (type(self.reset_every) is not int or self.reset_every < 1):
            raise ArrayError(
                f"ErrorFeedback: reset_every is {self.reset_every!r}, expected None or an int of at least 1"
            )
        if self.residual_codec is not None and not isinstance(self.residual_codec, Codec):
            raise ArrayError(
                f"ErrorFeedback: residual_codec is {self.residual_codec!r}, expected None or a Codec such as "
                f"MinMaxUInt8(){how_to_call(self.residual_codec)}"
            )
        if self.residual_codec is not None and self.residual_codec.random_seed is not None:
            raise ArrayError(
                f"ErrorFeedback: residual_codec is {self.residual_codec}, which rounds stochastically; "
                "expected one that rounds to the nearest value, since residuals stay on their rank"
            )

    def __repr__(self) -> str:
        """The settings that are not defaults, so that checkpoints of earlier versions load."""
        return with_changed(self, *(entry.name for entry in fields(self)[1:]))

    @property
    def weighs(self) -> bool:  # type: ignore[override]
        """See `Average`; that of `inner`."""
        return self.inner.weighs

    def bind(self, comm: Communicator, like: Array | None = None, sizes: Sequence[int] | None = None) -> InPlace:
        """See `Average.bind`, and `TopK.bind` for `sizes`.

        Raises:
            CommMismatch: The ranks have different settings or tensors. Raised on all ranks.
        """
        compare_settings(comm, self)
        if isinstance(self.inner, Quantized):
            mean = replace(self.inner, min_bytes=0).bind(comm, like)
        else:
            mean = self.inner.bind(comm, like, sizes)
        return _Feedback(comm, mean, self._residual())

    def bind_shards(self, comm: Communicator, tensors: Sequence[tuple[int, int]] | None = None) -> Shards:
        """See `Average.bind_shards`. The residual is like the whole array.

        Raises:
            ArrayError: `inner` is `TopK`, which sends the elements of all chunks to every rank.
            CommMismatch: The ranks have different settings. Raised on all ranks.
        """
        if not isinstance(self.inner, Quantized):
            raise ArrayError(
                f"bind_shards: {self} sends the elements of all shards to every rank, expected a mean that sends "
                "each to its rank, as ErrorFeedback(Quantized())"
            )
        compare_settings(comm, self, "bind_shards")
        return _FeedbackOfShards(comm, self._residual(), self.inner.codec)

    def _residual(self) -> Residual:
        """Return the residual of one array, without errors of earlier means."""
        return (Residual if self.residual_codec is None else _EncodedResidual)(self)

    def check(self, dtype: str) -> None:
        """Accept the dtypes of the inner mean and of the codec of the residual."""
        self.inner.check(dtype)
        codec = self.residual_codec
        if codec is not None and dtype not in codec.dtypes:
            raise UnsupportedError(
                f"ErrorFeedback: residual_codec is {codec}, which cannot code {dtype}, only "
                f"{', '.join(sorted(codec.dtypes))}"
            )


def check_retain(owner: str, name: str, value: object) -> None:
    """Raise `ArrayError` unless `value`, of the argument `name`, is a number from 0 to 1."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ArrayError(f"{owner}: {name} is {value!r}, expected a number from 0 to 1")


@dataclass
class Residual:
    """The residual of one array on this rank, and the number of means since it was zero."""

    settings: ErrorFeedback
    residual: Array | None = field(default=None, metadata={"reshape": "mean"})
    """The error of earlier means on this rank; None before the first. Only its mean over the ranks matters."""
    means: int | None = None
    """Number of means since the last reset, the same on all ranks; None if there are no resets."""

    def __post_init__(self) -> None:
        self.means = None if self.settings.reset_every is None else 0

    @property
    def size(self) -> int | None:
        """Number of elements of the residual; None before the first mean."""
        return None if self.residual is None else int(self.residual.size)

    @property
    def nbytes(self) -> int:
        """The bytes that hold the residual now."""
        return 0 if self.residual is None else int(self.residual.nbytes)

    def compensate(self, x: Array, scratch: Scratch, mean: Callable[[Array], _Result]) -> _Result:
        """Return `mean(residual)`, which adds the residual to `x` and overwrites it with the new one.

        Args:
            x: An array like the residual.
            scratch: Memory for a decoded residual.
            mean: The mean of `x`.
        """
        if self._is_due:
            self._clear()
        retain = self.settings.retain

        def of_retained(residual: Array) -> _Result:
            kernels.of(residual).scale(residual, retain)
            return mean(residual)

        result = self._compensate(x, scratch, mean if retain == 1 else of_retained)
        self.skip()
        return result

    def skip(self) -> None:
        """Count a mean, in which this rank may have no part."""
        if self.settings.reset_every is not None:
            self.means = 1 + (0 if self._is_due else self.means or 0)

    @property
    def _is_due(self) -> bool:
        """Whether the next mean starts without a residual."""
        every = self.settings.reset_every
        return every is not None and (self.means or 0) >= every

    def clear_end(self, count: int) -> None:
        """Set the last `count` elements of the residual to zero."""
        if count and self.residual is not None:
            self.residual.reshape(-1)[-count:] = 0

    def _clear(self) -> None:
        if self.residual is not None:
            self.residual[...] = 0

    def _compensate(self, x: Array, scratch: Scratch, mean: Callable[[Array], _Result]) -> _Result:
        if self.residual is None:
            self.residual = arrays.zeros_like(x)
        return mean(self.residual)


class _EncodedResidual(Residual):
    """A `Residual` that is encoded between two means, by `residual_codec`.

    One that was read or set, as by a checkpoint, stays decoded until the next mean, so that a training that loads
    it continues with the same bits.
    """

    _decoded: Array | None = None
    _encoded: Array | None = None
    """The wire bytes, (1, w)."""
    _like: Array
    """An empty array of the dtype, library and device of the encoded one."""
    _shape: tuple[int, ...]
    _end: int = 0
    """Number of elements at the end that are zeros when decoded."""

    @property
    def residual(self) -> Array | None:
        """The residual, decoded."""
        if self._decoded is None and self._encoded is not None:
            decoded = arrays.empty(self._shape, self._like.dtype, like=self._like)
            self._decode(decoded)
            self._decoded, self._encoded = decoded, None
        return self._decoded

    @residual.setter
    def residual(self, residual: Array | None) -> None:
        self._decoded, self._encoded = residual, None

    @property
    def size(self) -> int | None:
        """See `Residual.size`."""
        if self._encoded is not None:
            return int(np.prod(self._shape))
        return None if self._decoded is None else int(self._decoded.size)

    @property
    def nbytes(self) -> int:
        """See `Residual.nbytes`."""
        return sum(int(held.nbytes) for held in (self._decoded, self._encoded) if held is not None)

    def clear_end(self, count: int) -> None:
        """See `Residual.clear_end`. An encoded residual stays encoded."""
        self._end = count
        if self._decoded is not None:
            super().clear_end(count)

    def _clear(self) -> None:
        self.residual = None

    def _compensate(self, x: Array, scratch: Scratch, mean: Callable[[Array], _Result]) -> _Result:
        residual, encoded = self._decoded, self._encoded
        if residual is None:
            residual = scratch.take("residual", x.shape, x.dtype, like=x)
            if encoded is None:
                residual[...] = 0
            elif (x.shape, x.dtype) != (self._shape, self._like.dtype):
                raise ArrayError(
                    f"ErrorFeedback: x is {x.dtype}{x.shape}, expected {self._like.dtype}{self._shape} as "
                    "before; bind an average for each array"
                )
            else:
                self._decode(residual)
        result = mean(residual)
        codec = self.settings.residual_codec
        assert codec is not None
        if x.size:
            if encoded is None:
                self._like, self._shape = arrays.empty((0,), x.dtype, like=x), x.shape
            self._encoded, self._decoded = codec.encode(residual.reshape(1, -1), encoded), None
        return result

    def _decode(self, out: Array) -> None:
        codec = self.settings.residual_codec
        assert codec is not None
        assert self._encoded is not None
        codec.decode(self._encoded, out.reshape(1, -1))
        out.reshape(-1)[out.size - self._end :] = 0


@dataclass
class _Feedback:
    """A bound `ErrorFeedback`, and its residual."""

    comm: Communicator
    mean: Callable[..., Array]
    """The bound `inner`, which takes a residual as well."""
    state: Residual = field(metadata={"same_path": True})

    @property
    def residual(self) -> Array | None:
        """The residual of this rank; None before the first mean."""
        return self.state.residual

    @residual.setter
    def residual(self, residual: Array | None) -> None:
        self.state.residual = residual

    def skip(self) -> None:
        """Count a mean of other ranks, so that the counts of all ranks stay equal."""
        self.state.skip()

    def __call__(self, x: Array) -> Array:
        """Average `x` in place. Collective."""
        state = self.state
        decay = state.settings.decay
        return state.compensate(
            arrays.as_array(x), self.comm.scratch, lambda residual: self.mean(x, residual, decay)
        )


@dataclass
class _FeedbackOfShards:
    """An `ErrorFeedback` that is bound for shards, and its residual."""

    comm: Communicator
    state: Residual
    codec: Codec

    def __call__(self, x: AnyArray, out: AnyArray, op: LinearOp) -> AnyArray:
        """See `Shards`."""
        comm, codec, decay = self.comm, self.codec, self.state.settings.decay
        return self.state.compensate(
            arrays.as_array(x),
            comm.scratch,
            lambda residual: quantized_reduce_scatter(
                comm, x, out, op=op, codec=codec, residual=residual, decay=decay
            ),
        )
