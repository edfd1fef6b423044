"""The gradients of one bucket: how they come into its memory, and what is in `p.grad`.

`GradientsInBucket` lets autograd accumulate straight into the bucket: `p.grad` is a tensor over the parameter's
part of it. `GradientsOfTheirOwn` copies into the bucket and back, as `gradient_as_bucket_view=False` asks for.
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
    """Gradients that lie in their bucket.

    What these methods do in every step, they do for all parameters at once where they can: models have many.

    Args:
        names: The parameters of the bucket.
        parameters: The parameters themselves.
        flat: The memory of the bucket.
        layouts: How each of them lies in it.
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
        """Our own views of the bucket."""
        self._parameters, self._flat, self._layouts = list(parameters), flat, list(layouts)
        self._given = flat.parts(layouts)  # the tensors in `p.grad`, now or in the next step
        self._addresses = list(map(_address, self.views))
        self._unshared = list(map(getrefcount, self._given))
        self._unshared_one = getrefcount(self._given[0])
        # Whole modules can change the memory format of these alone. To ask all parameters would take too long.
        images = (i for i, layout in enumerate(layouts) if len(layout.size) >= 4)
        self._formats = [(i, self._parameters[i], self._parameters[i].stride()) for i in images]

    def attach(self) -> frozenset[str] | set[str]:
        """Let autograd accumulate into the bucket: make `p.grad` a part of it, with its values, or zeros.

        Returns:
            The names of those that had no gradient.
        """
        present = list(map(_gradient, self._parameters))
        if all(map(is_, present, repeat(None))):
            self.give(zeros=True)
            return self.all_names
        without = {self.names[index] for index, gradient in enumerate(present) if gradient is None}
        del present  # a gradient that is referred to counts as kept
        self.collect()
        return without

    def attach_one(self, index: int) -> None:
        """Do the same for one parameter."""
        gradient = self._parameters[index].grad
        if gradient is not None and self._lies_here(index, gradient):
            return
        values = None if gradient is None else gradient.detach()
        del gradient
        self._parameters[index].grad = None  # which refers to it as well
        self._renew(index, kept=getrefcount(self._given[index]) > self._unshared_one)
        view = self.views[index]
        if values is None:
            view.zero_()
        else:
            view.copy_(_dense(values))
        self._set(index)

    def collect(self) -> None:
        """Have all gradients in the bucket, with zeros for those that are missing: it is about to be sent.

        Whatever was done to `p.grad` counts: another tensor (`create_graph=True` makes one), or other memory for
        the same one, by `p.grad.data = x`.
        """
        try:
            if list(map(_address, map(_gradient, self._parameters))) == self._addresses:
                return
        except (TypeError, RuntimeError):  # some have none, or one without memory, as sparse ones
            pass
        for index in range(len(self._given)):
            self.attach_one(index)

    def give(self, *, zeros: bool) -> None:
        """Make `p.grad` a part of the bucket, whatever it was.

        Args:
            zeros: Whether the bucket is to be zero; else it stays as it is.
        """
        counts = list(map(getrefcount, self._given))
        if counts != self._unshared or list(map(_address, self._given)) != self._addresses:
            for index, (count, alone) in enumerate(zip(counts, self._unshared, strict=True)):
                self._renew(index, kept=count > alone)
        if zeros:
            self._flat.tensor.zero_()  # at once, which takes less time than one after another
        try:
            for parameter, gradient in zip(self._parameters, self._given, strict=True):
                parameter.grad = gradient
        except (RuntimeError, TypeError):
            for index in range(len(self._given)):
                self._set(index)  # says which

    def spread(self) -> None:
        """The bucket holds the averages now, and so does `p.grad`."""

    def set_aside(self) -> None:
        """Leave the bucket to others: what is in `p.grad` keeps its values, in memory of its own."""
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is not None and self._lies_here(index, gradient):
                gradient.data = gradient.detach().clone()

    def move_to(self, index: int, other: GradientsInBucket, place: int) -> None:
        """If the gradient of a parameter lies here, let it lie in `other`, which has its values already."""
        gradient = self._parameters[index].grad
        if gradient is not None and self._lies_here(index, gradient):
            other._set(place)

    def check_layouts(self) -> None:
        """Raise `ArrayError` if a parameter has got another memory format than its gradient."""
        for index, parameter, stride in self._formats:
            if parameter.stride() != stride:
                self._refuse(index, f"has steps {parameter.stride()}")

    def _lies_here(self, index: int, gradient: Tensor) -> bool:
        view = self.views[index]
        return (
            gradient.layout is torch.strided
            and gradient.data_ptr() == self._addresses[index]
            and gradient.stride() == view.stride()
            and gradient.dtype == view.dtype
            and not gradient.requires_grad
        )

    def _renew(self, index: int, *, kept: bool) -> None:
        """Make a new tensor for `p.grad` if the last one was given other memory, or is kept by somebody.

        What is kept must not change in the next step. It moves to memory of its own.
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
            self._refuse(index, f"is {self._parameters[index].dtype} on {self._parameters[index].device}")

    def _refuse(self, index: int, what: str) -> None:
        view = self.views[index]
        raise ArrayError(
            f"DistributedDataParallel: {self.names[index]!r} {what}, unlike when the module was wrapped; "
            f"expected {view.dtype} on {view.device} with steps {tuple(view.stride())}: convert it back before a "
            "training pass, or close this wrapper and wrap the module again"
        ) from None


class GradientsOfTheirOwn(GradientsInBucket):
    """Gradients that are copied into their bucket and back, so that what is kept of them never changes."""

    def attach(self) -> frozenset[str] | set[str]:
        """Leave `p.grad` to autograd; see `GradientsInBucket.attach`."""
        return {
            name for name, parameter in zip(self.names, self._parameters, strict=True) if parameter.grad is None
        }

    def attach_one(self, index: int) -> None:
        """Leave `p.grad` to autograd."""

    @torch.no_grad()
    def collect(self) -> None:
        """Copy all gradients into the bucket, and zeros for those that are missing."""
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

    def move_to(self, index: int, other: GradientsInBucket, place: int) -> None:
        """Nothing lies here."""


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
