"""The contract of averages, and the exact mean.

    Exact()                     the mean, in the array's own precision
    Reproducible()              the mean, to bits that depend on the addends alone
    Quantized(codec)            the mean, through a lossy codec: fewer bytes on the wire
    ErrorFeedback(inner)        `inner`, a quantized mean; its error is added to the next one
    Hierarchical(inner)         reduce inside each node, `inner` across nodes, gather inside each node

They nest: `Hierarchical(Quantized(MinMaxUInt8()))` quantizes only the arrays that cross between nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ..arrays import COMPLEX, FLOATS, Array
from ..comm import Communicator
from ..errors import UnsupportedError

InPlace: TypeAlias = Callable[[Array], Array]
"""Averages an array in place, over all ranks, and returns it. Collective."""


class Average(Protocol):
    """A way to average; a frozen dataclass."""

    def bind(self, comm: Communicator, like: Array | None = None) -> InPlace:
        """Prepare averaging over `comm`; the result averages a contiguous array in place.

        Collective. With `like`, everything that depends on the library, dtype and size of the arrays is prepared
        now, for arrays like that one; other arrays may still be averaged.
        """

    def check(self, dtype: str) -> None:
        """Raise unless arrays of this dtype can be averaged.

        Raises:
            UnsupportedError: They can't.
        """


@dataclass(frozen=True)
class Exact:
    """The mean, in the array's own precision (float16 and bfloat16 are added in float32).

    >>> import numpy as np
    >>> from bagua_comm.testing import run_ranks
    >>> run_ranks(2, lambda comm: Exact().bind(comm)(np.array([0.0, comm.rank])))
    [array([0. , 0.5]), array([0. , 0.5])]
    """

    def bind(self, comm: Communicator, like: Array | None = None) -> InPlace:
        """See `Average.bind`."""
        return lambda x: comm.allreduce(x, out=x, op="avg")

    def check(self, dtype: str) -> None:
        """Takes every floating-point and complex dtype."""
        if dtype not in FLOATS | COMPLEX:
            raise UnsupportedError(f"{self} cannot average {dtype}; expected a floating-point or complex dtype")
