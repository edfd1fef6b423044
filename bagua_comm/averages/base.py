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

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from types import FunctionType
from typing import TypeAlias

from .. import arrays, kernels
from ..arrays import COMPLEX, FLOATS, AnyArray, Array, LinearOp
from ..comm import Communicator
from ..comm.arguments import as_argument
from ..comm.call import Call
from ..comm.weighted import weighted_mean
from ..errors import ArrayError, UnsupportedError, how_to_call

InPlace: TypeAlias = Callable[[Array], Array]
"""A function that averages an array over all ranks in place, and returns it. Collective."""

WeightedInPlace: TypeAlias = Callable[[Array, float], Array]
"""A function of an array and the weight of this rank: averages in place, and returns the array. Collective."""

Shards: TypeAlias = Callable[[AnyArray, AnyArray, LinearOp], object]
"""A function of `x`, (p * m,), `out`, (m,), and "avg" or "sum": a reduce-scatter, which returns `out`.

Collective. Both arrays are contiguous. `x` keeps its values, and `out` may be this rank's chunk of `x`.
"""

Gathers: TypeAlias = Callable[[AnyArray, AnyArray], object]
"""A function of `x`, (m,), and `out`, (p * m,): an allgather to the same bytes on all ranks, which returns `out`.

Collective. Both arrays are contiguous. `x` may be this rank's chunk of `out`.
"""


class Average(ABC):
    """A method of averaging arrays over ranks; a frozen dataclass.

    Each method that binds it to a communicator returns a function of arrays. One of your own defines `bind`.
    """

    addends: int | None = None
    """Total number of addends of all ranks; None if each rank has one."""
    is_reproducible = False
    """Whether the bits depend on the addends and on where tensors begin alone. Bound shards hold addends then."""
    keeps_zeros = False
    """Whether the mean of zeros is always zero: codecs may round it, and residuals are added."""
    has_residual = False
    """Whether a bound average has a residual, which belongs to one array."""
    weighs = True
    """Whether ranks may have weights: not if it divides by other numbers than that of all ranks."""

    @abstractmethod
    def bind(self, comm: Communicator, like: Array | None = None) -> InPlace:
        """Return a function that averages a contiguous array over the ranks of `comm`, in place.

        Collective. With `like`, prepare all that depends on the library, dtype and size of the arrays, for arrays
        like it; other arrays may be averaged as well.
        """

    def bind_weighted(self, comm: Communicator, like: Array | None = None) -> WeightedInPlace:
        """Return a function like that of `bind`, of an array and its weight: see `Communicator.allreduce`.

        Collective. The residual of an average with error feedback has the unit of the result: a weight that
        changes does not scale it.

        Raises:
            UnsupportedError: It divides by other numbers than that of ranks; see `check_weights`.

        >>> import numpy as np
        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: Exact().bind_weighted(comm)(np.array([4.0 * comm.rank]), 3 - 2 * comm.rank))
        [array([1.]), array([1.])]
        """
        self.check_weights()
        mean, name, shrinks = self.bind(comm, like), type(self).__name__, not self.has_residual

        def average(x: Array, weight: float) -> Array:
            return weighted_mean(comm, Call(comm, name, x, op="avg"), x, weight, mean, shrinks=shrinks)

        return average

    def bind_shards(self, comm: Communicator, tensors: Sequence[tuple[int, int]] | None = None) -> Shards:
        """Return a function that averages an array of which each rank keeps a chunk: a reduce-scatter.

        Collective. Unless an average defines it, it averages the whole array on all ranks: twice the bytes.

        Args:
            comm: The ranks.
            tensors: The numbers of rows and of elements of a row of the tensors in the array, which are cut along
                their first dimension: chunk r has part r of each, padded to equal rows. None for one tensor.
        """
        return _WholeShards(comm, self.bind(comm))

    def bind_gather(self, comm: Communicator) -> Gathers:
        """Return a function that gathers the chunks of all ranks, exactly or through a codec: an allgather.

        Collective.

        Raises:
            ArrayError: The average says nothing of how to gather.
        """
        raise ArrayError(
            f"bind_gather: {self} only averages; to gather, expected Exact(), Quantized(codec), or Hierarchical "
            "of one of these"
        )

    def check(self, dtype: str) -> None:  # noqa: B027 - most averages of users take every dtype
        """Raise unless arrays of this dtype can be averaged.

        Raises:
            UnsupportedError: They cannot.
        """

    def check_weights(self, owner: str = "weight") -> None:
        """Raise `UnsupportedError` if ranks cannot have weights in the mean; see `weighs`."""
        if not self.weighs:
            raise UnsupportedError(
                f"{owner}: {self} divides by the number of ranks that send an element, and not by their weights; "
                'expected a mean over all ranks, as by divide="all"'
            )


