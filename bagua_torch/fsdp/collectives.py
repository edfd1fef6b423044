"""The all-gather, reduce-scatter and all-reduce that replace PyTorch's in a sharded model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from bagua_comm import (
    ArrayError,
    Average,
    Communicator,
    ErrorFeedback,
    Exact,
    Hierarchical,
    Quantized,
    Reproducible,
    UnsupportedError,
    arrays,
)
from bagua_comm.arrays import Array, LinearOp
from bagua_comm.averages import InPlace, quantized_reduce_scatter
from bagua_comm.averages.base import check_average
from bagua_comm.averages.error_feedback import Residual, residual_of
from bagua_comm.averages.hierarchical_shards import GatherByNode
from bagua_comm.averages.quantized_shards import allgather, codec_for, reduce_scatter
from bagua_comm.averages.reproducible_shards import ReproducibleShards

from ..arrays import as_array, dtype_name, torch_stream
from .groups import GroupComms
from .overlap import Gathering, Prefetch, Reductions, spoil
from .passes import BackwardPasses
from .torch_names import AllGather, ReduceScatter, Unit, op_of


class _Allocating:
    """Buffers in ordinary memory."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """See PyTorch's `Comm.allocate`."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Allocating, AllGather):
    """Gathers the parameters of a unit, exactly or through a codec.

    Args:
        comms: The communicators of the model.
        unit: The parameters.
        method: How to gather.
        prefetch: What gathers in advance in forward passes, if there are lanes.
    """

    def __init__(
        self,
        comms: GroupComms,
        unit: Unit,
        method: Exact | Quantized | Hierarchical,
        prefetch: Prefetch | None = None,
    ) -> None:
        self._comms, self._unit, self._method, self._prefetch = comms, unit, method, prefetch
        self._by_node: dict[Communicator, GatherByNode] = {}

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Gathering | None:
        """See PyTorch's `AllGather`. Complete, or in stream order, on return, unless it returns what to wait for.

        Collective.
        """
        comm = self._comms.of(group)
        lane = self._comms.lane_of(comm)
        with torch_stream(output_tensor.device):
            x, out = as_array(input_tensor), as_array(output_tensor)
            if isinstance(self._method, Quantized) and codec_for(self._method, comm, out) is not None:
                self._method.check(dtype_name(output_tensor))
            if lane is None or self._prefetch is None:
                self._gather(comm, x, out)
                return None
            return Gathering(lane, lane.submit(self._gather, comm, x, out), self._unit, self._prefetch)

    def _gather(self, comm: Communicator, x: Array, out: Array) -> None:
        method = self._method
        if isinstance(method, Hierarchical):
            if comm not in self._by_node:
                self._by_node[comm] = method.bind_gather(comm)
            self._by_node[comm](x, out)
        else:
            allgather(comm, x, out, codec=codec_for(method, comm, out))


class FeedsBack:
    """What a unit's gradients go through, with the residual of `ErrorFeedback`."""

    _unit: Unit
    _passes: BackwardPasses
    feedback: Residual | None
    """The residual, with its count of means; None without `ErrorFeedback`."""

    def _forget_if_it_raises(self) -> None:
        """Let the residual restart at zero if the running backward pass raises, since its gradients are lost."""
        if self.feedback is not None:
            self._passes.at_end(self._forget)

    def _forget(self) -> None:
        assert self.feedback is not None
        self.feedback.residual = None

    @property
    def residual(self) -> Array | None:
        """The error of earlier calls on this rank, flat."""
        return None if self.feedback is None else self.feedback.residual

    @property
    def numel(self) -> int:
        """Number of elements of the residual."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradients, and of the residual."""
        return self._unit.reduce_dtypes[0]

    @property
    def device(self) -> torch.device:
        """The device of the gradients, and of the residual."""
        return self._unit.device

    def residual_or_zeros(self) -> Array:
        """Return the residual; zeros before the first call and after parameters were frozen."""
        residual = self.residual
        if residual is not None and residual.size == self.numel:
            return residual
        return as_array(torch.zeros(self.numel, dtype=self.dtype, device=self.device))


