"""The all-gather, reduce-scatter and all-reduce that replace PyTorch's in a sharded model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bagua_comm import ArrayError, Average, Communicator, UnsupportedError
from bagua_comm.arrays import Array, LinearOp
from bagua_comm.averages import Gathers
from bagua_comm.averages.error_feedback import Residual
from bagua_comm.comm.weights import Weigh, multiply

from ..arrays import as_array, dtype_name, torch_stream
from ..process_group.groups import GroupComms
from ..training.spans import DeviceRow
from .overlap import Gathering, Prefetch, Reductions, invalidate
from .passes import BackwardPasses
from .torch_names import AllGather, ReduceScatter, Unit, op_of
from .weighing import PassWeights


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
        gathers: How to gather, by communicator: results of `Average.bind_gather`.
        prefetch: What gathers in advance in forward passes, if there are lanes.
    """

    def __init__(
        self,
        comms: GroupComms,
        unit: Unit,
        gathers: Mapping[Communicator, Gathers],
        prefetch: Prefetch | None = None,
    ) -> None:
        self._comms, self._unit, self._gathers, self._prefetch = comms, unit, gathers, prefetch
        self._row = DeviceRow("gathers")

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
        lane, gather = self._comms.lane_of(comm), self._gathers[comm]
        with torch_stream(output_tensor.device):
            x, out = as_array(input_tensor), as_array(output_tensor)
            if lane is None or self._prefetch is None:
                with self._row.span("allgather", comm.tracer, output_tensor.device, module=self._unit.name):
                    gather(x, out)
                return None
            return Gathering(lane, lane.submit(gather, x, out), self._unit, self._prefetch)


