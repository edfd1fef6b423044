"""The contract of averages, and the exact mean.

    Exact()                     the mean, in the array's own precision
    Reproducible()              the mean, to bits that depend on the addends alone
    Quantized(codec)            the mean, through a lossy codec: fewer bytes on the wire
    TopK(chunk, keep)           the mean of the largest elements of each rank
    ErrorFeedback(inner)        `inner`, a quantized or sparse mean; its error is added to the next one
    Hierarchical(inner)         reduce inside each node, `inner` across nodes, gather inside each node
    Hierarchical(inner, inside=Quantized(codec))    the same, through a codec inside nodes too

They nest: `Hierarchical(Quantized(MinMaxUInt8()))` quantizes only the arrays that cross between nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Protocol, TypeAlias

from ..arrays import COMPLEX, FLOATS, Array
from ..comm import Communicator
from ..errors import ArrayError, UnsupportedError, how_to_call

InPlace: TypeAlias = Callable[[Array], Array]
"""A function that averages an array over all ranks in place, and returns it. Collective."""


class Average(Protocol):
    """A method of averaging arrays over ranks; a frozen dataclass."""

    def bind(self, comm: Communicator, like: Array | None = None) -> InPlace:
        """Return a function that averages a contiguous array over the ranks of `comm`, in place.

        Collective. With `like`, prepare all that depends on the library, dtype and size of the arrays, for arrays
        like it; other arrays may be averaged as well.
        """

    def check(self, dtype: str) -> None:
        """Raise unless arrays of this dtype can be averaged.

        Raises:
            UnsupportedError: They cannot.
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
        """Accept every floating-point and complex dtype."""
        if dtype not in FLOATS | COMPLEX:
            raise UnsupportedError(f"{self} cannot average {dtype}; expected a floating-point or complex dtype")


# Checks of arguments --------------------------------------------------------------------------------


def check_average_argument(owner: str, value: object, name: str = "average") -> None:
    """Raise `ArrayError` unless `value`, of the argument `name`, is an Average."""
    if isinstance(value, type) or not callable(getattr(value, "bind", None)):
        hint = (
            ""
            if isinstance(value, FunctionType)
            else how_to_call(value, form_of_class(value, "Quantized({})", "{}"))
        )
        if hasattr(value, "wire_nbytes") and not hint:
            hint = f"; a codec becomes one by Quantized({briefly(value)})"
        raise ArrayError(
            f"{owner}: {name} is {value!r}, expected an Average such as Exact() or Quantized(MinMaxUInt8()){hint}"
        )


def form_of_class(value: object, of_codec: str, of_average: str) -> str:
    """The form for `how_to_call` that fits what a class or a partial of it makes; "{}" if that is neither."""
    made = getattr(value, "func", value)
    return of_average if hasattr(made, "bind") else of_codec if hasattr(made, "wire_nbytes") else "{}"


def briefly(settings: object) -> str:
    """The expression that makes an object, without its settings."""
    kind = type(settings)
    try:
        return f"{kind.__name__}()" if kind() == settings else f"{kind.__name__}(...)"
    except Exception:  # it needs arguments
        return f"{kind.__name__}(...)"


def check_average(average: Average, dtype: str) -> None:
    """Raise `UnsupportedError` unless `average` supports this dtype; one without `check` supports all."""
    check = getattr(average, "check", None)
    if check is not None:
        check(dtype)
