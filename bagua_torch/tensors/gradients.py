"""The gradients of one bucket, and their relation to `p.grad`.

With `GradientsInBucket`, autograd accumulates in the bucket: `p.grad` is a tensor over a part of it.
`SeparateGradients`, for `gradient_as_bucket_view=False`, copies gradients into the bucket and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_
from sys import getrefcount

import torch
from torch import Tensor, nn

from bagua_comm import ArrayError

from .flats import Flat, Layout

_address, _gradient = Tensor.data_ptr, attrgetter("grad")


class GradientsInBucket:
    """Gradients that are parts of their bucket.

    Methods that run in every step work on all parameters at once where possible, as models have many.

    Args:
        names: The parameters of the bucket.
        parameters: The same parameters.
        flat: The memory of the bucket.
        layouts: The layout of each parameter in the bucket.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        flat: Flat,
        layouts: Sequence[Layout],
    ) -> None:
        self.names, self.all_names = list(names), frozenset(names)
        self.views = flat.views(layouts)
        """Internal views of the bucket."""
        self._parameters, self._flat, self._layouts = list(parameters), flat, list(layouts)
        self._given = flat.parts(layouts)  # the tensors in `p.grad`, now or in the next step
        self._addresses = list(map(_address, self.views))
        self._unshared = list(map(getrefcount, self._given))
        self._unshared_one = getrefcount(self._given[0])
        # `module.to(memory_format=...)` changes only these. Checking all parameters would take too long.
        images = (i for i, layout in enumerate(layouts) if len(layout.size) >= 4)
        self._formats = [(i, self._parameters[i], self._parameters[i].stride()) for i in images]

    def attach(self) -> frozenset[str] | set[str]:
        """Make `p.grad` a part of the bucket, with the same values or zeros, so that autograd accumulates there.

        Returns:
            The names of the parameters that had no gradient.
        """
        present = list(map(_gradient, self._parameters))
        if all(map(is_, present, repeat(None))):
            self.give(zeros=True)
            return self.all_names
        without = {self.names[index] for index, gradient in enumerate(present) if gradient is None}
        del present  # a reference marks a gradient as kept
        self.collect()
        return without

    def attach_one(self, index: int) -> None:
        """As `attach`, for one parameter."""
        gradient = self._parameters[index].grad
        if gradient is not None and self._is_here(index, gradient):
            return
        values = None if gradient is None else gradient.detach()
        del gradient
        self._parameters[index].grad = None  # another reference
        self._renew(index, kept=getrefcount(self._given[index]) > self._unshared_one)
        view = self.views[index]
        if values is None:
            view.zero_()
        else:
            view.copy_(_dense(values))
        self._set(index)

    def collect(self) -> None:
        """Collect all gradients in the bucket, with zeros for missing ones, before it is sent.

        This includes changes to `p.grad`: another tensor, as with `create_graph=True`, or other memory for the
        same tensor, by `p.grad.data = x`.
        """
        try:
            if list(map(_address, map(_gradient, self._parameters))) == self._addresses:
                return
        except (TypeError, RuntimeError):  # a missing gradient, or a sparse one, without an address
            pass
        for index in range(len(self._given)):
            self.attach_one(index)

    def give(self, *, zeros: bool) -> None:
        """Make `p.grad` a part of the bucket, and ignore its values.

        Args:
            zeros: Whether to set the bucket to zero.
        """
        counts = list(map(getrefcount, self._given))
        if counts != self._unshared or list(map(_address, self._given)) != self._addresses:
            for index, (count, unshared) in enumerate(zip(counts, self._unshared, strict=True)):
                self._renew(index, kept=count > unshared)
        if zeros:
            self._flat.tensor.zero_()  # faster than one by one
        try:
            for parameter, gradient in zip(self._parameters, self._given, strict=True):
                parameter.grad = gradient
        except (RuntimeError, TypeError):
            for index in range(len(self._given)):
                self._set(index)  # names it in the error

    def spread(self) -> None:
        """Do nothing: averages in the bucket are in `p.grad`."""

    def set_aside(self) -> None:
        """Move `p.grad` to separate memory, so that the bucket may be used for other values."""
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is not None and self._is_here(index, gradient):
                gradient.data = gradient.detach().clone()

    def move_to(self, index: int, other: GradientsInBucket, target: int) -> None:
        """If the gradient of a parameter is in this bucket, attach it to `other`, which has its values."""
        gradient = self._parameters[index].grad
        if gradient is not None and self._is_here(index, gradient):
            other._set(target)

    def check_layouts(self) -> None:
        """Raise `ArrayError` if the memory format of a parameter differs from that of its gradient."""
        for index, parameter, stride in self._formats:
            if parameter.stride() != stride:
                self._refuse(index, f"has strides {parameter.stride()}")

    def _is_here(self, index: int, gradient: Tensor) -> bool:
        view = self.views[index]
        return (
            gradient.layout is torch.strided
            and gradient.data_ptr() == self._addresses[index]
            and gradient.stride() == view.stride()
            and gradient.dtype == view.dtype
            and not gradient.requires_grad
        )

    def _renew(self, index: int, *, kept: bool) -> None:
        """Make a new tensor for `p.grad` if the last one was given other memory, or user code has kept it.

        A kept gradient must not change in the next step, so it moves to separate memory.
        """
        here = self._given[index].data_ptr() == self._addresses[index]
        if kept and here:
            self._given[index].data = self._given[index].clone()
        if kept or not here:
            start = sum(layout.size.numel() for layout in self._layouts[:index])
            self._given[index] = self._flat.part(start, self._layouts[index])

    def _set(self, index: int) -> None:
        try:
            self._parameters[index].grad = self._given[index]
        except (RuntimeError, TypeError):
            parameter = self._parameters[index]
            self._refuse(index, f"is {parameter.dtype} of shape {tuple(parameter.shape)} on {parameter.device}")

    def _refuse(self, index: int, what: str) -> None:
        view = self.views[index]
        raise ArrayError(
            f"DistributedDataParallel: {self.names[index]!r} {what}, unlike when the module was wrapped; "
            f"expected {view.dtype} of shape {tuple(view.shape)} on {view.device} with strides "
            f"{tuple(view.stride())}: convert it back before a training pass, or close this wrapper and wrap the "
            "module again"
        ) from None