class FeedsBack:
    """The average of a unit's gradients: a bound average, and perhaps its residual.

    Args:
        unit: The parameters.
        method: How to average.
        mean: The bound average.
        passes: The backward passes of the model.

    Raises:
        ArrayError: The average has a residual that cannot be saved.
    """

    ranks: int
    """The number of ranks."""

    def __init__(self, unit: Unit, method: Average, mean: object, passes: BackwardPasses) -> None:
        self._unit, self._method, self._passes = unit, method, passes
        self.feedback: Residual | None = getattr(mean, "state", None)
        """The residual, with its count of means; None without `ErrorFeedback`."""
        if method.has_residual and self.feedback is None:
            raise ArrayError(f"bagua_torch.fsdp: {method} has residuals that cannot be saved; use its inner one")

    def _check(self, gradients: torch.Tensor) -> None:
        """Raise `UnsupportedError` unless these gradients can be averaged."""
        self._method.check(dtype_name(gradients))
        if self.feedback is not None:
            check_numel(self._unit.name, gradients.numel(), self.numel)

    def _forget_if_it_raises(self) -> None:
        """Let the residual restart at zero if the running backward pass raises, since its gradients are lost."""
        if self.feedback is not None:
            self._passes.at_end(self._forget)

    def _forget(self) -> None:
        assert self.feedback is not None
        self.feedback.residual = None

    def _fit(self, x: Array) -> None:
        """Drop the residual, with a warning, if gradients like `x` have another number of elements."""
        if self.feedback is None or self.feedback.size in (None, x.size):
            return
        warnings.warn(
            f"bagua_torch.fsdp: parameters of {self._unit.name or 'the root'} were frozen or unfrozen; its "
            "residual restarts at zero",
            RuntimeWarning,
            stacklevel=3,
        )
        self._forget()

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

    @property
    def rows(self) -> list[tuple[int, int]] | None:
        """The rows, and the elements of a row, of parameters, of whose gradients the residual consists.

        They are in the padded shards of all `ranks`, one after the other. None if it consists of other elements.
        """
        return None

    @property
    def means(self) -> int | None:
        """Number of means since the last reset; None without resets."""
        return None if self.feedback is None else self.feedback.means

    def continue_from(self, residual: Array, means: int | None) -> None:
        """Continue from the state of an earlier average."""
        assert self.feedback is not None
        self.feedback.residual, self.feedback.means = residual, means

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
        comm: The ranks over which the unit is sharded.
        passes: The backward passes of the model.
        pending: The reductions that have not ended, if there are lanes.
        weights: The weight of this rank in the passes; a new one if None.
    """

    def __init__(
        self,
        comms: GroupComms,
        unit: Unit,
        method: Average,
        comm: Communicator,
        passes: BackwardPasses,
        pending: Reductions | None = None,
        weights: PassWeights | None = None,
    ) -> None:
        self._comms, self._comm, self._pending = comms, comm, pending
        self.ranks, self._row = comm.size, DeviceRow("reductions")
        self._weights = weights or PassWeights(passes)
        self._held = _HeldAddends(method, comm, unit, passes) if method.is_reproducible else None
        self._mean = self._held or method.bind_shards(comm)
        super().__init__(unit, method, self._mean, passes)

    @property
    def numel(self) -> int:
        """Number of elements of the residual: of the gradients of all trainable parameters, shards padded."""
        return self._unit.gradient_numel

    @property
    def rows(self) -> list[tuple[int, int]] | None:
        """See `FeedsBack.rows`."""
        return self._unit.gradient_rows if self._unit.is_sharded_by_rows else None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """See PyTorch's `ReduceScatter`. Complete, or in stream order, on return, unless nobody reads it yet.

        Collective.
        """
        asked = op_of(op)
        if asked not in ("sum", "avg", "premul_sum"):
            raise UnsupportedError(f"bagua_torch.fsdp: PyTorch asks for {asked}, expected SUM, AVG or PREMUL_SUM")
        comm = self._comms.of(group)
        self._check(input_tensor)
        self._begin()
        divisor = None
        if asked == "premul_sum":  # by 1 / factor, which PyTorch does not let us read from `op`
            divisor = self._unit.divide_factor or comm.size
        by: LinearOp = "avg" if asked == "avg" else "sum"
        weigh = self._weigh(comm)
        lane = self._comms.lane_of(comm)
        if lane is None or self._pending is None:
            self._forget_if_it_raises()
            device, module = input_tensor.device, self._unit.name
            with torch_stream(device), self._row.span("reduce_scatter", comm.tracer, device, module=module):
                self._reduce(input_tensor, output_tensor, by, divisor, weigh)
            return
        if self._unit.reads_at_once(output_tensor):
            lane.run(self._reduce, input_tensor, output_tensor, by, divisor, weigh)
        else:
            invalidate(output_tensor)
            self._pending.add(lane, lane.submit(self._reduce, input_tensor, output_tensor, by, divisor, weigh))
        self._forget_if_it_raises()

    def reset(self) -> None:
        """End what is under way, and drop the addends of a step that is lost."""
        if self._pending is not None:
            self._pending.wait()
        if self._held is not None:
            self._held.drop()

    def _begin(self) -> None:
        if self._pending is not None:
            self._pending.begin()
        if self._held is not None:
            self._held.begin()

    def _weigh(self, comm: Communicator) -> Weigh | None:
        """Return the weights for this reduction; None if its mean is plain."""
        if self._held is None:
            return self._weights.weigh(comm)
        held = self._held.sum.held
        return self._weights.weigh(comm, held, is_last=held + 1 == self._held.sum.share)

    def _reduce(
        self,
        gradients: torch.Tensor,
        result: torch.Tensor,
        op: LinearOp,
        divisor: float | None = None,
        weigh: Weigh | None = None,
    ) -> None:
        x = as_array(gradients)
        self._fit(x)
        weighting = None if weigh is None else weigh()
        if weighting is not None:
            multiply(x, weighting.factors[-1])  # PyTorch has copied the gradients for this call
            if self._held is not None:
                self._held.sum.weigh_held(weighting.factors[:-1])
            elif not weighting.largest:  # a residual waits for another pass
                result.zero_()
                return
        self._mean(x, as_array(result), op)
        if divisor is not None:
            result.div_(divisor)

    def alone(self, reduced: torch.Tensor) -> None:
        """Reduce on a single rank, in place; PyTorch has divided by a divisor of the user already."""
        keep_for_current_stream(reduced)
        self._check(reduced)
        self._begin()
        with torch_stream(reduced.device):
            op: LinearOp = "avg" if self._unit.divide_factor is None else "sum"
            self._reduce(reduced, reduced, op, weigh=self._weigh(self._comm))


class _HeldAddends:
    """A reproducible reduce-scatter of the gradients of a unit, bound to where its parameters begin.

    With `addends`, the passes of a step but the last leave zeros.
    """

    def __init__(self, method: Average, comm: Communicator, unit: Unit, passes: BackwardPasses) -> None:
        self._method, self._comm, self._unit, self._passes = method, comm, unit, passes
        self._bind()
        self._version = 0
        """That of the parameters when the first addend was held."""
        self._left: list[int | None] | None = None
        """The versions of the gradients at the end of the pass before, until the next one begins."""

    def _bind(self) -> None:
        self._tensors = self._unit.gradient_rows
        self.sum: Any = self._method.bind_shards(self._comm, self._tensors)
        """The reduce-scatter, which holds the addends."""

    def __call__(self, x: Array, out: Array, op: LinearOp) -> None:
        held, version, is_other = self.sum.held, self._unit.version, self._tensors != self._unit.gradient_rows
        if held and (is_other or version != self._version):
            raise ArrayError(
                f"bagua_torch.fsdp: parameters of {self._unit.name or 'the root'} were changed, frozen or "
                f"unfrozen after {held} of the {self.sum.share} backward passes of each rank that a step with "
                f"{self._method} has; run all of them before the optimizer"
            )
        if is_other:
            self._bind()
        check_numel(self._unit.name, x.size, self.sum.size, str(self._method))
        self._version = version
        self.sum(x, out, op)

    def begin(self) -> None:
        """Begin a reduction. Drop the addends of earlier passes if `zero_grad` has cleared their gradients.

        If the pass raises, the addends of that pass are dropped.
        """
        held, left, self._left = self.sum.held, self._left, None
        cleared = not self._unit.has_gradients or left not in (None, self._unit.gradient_versions)
        if held and cleared and self._unit.version == self._version:
            warnings.warn(
                f"bagua_torch.fsdp: the gradients of {held} of the {self.sum.share} backward passes "
                f"of a step with {self._method} were cleared, so these passes are dropped; call "
                "zero_grad() after the last pass",
                RuntimeWarning,
                stacklevel=4,
            )
            self.drop()
        self._passes.at_end(partial(self.drop, self.sum.held), self._end)

    def _end(self) -> None:
        self._left = self._unit.gradient_versions

    def drop(self, keep: int = 0) -> None:
        """Drop the addends of passes, but for the first `keep`."""
        self.sum.drop(keep)


class Replicate(FeedsBack):
    """Averages a unit's shards of gradients over its replicas, in place.

    Args:
        unit: The parameters.
        method: How to average.
        comm: The ranks that keep the same shards.
        passes: The backward passes of the model.
    """

    def __init__(self, unit: Unit, method: Average, comm: Communicator, passes: BackwardPasses) -> None:
        self.comm, self.ranks, self._mean = comm, comm.size, method.bind(comm)
        self._row = DeviceRow("replicas")
        super().__init__(unit, method, self._mean, passes)

    @property
    def numel(self) -> int:
        """Number of elements of the residual: of this rank's shard of gradients."""
        return self._unit.shard_numel

    def __call__(self, reduced: torch.Tensor) -> None:
        """Average these gradients, and those of passes that have postponed it. Collective.

        PyTorch adds what this leaves in `reduced` to the gradients.
        """
        earlier = self._unit.partial_gradients
        keep_for_current_stream(reduced, earlier)
        if earlier is not None:
            reduced.add_(earlier)
        self._check(reduced)
        self._forget_if_it_raises()
        device, module = reduced.device, self._unit.name
        with torch_stream(device), self._row.span("allreduce", self.comm.tracer, device, module=module):
            x = as_array(reduced)
            self._fit(x)
            self._mean(x)
        if self._unit.divide_factor is not None:  # it divides the sum over all ranks
            reduced.mul_(self.comm.size)


def keep_for_current_stream(*tensors: torch.Tensor | None) -> None:
    """Let memory of CUDA tensors be reused only after what PyTorch's current stream holds when they are freed.

    PyTorch calls a hook of gradients on another stream than that of their memory, and then drops those that it
    casts to another dtype, or has added: the next reduction would write into them.
    """
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


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
