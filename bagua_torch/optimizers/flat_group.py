"""Parameters that are contiguous in memory and are stepped together, as one flat tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..tensors.flats import Flat, Layout, joined_view, shares_storage
from .layout import address_of


class FlatGroup:
    """Parameters that are contiguous in memory and make the same steps.

    Args:
        parameters: The parameters, in the order of their addresses.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        joined = joined_view(parameters, parameters)
        assert joined is not None
        self.flat = nn.Parameter(joined, requires_grad=parameters[0].requires_grad)
        """All parameters as one tensor, which the inner optimizer steps."""
        self.gradient: Tensor | None = None
        """All gradients as one tensor."""
        self.gradient_addresses: list[int] = []
        """Their addresses in `gradient`. There is no reference to them, since it would mark them as kept."""
        self.gradient_ids: list[int] = []
        """The `id` of each gradient at these addresses."""
        self.copies: Flat | None = None
        """Memory for copies of gradients that are not contiguous."""
        self._copies: list[Tensor] = []
        """The part of each gradient in `copies`."""
        self._copy_addresses: list[int] = []
        self.copied = 0
        """Number of the last steps, one after the other, that copied gradients."""
        self.addresses_at_layout = [address_of(p.grad) for p in self.parameters]
        """The addresses of the gradients when the parameters were put in this order."""
        self.last_addresses: list[int | None] = self.addresses_at_layout
        """The addresses of the gradients in the last step."""
        self.state: dict[str, Sequence[object]] = {}
        """The state values of all parameters, by name, as this group has set them."""
        self.source: dict[str, object] = {}
        """The inner optimizer's values that `state` was split from."""

    def hold(self, gradients: Sequence[Tensor], reorder: Callable[[], None]) -> None:
        """Set `flat.grad` to the gradients. Copies those that are not contiguous.

        Args:
            gradients: The gradients of all parameters.
            reorder: Called if another order of parameters may avoid the copies.
        """
        addresses, ids = list(map(Tensor.data_ptr, gradients)), list(map(id, gradients))
        if addresses == self.gradient_addresses and ids == self.gradient_ids:
            self.flat.grad, self.copied = self.gradient, 0
            return
        joined = joined_view(gradients, self.parameters)
        if joined is not None:
            self.gradient, self.gradient_addresses, self.copied = joined, addresses, 0
        else:
            if self.copies is None:
                self.copies = Flat(torch.empty_like(self.flat))
                self._copies = self.copies.views(self._layouts)
                self._copy_addresses = list(map(Tensor.data_ptr, self._copies))
            torch._foreach_copy_(self._copies, list(gradients))  # nothing happens to one that is there already
            self.gradient, self.gradient_addresses = self.copies.tensor, self._copy_addresses
            self.copied += 1
            moved = addresses == self.last_addresses != self.addresses_at_layout
            if moved and any(map(shares_storage, gradients)):
                reorder()
        self.gradient_ids = ids
        self.last_addresses = list(addresses)
        self.flat.grad = self.gradient

    @property
    def _layouts(self) -> list[Layout]:
        return [Layout(p.shape, p.stride()) for p in self.parameters]

    def zero(self) -> bool:
        """Set all gradients to zero at once. Return False if they are not in `gradient`."""
        present = [p.grad for p in self.parameters]
        if self.gradient is None or any(g is None or g.requires_grad for g in present):
            return False
        if [g.data_ptr() for g in present if g is not None] != self.gradient_addresses:
            copied = self.copies is not None and self.gradient is self.copies.tensor
            if self.copies is None or not copied or any(shares_storage(g) for g in present if g is not None):
                return False
            del present
            for parameter, part in zip(self.parameters, self.copies.parts(self._layouts), strict=True):
                parameter.grad = part
        self.gradient.zero_()
        return True