@dataclass
class _WholeShards:
    """The default of `Average.bind_shards`."""

    comm: Communicator
    mean: InPlace

    def __call__(self, x: AnyArray, out: AnyArray, op: LinearOp) -> AnyArray:
        comm = self.comm
        value, target = check_shards("bind_shards", ("x", x), ("out", out), comm.size, op)
        whole = comm.scratch.take("whole", (value.size,), value.dtype, like=value)
        whole[...] = value.reshape(-1)
        self.mean(whole)
        mine = arrays.rows(whole, comm.size)[comm.rank]
        if op == "sum":
            scale(mine, comm.size)
        target[...] = mine.reshape(target.shape)
        return out


def scale(x: Array, factor: float) -> None:
    """Multiply `x` by `factor`, in place, by a kernel: NumPy would round the factor to 16 bits."""
    if x.size:
        x = arrays.as_real(x, "sum")
        kernels.of(x).scale(x, factor)


@dataclass(frozen=True)
class Exact(Average):
    """The mean, in the array's own precision (float16 and bfloat16 are added in float32).

    >>> import numpy as np
    >>> from bagua_comm.testing import run_ranks
    >>> run_ranks(2, lambda comm: Exact().bind(comm)(np.array([0.0, comm.rank])))
    [array([0. , 0.5]), array([0. , 0.5])]
    """

    keeps_zeros = True

    def bind(self, comm: Communicator, like: Array | None = None) -> InPlace:
        """See `Average.bind`."""
        return lambda x: comm.allreduce(x, out=x, op="avg")

    def bind_shards(self, comm: Communicator, tensors: Sequence[tuple[int, int]] | None = None) -> Shards:
        """See `Average.bind_shards`."""
        return lambda x, out, op: comm.reduce_scatter(x, out=out, op=op)

    def bind_gather(self, comm: Communicator) -> Gathers:
        """See `Average.bind_gather`."""
        return lambda x, out: comm.allgather(x, out=out)

    def check(self, dtype: str) -> None:
        """Accept every floating-point and complex dtype."""
        if dtype not in FLOATS | COMPLEX:
            raise UnsupportedError(f"{self} cannot average {dtype}; expected a floating-point or complex dtype")


# Checks of arguments --------------------------------------------------------------------------------


def check_average_argument(owner: str, value: object, name: str = "average") -> None:
    """Raise `ArrayError` unless `value`, of the argument `name`, is an Average."""
    if not isinstance(value, Average):
        hint = (
            ""
            if isinstance(value, FunctionType)
            else how_to_call(value, form_of_class(value, "Quantized({})", "{}"))
        )
        if hasattr(value, "wire_nbytes") and not hint:
            hint = f"; a codec becomes one by Quantized({briefly(value)})"
        if callable(getattr(value, "bind", None)) and not hint:
            hint = f"; let {type(value).__name__} inherit from bagua_comm.Average"
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


def check_shards(
    owner: str, whole: tuple[str, object], chunk: tuple[str, object], ranks: int, op: str = "avg"
) -> tuple[Array, Array]:
    """View an array of all chunks and one of a chunk, each with its name, as arrays of NumPy or CuPy.

    Raises:
        ArrayError: They are not contiguous, or do not fit together; or `op` is neither "sum" nor "avg".
    """
    if op not in ("sum", "avg"):
        raise ArrayError(f'{owner}: op is {op!r}, expected "sum" or "avg"')
    found = {name: as_argument(owner, name, value) for name, value in (whole, chunk)}
    for name, x in found.items():
        if not arrays.is_contiguous(x):
            raise ArrayError(f"{owner}: {name} is not contiguous, expected C-contiguous memory")
    (all_name, every), (name, one) = found.items()
    if every.size != ranks * one.size or every.dtype != one.dtype:
        raise ArrayError(
            f"{owner}: {all_name} has {every.size} elements of {every.dtype}, expected "
            f"{ranks * one.size} of {one.dtype}, {ranks} times those of {name}"
        )
    return every, one


def with_changed(settings: object, *hidden: str) -> str:
    """The expression that makes a dataclass, without those of the `hidden` settings that are defaults.

    So a checkpoint of a version that had not these settings notes the same algorithm.
    """
    shown = []
    for entry in fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, entry.name)
        shown += [f"{entry.name}={value!r}"] if entry.name not in hidden or value != entry.default else []
    return f"{type(settings).__name__}({', '.join(shown)})"


def compare_settings(
    comm: Communicator, average: Average, name: str = "bind", tensors: tuple[int, ...] | None = None
) -> None:
    """Raise `CommMismatch` on all ranks unless all bind equal averages, for equal tensors. Collective."""
    owner = f"{type(average).__name__}.{name}"
    if tensors is None:
        call = Call(comm, owner, settings=average).unchecked()
    else:
        call = Call(comm, owner, settings=average, tensors=tensors).unchecked()
    call.run(lambda x, target: call.compare())