class Reduce(_Allocating, FeedsBack, ReduceScatter):
    """Reduces the gradients of a unit, each rank its shard.

    Args:
        comms: The communicators of the model.
        unit: The parameters.
        method: How to average.
        comm: The ranks over which the unit is sharded; an average of another class is bound to it.
        passes: The backward passes of the model.
        pending: The reductions that have not ended, if there are lanes.
    """

    def __init__(
        self,
        comms: GroupComms,
        unit: Unit,
        method: Average,
        comm: Communicator,
        passes: BackwardPasses,
        pending: Reductions | None = None,
    ) -> None:
        self._comms, self._unit, self._method, self._comm = comms, unit, method, comm
        self._passes, self._pending = passes, pending
        self.feedback = residual_of(method) if isinstance(method, ErrorFeedback) else None
        self._mean: InPlace | None = None
        self._by_node: Callable[[Array, Array, LinearOp], Array] | None = None
        self._reproducible: _Reproducible | None = None
        if isinstance(method, Reproducible):
            self._reproducible = _Reproducible(method, comm, unit, passes)
        elif isinstance(method, Hierarchical) and isinstance(method.inner, (Exact, Quantized)):
            self._by_node = method.bind_shards(comm)
        elif not isinstance(method, (Exact, Quantized, ErrorFeedback)):
            self._mean = method.bind(comm)

    @property
    def numel(self) -> int:
        """Number of elements of the residual: of the gradients of all trainable parameters, shards padded."""
        return self._unit.gradient_numel

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """See PyTorch's `ReduceScatter`. Complete, or in stream order, on return, unless nobody reads it yet.

        Collective.
        """
        asked = op_of(op)
        if asked not in ("sum", "avg", "premul_sum"):
            raise UnsupportedError(f"bagua_torch.fsdp: PyTorch asks for {asked}, expected SUM, AVG or PREMUL_SUM")
        comm = self._comms.of(group)
        check_average(self._method, dtype_name(input_tensor))
        if isinstance(self._method, ErrorFeedback):
            check_numel(self._unit.name, input_tensor.numel(), self._unit.gradient_numel)
        self._begin()
        divisor = None
        if asked == "premul_sum":  # by 1 / factor, which PyTorch does not let us read from `op`
            divisor = self._unit.divide_factor or comm.size
        lane = self._comms.lane_of(comm)
        if lane is None or self._pending is None:
            self._forget_if_it_raises()
            with torch_stream(input_tensor.device):
                self._reduce(comm, input_tensor, output_tensor, asked, divisor)
            return
        at_once = self._unit.reads_at_once(output_tensor)
        if not at_once:
            spoil(output_tensor)
        future = lane.submit(self._reduce, comm, input_tensor, output_tensor, asked, divisor)
        if at_once:
            lane.result(future)
        else:
            self._pending.add(lane, future)
        self._forget_if_it_raises()

    def reset(self) -> None:
        """End what is under way, and drop the addends of a step that is lost."""
        if self._pending is not None:
            self._pending.wait()
        if self._reproducible is not None:
            self._reproducible.drop()

    def _begin(self) -> None:
        if self._pending is not None:
            self._pending.begin()
        if self._reproducible is not None:
            self._reproducible.begin()

    def _reduce(
        self, comm: Communicator, gradients: torch.Tensor, result: torch.Tensor, asked: str, divisor: float | None
    ) -> None:
        method, feedback, x, out = self._method, self.feedback, as_array(gradients), as_array(result)
        op: LinearOp = "avg" if asked == "avg" else "sum"
        if self._by_node is not None:
            self._by_node(x, out, op)
        elif self._reproducible is not None:
            self._reproducible(x, out, op)
        elif self._mean is not None:
            self._mean(x)
            out[...] = arrays.rows(x, comm.size)[comm.rank]
            if op == "sum":
                result.mul_(comm.size)  # PyTorch multiplies in float32; NumPy rounds the factor to the dtype
        elif feedback is not None:
            fit(self._unit.name, feedback, x)
            inner, decay = feedback.settings.inner, feedback.settings.decay
            assert isinstance(inner, Quantized)  # `attach` refuses others
            coder = inner.codec
            feedback.compensate(
                x,
                comm.scratch,
                lambda residual: quantized_reduce_scatter(
                    comm, x, out, op=op, codec=coder, residual=residual, decay=decay
                ),
            )
        else:
            codec = codec_for(method, comm, x) if isinstance(method, Quantized) else None
            reduce_scatter(comm, x, out, op=op, codec=codec)
        if divisor is not None:
            result.div_(divisor)

    def alone(self, reduced: torch.Tensor) -> None:
        """Reduce on a single rank, in place; PyTorch has divided by a divisor of the user already."""
        check_average(self._method, dtype_name(reduced))
        self._begin()
        with torch_stream(reduced.device):
            op = "avg" if self._unit.divide_factor is None else "sum"
            self._reduce(self._comm, reduced, reduced, op, None)


