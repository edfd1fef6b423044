"""The average of a group of the backend "bagua": `BackendOptions`, and its reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from bagua_comm import ArrayError, Average, Communicator, UnsupportedError, arrays
from bagua_comm.arrays import COMPLEX, FLOATS, Array, Op
from bagua_comm.averages import Exact, InPlace, Shards
from bagua_comm.averages.base import check_average_argument, scale
from bagua_comm.comm.weights import agree_by, check_weight_argument, mean_in_place, multiply


@dataclass(frozen=True)
class BackendOptions:
    """Options of a process group of the backend "bagua", the same on all its ranks.

    Give them to `init_process_group` or `new_group` as `pg_options`, or to a dimension of PyTorch's device mesh:
    `init_device_mesh("cpu", (2, 2), backend_override={0: ("bagua", BackendOptions(...))})`.

    Args:
        average: How `all_reduce` and `reduce_scatter` add and average floats: by `Quantized(codec)`,
            `Reproducible()`, or another average without a residual; if None, exactly. It applies to every such
            call of the group with SUM or AVG of a dtype that the average takes, except to a `reduce_scatter` of
            parts that differ in size. The time limit is that of the group, whatever the call says.
            Make a group for the gradients alone:
            `DistributedDataParallel(model, process_group=dist.new_group(pg_options=...))`.
        weight: A function that returns the weight of this rank in the mean of such a call, as the number of its
            tokens in this step; given on all ranks. With a loss that is the mean over a rank's own tokens,
            PyTorch's wrapper then has the gradients of one process with the tokens of all ranks; see
            `bagua_comm.Engine.weight`. It is called on a thread of the group, before each reduction, and costs 8
            bytes. If it returns None on all ranks, the mean is plain; if on some, all raise `ArrayError`.

    Raises:
        ArrayError: `average` is no average, or keeps a residual, which belongs to one array; or `weight` is no
            function.
        UnsupportedError: There is a `weight`, and `average` divides by other numbers than that of ranks.

    >>> from bagua_comm import MinMaxUInt8, Quantized
    >>> BackendOptions(average=Quantized(MinMaxUInt8())).average
    Quantized(codec=MinMaxUInt8(...), ...)
    """

    average: Average | None = None
    weight: Callable[[], float | None] | None = None
    _timeout: ClassVar[None] = None
    """What PyTorch's `init_device_mesh` passes on to `new_group`, which then has its default."""

    def __post_init__(self) -> None:
        check_weight_argument("BackendOptions", self.weight)
        if self.average is None:
            return
        check_average_argument("BackendOptions", self.average)
        if self.average.has_residual:
            raise ArrayError(
                f"BackendOptions: average is {self.average}, which keeps a residual of one array, but a group "
                "averages many; leave ErrorFeedback out, or use bagua_torch.DistributedDataParallel"
            )
        if self.weight is not None:
            self.average.check_weights()


class GroupAverage:
    """Adds and averages arrays of one communicator by an average.

    Args:
        options: The average, and the weight of this rank. Without both, it takes no array.
        comm: The communicator.
    """

    def __init__(self, options: BackendOptions, comm: Communicator) -> None:
        self._weight, self._comm = options.weight, comm
        self._average = Exact() if options.average is None and options.weight is not None else options.average
        self._mean: InPlace | None = None
        self._shards: Shards | None = None

    def takes(self, op: Op, xs: Sequence[Array]) -> bool:
        """Whether arrays of these dtypes are reduced here by `op`; integers and bools are added exactly."""
        dtypes = {arrays.dtype_name(x.dtype) for x in xs}
        if self._average is None or op not in ("sum", "avg") or not dtypes <= FLOATS | COMPLEX:
            return False
        try:
            for dtype in dtypes:
                self._average.check(dtype)
        except UnsupportedError:
            return False
        return True

    def allreduce(self, xs: Sequence[Array], op: Op) -> None:
        """Reduce each of `xs` over all ranks, in place. Collective."""
        assert self._average is not None
        self._mean, weighting = self._mean or self._average.bind(self._comm), agree_by(self._comm, self._weight)
        for x in xs:
            mean = arrays.contiguous(x).reshape(-1)
            mean_in_place(weighting, mean, self._mean)
            if op == "sum":
                scale(mean, self._comm.size)
            x[...] = mean.reshape(x.shape)

    def reduce_scatter(self, x: Array, out: Array, op: Op) -> None:
        """Reduce `x`, (p * m,), over all ranks, and keep this rank's chunk in `out`, (m,).

        Collective.
        """
        assert self._average is not None
        self._shards = self._shards or self._average.bind_shards(self._comm)
        weighting = agree_by(self._comm, self._weight)
        if weighting is not None:
            x = x.copy()
            multiply(x, weighting.factors[-1])
        self._shards(x, out, "avg" if op == "avg" else "sum")
