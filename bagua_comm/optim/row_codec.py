"""How rows of computed matrices come back from their owners: as they are, or in the bytes of a codec.

With x the result of a matrix, r its residual and Q the codec, Q(x + r) travels, and r <- x + r - Q(x + r).

Source: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from .. import arrays, kernels
from ..arrays import Array, DType
from ..codecs import Codec
from ..codecs.base import check_codec_argument
from ..errors import ArrayError

FLOAT32 = np.dtype(np.float32)


class RowCodec:
    """Encodes and decodes rows, by a codec as float32.

    Args:
        codec: The codec; None to send rows as they are.

    Attributes:
        residuals: Those of the matrices that are owned here, by name; a new owner begins without, and so does an
            element whose error is not finite.
    """

    def __init__(self, codec: Codec | None = None) -> None:
        self.codec, self.residuals = codec, dict[Hashable, Array]()

    def size(self, count: int) -> int:
        """The elements that travel for `count` elements of a matrix."""
        return count if self.codec is None or not count else self.codec.wire_nbytes(count, FLOAT32)

    def dtype(self, of: DType) -> DType:
        """The dtype that travels for results of this one."""
        return of if self.codec is None else np.dtype(np.uint8)

    def encode(self, name: Hashable, result: Array, counts: Sequence[int]) -> list[Array]:
        """What travels to each rank of the result of a matrix, flat, of which it has `counts` elements."""
        if self.codec is None:
            return arrays.parts(result, counts)
        total = result.astype(FLOAT32)
        if name in self.residuals:
            total += self.residuals[name]
        rows = arrays.parts(total, counts)
        wires = [self.codec.encode(each[None])[0] if each.size else each.view(np.uint8) for each in rows]
        for each, wire in zip(rows, wires, strict=True):
            kernels.of(each).loss(each, self.decode(wire, each.size), 1.0, each)
        self.residuals[name] = total
        return wires

    def decode(self, piece: Array, count: int) -> Array:
        """The `count` elements of which `encode` has made a piece, flat."""
        if self.codec is None:
            return piece
        out = arrays.empty((1, count), FLOAT32, like=piece)
        return (self.codec.decode(piece[None], out) if count else out)[0]


def check_row_codec(owner: str, codec: Codec | None) -> None:
    """Raise unless `codec` is None, or codes float32 and rounds to the nearest value.

    Raises:
        ArrayError: It is not a Codec, or rounds stochastically.
        UnsupportedError: It does not take float32.
    """
    if codec is not None:
        check_codec_argument(owner, codec, "float32")
        if codec.random_seed is not None:
            raise ArrayError(
                f"{owner}: codec is {codec}, which rounds stochastically; expected one that rounds to the "
                "nearest value, since errors are fed back"
            )
