"""Batch normalization with statistics over the batches of all ranks.

Forward, each rank sends the count n, the mean and the sum of squared deviations M2 of its batch in one allgather,
together with the number of the layer. All ranks merge them in rank order, so the results have the same bytes:

    n = sum n_i,   mean = sum n_i mean_i / n,   M2 = sum M2_i + sum n_i (mean_i - mean)^2

Backward, one allreduce adds [sum dy, sum dy xhat].

Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

import bagua_comm
from bagua_comm import ArrayError, CommError, CommMismatch, Communicator, UnsupportedError

from .arrays import as_array, as_tensor, torch_stream
from .entry import check_comm, communicator_of, errors_on_all
from .tensors.checks import check_same_layer

M = TypeVar("M", bound=nn.Module)

OF_DIMENSIONS: dict[int, type[_BatchNorm]] = {
    2: nn.BatchNorm1d,
    3: nn.BatchNorm1d,
    4: nn.BatchNorm2d,
    5: nn.BatchNorm3d,
}
"""PyTorch's class by the number of dimensions of the input."""

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""The classes that `convert` replaces."""

REFUSED = -1.0
"""The count sent by a rank with an unusable input, so that all ranks raise."""

HEAD = 3
"""Number of values that precede mean and M2: the count, the layer, and whether a backward pass follows."""


class SyncBatchNorm(_BatchNorm):
    """Batch normalization over the batches of all ranks; otherwise PyTorch's `BatchNorm1d`, `2d` and `3d`.

    Collective: construction, and while training every forward and backward pass. Batches may differ in size, and
    some may be empty. Evaluation is local, as in PyTorch: with the running statistics or, with
    `track_running_stats=False`, with those of this rank's batch.

    All ranks make the same forward and backward passes in the same order. If a rank skips a pass, the others
    raise `CommTimeout` after the communicator's `timeout_s`; give a rank without data an empty batch. In
    `DistributedDataParallel.join` a rank that has ended makes no more passes, so use it with
    `throw_on_early_termination=True`. Gradients of `weight` and `bias` are those of this rank's batch, for
    DistributedDataParallel to average.

    Statistics are computed in float32 (float64 for float64 inputs) and merged in float64. Parameters, buffers and
    the state dict are those of PyTorch's classes. All such modules of `comm` share a duplicate of it; to train
    two models in two threads, give each a `comm.dup()`. A deep copy uses the same ranks. A module from a pickle
    has none: set them with `convert`. `torch.compile` breaks the graph here. On a CUDA device the host waits once
    a pass, for the count.

    Args:
        num_features: Channels, C, of inputs of shape (N, C) or (N, C, ...).
        eps: Added to the variance.
        momentum: Share of the new batch in running statistics; None for the mean of all batches.
        affine: Whether to learn `weight` and `bias`.
        track_running_stats: Whether to keep running statistics.
        device: The device of parameters and buffers.
        dtype: The dtype of parameters and buffers.
        comm: The ranks, for instance `comm.split` of some; if None, `bagua_comm.default()`.

    Raises:
        ArrayError: In a forward pass, a rank's input does not fit, or all ranks' batches together have one value
            per channel; on all ranks. It is a ValueError.
        CommError: The module comes from a pickle.
        CommMismatch: In a forward pass, ranks call different layers, or only some need gradients; on all ranks.

    >>> layer = SyncBatchNorm(3)
    >>> layer(torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])).sum(0)
    tensor([0., 0., 0.], grad_fn=<SumBackward1>)
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        comm = comm if comm is not None else bagua_comm.default()
        check_comm("SyncBatchNorm", comm)
        self._ranks = _Ranks(_duplicate_of(comm))
        self._plain: type[_BatchNorm] | None = None

    @property
    def plain(self) -> type[_BatchNorm] | None:
        """The class for `revert`: the original one, or the one for its inputs; None before the first input."""
        return self._plain

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`, of shape (N, C) or (N, C, ...). Collective while training."""
        return self._together(x) if self.training else super().forward(x)

    def _check_input_dim(self, x: Tensor) -> None:
        fault = self._fault(x)
        if fault:
            raise ArrayError(fault)
        if self._plain is None:
            self._plain = OF_DIMENSIONS[x.dim()]

    def _fault(self, x: Tensor) -> str:
        """The reason why an input does not fit; empty if it does."""
        wanted = [dim for dim, plain in OF_DIMENSIONS.items() if self._plain in (None, nn.SyncBatchNorm, plain)]
        if x.dim() not in wanted or x.shape[1] != self.num_features:
            return (
                f"SyncBatchNorm: the input has shape {tuple(x.shape)}, expected "
                f"{' or '.join(map(str, wanted))} dimensions, the second of {self.num_features}"
            )
        if not x.dtype.is_floating_point:
            return f"SyncBatchNorm: the input is of {x.dtype}, expected floating-point numbers"
        return ""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _together(self, x: Tensor) -> Tensor:
        comm, fault = self._ranks.comm(), self._fault(x)
        if comm.size == 1 and x.numel() and not fault:
            return super().forward(x)
        tensors = (x, self.weight, self.bias)
        backward = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        total, mean, m2 = merged(comm, x, self.num_features, self._ranks.layer, backward, fault)
        self._check_input_dim(x)
        if total == 1:
            raise ArrayError(
                "SyncBatchNorm: all ranks' batches together have one value per channel, expected more to train"
            )
        biased = m2 / max(total, 1)
        self._track(total, mean, m2)
        mean, inverse = mean.to(_wide(x)), (biased + self.eps).rsqrt().to(_wide(x))
        normalized: Any = _Normalize.apply  # untyped
        return cast("Tensor", normalized(x, self.weight, self.bias, mean, inverse, total, comm))

    @torch.no_grad()
    def _track(self, total: int, mean: Tensor, m2: Tensor) -> None:
        """Update the running statistics, as PyTorch does."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1 / float(self.num_batches_tracked)
        if total and momentum is not None:
            for running, new in ((self.running_mean, mean), (self.running_var, m2 / (total - 1))):
                running.copy_(running.to(new.dtype) * (1 - momentum) + new * momentum)

    def extra_repr(self) -> str:
        """The settings, and the number of ranks."""
        ranks = self._ranks.size
        settings = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{settings}, ranks={ranks or 'none'}"


def convert(
    module: nn.Module, comm: Communicator | None = None, *, keep: Collection[nn.Module] = ()
) -> nn.Module:
    """Replace each BatchNorm in `module`, and each `torch.nn.SyncBatchNorm`, by one over all ranks.

    Collective. Parameters and buffers stay the same tensors, so optimizers stay valid; settings, hooks and the
    mode stay as well. A `bagua_torch.SyncBatchNorm` gets these ranks. Convert before wrapping.

    Args:
        module: Changed in place, unless it is a BatchNorm itself.
        comm: The ranks; if None, `bagua_comm.default()`.
        keep: Parts to leave as they are.

    Returns:
        The module, or its replacement.

    Raises:
        UnsupportedError: A BatchNorm is lazy, or of a subclass, whose forward pass would be lost. Nothing is
            replaced then.

    >>> convert(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)))[1]
    SyncBatchNorm(2, eps=1e-05, momentum=0.1, affine=True, ..., ranks=1)
    """
    comm = communicator_of("convert", comm, bagua_comm.default)
    with errors_on_all(comm):
        _check_convertible(module, keep)
    own = _duplicate_of(comm)

    def over_ranks(part: nn.Module) -> nn.Module | None:
        if not isinstance(part, (*PLAIN, SyncBatchNorm)) or part in keep:
            return None
        new: SyncBatchNorm = part if isinstance(part, SyncBatchNorm) else _become(SyncBatchNorm, part)
        if new is not part:
            new._plain = type(part)
        new._ranks = _Ranks(own)
        return new

    return _replaced(module, over_ranks)


def _check_convertible(module: nn.Module, keep: Collection[nn.Module]) -> None:
    if not isinstance(module, nn.Module):
        raise ArrayError(f"convert: module is a {type(module).__name__}, expected a torch.nn.Module")
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and type(part) not in (*PLAIN, SyncBatchNorm) and part not in keep:
            why = (
                "is lazy; run the module once before"
                if isinstance(part, LazyModuleMixin)
                else "is of a subclass, whose forward pass would be lost; make it a plain BatchNorm"
            )
            raise UnsupportedError(f"convert: {name or 'the module'!r}, a {type(part).__name__}, {why}")


def layer_over_ranks(module: nn.Module) -> str | None:
    """The name of a SyncBatchNorm, ours or PyTorch's, in training mode, which communicates; None without one."""
    both = (SyncBatchNorm, nn.SyncBatchNorm)
    layers = ((name, part) for name, part in module.named_modules() if isinstance(part, both))
    return next((name for name, layer in layers if layer.training), None)


def revert(module: nn.Module, *, keep: Collection[nn.Module] = ()) -> nn.Module:
    """Replace each `SyncBatchNorm` in `module` by its original class, with the same tensors.

    One that was constructed directly becomes the class for its inputs.

    Args:
        module: Changed in place, unless it is a SyncBatchNorm itself.
        keep: Parts to leave as they are.

    Returns:
        The module, or its replacement.

    Raises:
        UnsupportedError: One was constructed directly and has had no input. Nothing is replaced then.

    >>> revert(convert(nn.BatchNorm1d(2)))
    BatchNorm1d(2, eps=1e-05, momentum=0.1, affine=True, ...)
    """
    for name, part in module.named_modules():
        if isinstance(part, SyncBatchNorm) and part.plain is None and part not in keep:
            raise UnsupportedError(
                f"revert: {name or 'the module'!r} has seen no input, so BatchNorm1d, 2d or 3d is not known; "
                "run the module once before"
            )

    def alone(part: nn.Module) -> nn.Module | None:
        if not isinstance(part, SyncBatchNorm) or part.plain is None or part in keep:
            return None
        new: nn.Module = _become(part.plain, part)
        del new._ranks, new._plain
        return new

    return _replaced(module, alone)


def merged(
    comm: Communicator, x: Tensor, channels: int, layer: int, backward: bool, fault: str = ""
) -> tuple[int, Tensor, Tensor]:
    """The count of values per channel, the mean and M2 of all ranks' inputs: (), (C,) and (C,), in float64.

    Collective.

    Args:
        comm: The ranks.
        x: The input of this rank.
        channels: C.
        layer: The number of the layer among those of the communicator.
        backward: Whether this rank's result needs a gradient.
        fault: The reason why the input is unusable; empty if it fits.

    Raises:
        ArrayError: A rank gave a fault; on all ranks.
        CommMismatch: Ranks gave different `layer` or `backward`; on all ranks.
    """
    mine = torch.zeros(HEAD + 2 * channels, dtype=torch.float64, device=x.device)
    mine[1], mine[2] = layer, backward
    if fault:
        mine[0] = REFUSED
    elif x.numel():
        count, dims = x.numel() // channels, _all_but_channels(x)
        variance, mean = torch.var_mean(x.detach().to(_wide(x)), dims, correction=0)
        mine[0] = count
        mine[HEAD : HEAD + channels], mine[HEAD + channels :] = mean, variance.double() * count
    with torch_stream(x.device):
        rows = as_tensor(comm.allgather(as_array(mine)))  # (p, HEAD + 2C)
    counts, layers, backwards = rows[:, :HEAD].T.tolist()
    if fault:
        raise ArrayError(fault)
    if min(counts) < 0:
        raise ArrayError(f"SyncBatchNorm: rank {counts.index(REFUSED)} has an input that does not fit its layer")
    check_same_layer("SyncBatchNorm", layers)
    for rank in range(comm.size):
        if backwards[rank] != backwards[0]:
            one, other = (0, rank) if backwards[0] else (rank, 0)
            raise CommMismatch(
                f"SyncBatchNorm: rank {one} needs a gradient, but rank {other} does not; expected the same on "
                "all ranks, as all communicate in the backward pass"
            )
    total = int(sum(counts))
    n, means, m2s = rows[:, :1], rows[:, HEAD : HEAD + channels], rows[:, HEAD + channels :]
    mean = (n * means).sum(0) / max(total, 1)
    return total, mean, m2s.sum(0) + (n * (means - mean).square()).sum(0)


class _Normalize(torch.autograd.Function):
    """y = (x - mean) / std * weight + bias, with gradients through the mean and std of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        inverse: Tensor,
        total: int,
        comm: Communicator,
    ) -> Tensor:
        """Normalize by the statistics of all ranks."""
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.total, ctx.comm = total, comm
        ctx.bias_dtype = bias.dtype if bias is not None else None
        y = (x.to(mean.dtype) - _along(mean, x)) * _along(inverse, x)
        if weight is not None:
            y = y * _along(weight.to(y.dtype), x)
        if bias is not None:
            y = y + _along(bias.to(y.dtype), x)
        return y.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the input, and of weight and bias from this rank's batch. Collective."""
        x, weight, mean, inverse = ctx.saved_tensors
        dims, channels = _all_but_channels(x), mean.numel()
        dy = dy.to(mean.dtype)
        xhat = (x.to(mean.dtype) - _along(mean, x)) * _along(inverse, x)
        sums = torch.cat([dy.sum(dims), (dy * xhat).sum(dims)])  # of this rank
        with torch_stream(x.device):
            everyone = as_tensor(ctx.comm.allreduce(as_array(sums.double())))
        dx = None
        if ctx.needs_input_grad[0]:
            means = (everyone / max(ctx.total, 1)).to(mean.dtype)
            scale = inverse if weight is None else inverse * weight.to(mean.dtype)
            dx = dy - _along(means[:channels], x) - xhat * _along(means[channels:], x)
            dx = (dx * _along(scale, x)).to(x.dtype)
        dbias, dweight = sums[:channels], sums[channels:]
        return (
            dx,
            dweight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            dbias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
            *[None] * 4,
        )


class _Ranks:
    """The communicator of a module, shared by its copies and omitted from pickles.

    Args:
        comm: The communicator; None after a pickle.
    """

    def __init__(self, comm: Communicator | None = None) -> None:
        self._comm = comm
        self.layer = 0 if comm is None else comm.next_id("SyncBatchNorm")
        """The number of the module among those of this communicator, the same on all ranks."""

    @property
    def size(self) -> int:
        """Number of ranks; 0 after a pickle."""
        return self._comm.size if self._comm is not None else 0

    def comm(self) -> Communicator:
        """The communicator.

        Raises:
            CommError: The module comes from a pickle.
        """
        if self._comm is None:
            raise CommError(
                "SyncBatchNorm: it comes from a pickle, which holds no communicator; give it one with "
                "bagua_torch.sync_batchnorm.convert(module, comm)"
            )
        return self._comm

    def __deepcopy__(self, memo: object) -> _Ranks:
        return self

    def __reduce__(self) -> tuple[type[_Ranks], tuple[()]]:
        return _Ranks, ()


_duplicates: weakref.WeakKeyDictionary[Communicator, Communicator] = weakref.WeakKeyDictionary()
_duplicating = threading.Lock()


def _duplicate_of(comm: Communicator) -> Communicator:
    """The duplicate of `comm` for all its modules, so that their calls are separate from other threads'.

    Collective.
    """
    with _duplicating:
        own = _duplicates.get(comm)
    if own is None:
        own = comm.dup()
        with _duplicating:
            _duplicates[comm] = own
    return own


def _become(kind: type[M], module: nn.Module) -> M:
    """A module of class `kind` with the same parameters, buffers, settings, hooks and mode."""
    new = kind.__new__(kind)
    new.__dict__.update(module.__dict__)
    return new


def _replaced(module: nn.Module, replace: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """`module` with each part replaced for which `replace` returns a module; shared parts stay shared."""
    made: dict[nn.Module, nn.Module] = {}
    for part in list(module.modules()):
        new = replace(part)
        if new is not None:
            made[part] = new
    for part in list(module.modules()):
        for name, child in part._modules.items():
            if child is not None and child in made:
                part._modules[name] = made[child]
    return made.get(module, module)


def _wide(x: Tensor) -> torch.dtype:
    """The dtype in which an input is normalized."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _along(values: Tensor, x: Tensor) -> Tensor:
    """Values by channel, (C,), reshaped to broadcast over `x`, (N, C, ...)."""
    return values.reshape(1, -1, *[1] * (x.dim() - 2))