class _Reproducible:
    """Reproducible sums of the gradients of a unit, of which each rank keeps its shard.

    With `addends`, the passes of a step but the last leave zeros.
    """

    def __init__(self, method: Reproducible, comm: Communicator, unit: Unit, passes: BackwardPasses) -> None:
        self._method, self._comm, self._unit, self._passes = method, comm, unit, passes
        self._tensors = unit.gradient_rows
        self._sum = ReproducibleShards(method, comm, self._tensors)
        self._version = 0
        """That of the parameters when the first addend was held."""
        self._left: list[int | None] | None = None
        """The versions of the gradients at the end of the pass before, until the next one begins."""

    def __call__(self, x: Array, out: Array, op: LinearOp) -> None:
        found, version = self._sum, self._unit.version
        if found.held and (self._tensors != self._unit.gradient_rows or version != self._version):
            raise ArrayError(
                f"bagua_torch.fsdp: parameters of {self._unit.name or 'the root'} were changed, frozen or "
                f"unfrozen after {found.held} of the {found.share} backward passes of each rank that a step with "
                f"{self._method} has; run all of them before the optimizer"
            )
        if self._tensors != self._unit.gradient_rows:
            self._tensors = self._unit.gradient_rows
            self._sum = found = ReproducibleShards(self._method, self._comm, self._tensors)
        check_numel(self._unit.name, x.size, found.size, str(self._method))
        self._version = version
        found(x, out, op)

    def begin(self) -> None:
        """Begin a reduction. Drop the addends of earlier passes if `zero_grad` has cleared their gradients.

        If the pass raises, the addends of that pass are dropped.
        """
        held, left, self._left = self._sum.held, self._left, None
        cleared = not self._unit.has_gradients or left not in (None, self._unit.gradient_versions)
        if held and cleared and self._unit.version == self._version:
            warnings.warn(
                f"bagua_torch.fsdp: the gradients of {held} of the {self._sum.share} backward passes "
                f"of a step with {self._method} were cleared, so these passes are dropped; call "
                "zero_grad() after the last pass",
                RuntimeWarning,
                stacklevel=4,
            )
            self.drop()
        self._passes.at_end(partial(self.drop, self._sum.held), self._end)

    def _end(self) -> None:
        self._left = self._unit.gradient_versions

    def drop(self, keep: int = 0) -> None:
        """Drop the addends of passes, but for the first `keep`."""
        self._sum.drop(keep)


class Replicate(FeedsBack):
    """Averages a unit's shards of gradients over its replicas, in place.

    Args:
        unit: The parameters.
        method: How to average.
        comm: The ranks that keep the same shards.
        passes: The backward passes of the model.
    """

    def __init__(self, unit: Unit, method: Average, comm: Communicator, passes: BackwardPasses) -> None:
        self._unit, self._method, self._comm, self._passes = unit, method, comm, passes
        self._mean: Any = method.bind(comm)
        self.feedback = cast(Any, self._mean).state if isinstance(method, ErrorFeedback) else None

    @property
    def numel(self) -> int:
        """Number of elements of the residual: of this rank's shard of gradients."""
        return self._unit.shard_numel

    def __call__(self, reduced: torch.Tensor) -> None:
        """Average these gradients, and those of passes that have postponed it. Collective.

        PyTorch adds what this leaves in `reduced` to the gradients.
        """
        earlier = self._unit.partial_gradients
        if earlier is not None:
            reduced.add_(earlier)
        check_average(self._method, dtype_name(reduced))
        self._forget_if_it_raises()
        with torch_stream(reduced.device):
            x = as_array(reduced)
            if self.feedback is not None:
                check_numel(self._unit.name, x.size, self._unit.shard_numel)
                fit(self._unit.name, self.feedback, x)
            self._mean(x)
        if self._unit.divide_factor is not None:  # it divides the sum over all ranks
            reduced.mul_(self._comm.size)


def check_numel(name: str, numel: int, expected: int, method: str = "ErrorFeedback") -> None:
    """Raise unless gradients are those of all parameters of a unit, which `method` needs.

    Raises:
        UnsupportedError: They are not.
    """
    if numel != expected:
        raise UnsupportedError(
            f"bagua_torch.fsdp: {numel} gradient elements of {name or 'the root'} are reduced, expected "
            f"{expected}, since {method} needs the gradients of all parameters in each step; use "
            "Quantized(), or a PyTorch with FSDPModule.set_reduce_scatter_unused_params"
        )


def fit(name: str, feedback: Residual, x: Array) -> None:
    """Drop a residual, with a warning, if gradients like `x` have another number of elements."""
    if feedback.size in (None, x.size):
        return
    warnings.warn(
        f"bagua_torch.fsdp: parameters of {name or 'the root'} were frozen or unfrozen; its residual "
        "restarts at zero",
        RuntimeWarning,
        stacklevel=3,
    )
    feedback.residual = None