class SeparateGradients(GradientsInBucket):
    """Gradients that are copied into their bucket and back, so that kept ones never change."""

    def attach(self) -> frozenset[str] | set[str]:
        """Leave `p.grad` to autograd; see `GradientsInBucket.attach`."""
        return {
            name for name, parameter in zip(self.names, self._parameters, strict=True) if parameter.grad is None
        }

    def attach_one(self, index: int) -> None:
        """Leave `p.grad` to autograd."""

    @torch.no_grad()
    def collect(self) -> None:
        """Copy all gradients into the bucket, and zeros for missing ones."""
        present = [parameter.grad for parameter in self._parameters]
        pairs = [(v, _dense(g)) for v, g in zip(self.views, present, strict=True) if g is not None]
        if len(pairs) < len(present):
            self._flat.tensor.zero_()
        if pairs:
            torch._foreach_copy_([v for v, _ in pairs], [g for _, g in pairs])

    @torch.no_grad()
    def spread(self) -> None:
        """Copy the averages from the bucket to `p.grad`."""
        to, values = [], []
        for parameter, view in zip(self._parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is None or gradient.requires_grad or gradient.layout is not torch.strided:
                parameter.grad = view.clone()
            else:
                to.append(gradient)
                values.append(view)
        if to:
            torch._foreach_copy_(to, values)

    def move_to(self, index: int, other: GradientsInBucket, target: int) -> None:
        """Do nothing: gradients are not in the bucket."""


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
