"""Flat memory, and tensors over parts of it that have separate storages.

User code may do anything with a tensor: `detach_()` it, share or save its storage, assign other memory by
`x.data = y`. With a view of a bucket, this would affect the whole bucket. So parameters and gradients are tensors
over a part of the memory with a storage of that part alone. Their location is determined by address.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import dlpack


class Layout(NamedTuple):
    """The shape and the strides, in elements, of a tensor."""

    size: torch.Size
    stride: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions, from the largest stride to the smallest, without those of one element."""
        longer = (d for d, extent in enumerate(self.size) if extent != 1)
        return tuple(sorted(longer, key=lambda d: -self.stride[d]))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements of a dense layout are in the order of their indices."""
        return not self.size.numel() or list(self.order) == sorted(self.order)

    @property
    def memory(self) -> str:
        """The order of the elements in memory, as text; "" for that of their indices."""
        return "" if self.is_contiguous else f"in memory with dimensions in the order {self.order}"


def layout_of(tensor: Tensor) -> Layout:
    """The layout of `tensor` in a bucket: its layout if that is dense, otherwise the contiguous one."""
    mine = Layout(tensor.shape, tensor.stride())
    if is_dense(mine):
        return mine
    stride = [1]
    for extent in reversed(mine.size[1:]):
        stride.insert(0, stride[0] * extent)
    return Layout(mine.size, tuple(stride))


def is_dense(layout: Layout) -> bool:
    """Whether the elements fill their memory without gaps or repeats, in any order of dimensions."""
    size = 1
    for stride, extent in sorted((s, n) for s, n in zip(layout.stride, layout.size, strict=True) if n != 1):
        if stride != size:
            return layout.size.numel() == 0
        size *= extent
    return True


def _exchanged(tensor: Tensor) -> Tensor:
    """The same memory in a separate storage, by DLPack."""
    untyped: Any = dlpack
    exchanged: Tensor = untyped.from_dlpack(untyped.to_dlpack(tensor))
    return exchanged


class Flat:
    """One-dimensional memory of consecutive tensors.

    `flat_of` finds every existing `Flat`. Its memory lives as long as any tensor over it.

    Args:
        tensor: The contiguous memory, with no other use.
        bucket: Whether it is a bucket of a `BucketMemory`.
    """

    def __init__(self, tensor: Tensor, *, bucket: bool = False) -> None:
        self.tensor, self.bucket = tensor.detach(), bucket
        self.begin = tensor.data_ptr()
        """The address of its first element."""
        self.nbytes = tensor.numel() * tensor.element_size()
        if self.nbytes:
            _FLATS[self.begin] = self

    def part(self, start: int, layout: Layout) -> Tensor:
        """A tensor over the elements from `start` on, with a separate storage. Shares memory."""
        piece = _exchanged(self.tensor[start : start + layout.size.numel()])
        part = torch.empty(0, dtype=piece.dtype, device=piece.device)  # DLPack drops strides of extents of 1
        return part.set_(piece.untyped_storage(), 0, layout.size, layout.stride)

    def parts(self, layouts: Sequence[Layout]) -> list[Tensor]:
        """Consecutive tensors of these layouts, with separate storages."""
        return [self.part(start, layout) for start, layout in zip(_starts(layouts), layouts, strict=True)]

    def views(self, layouts: Sequence[Layout]) -> list[Tensor]:
        """Consecutive plain views of these layouts, for internal use."""
        return views(self.tensor, layouts)


_FLATS: weakref.WeakValueDictionary[int, Flat] = weakref.WeakValueDictionary()
"""All existing ones, by address."""


def flat_of(tensor: Tensor) -> Flat | None:
    """The flat memory that contains `tensor`, or None."""
    address = tensor.data_ptr()
    for reference in _FLATS.valuerefs():
        flat = reference()
        if flat is not None and flat.begin <= address < flat.begin + flat.nbytes:
            return flat
    return None


def views(flat: Tensor, layouts: Sequence[Layout]) -> list[Tensor]:
    """Consecutive views of a flat tensor, in these layouts."""
    first = flat.storage_offset()
    return [
        flat.as_strided(layout.size, layout.stride, first + start)
        for start, layout in zip(_starts(layouts), layouts, strict=True)
    ]


def _starts(layouts: Sequence[Layout]) -> list[int]:
    starts = [0]
    for layout in layouts:
        starts.append(starts[-1] + layout.size.numel())
    return starts[:-1]


def lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Give elementwise states of an optimizer the strides of their parameters.

    Copies and checkpoints are in the order of indices, but kernels of `fused=True` read in the order of memory.
    """
    for parameter, entry in optimizer.state.items():
        for key, value in entry.items() if isinstance(entry, dict) else ():
            if not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue
            layout = Layout(parameter.shape, parameter.stride())
            if value.stride() != layout.stride and value.layout is torch.strided and is_dense(layout):
                empty = torch.empty_strided(*layout, dtype=value.dtype, device=value.device)
                entry[key] = empty.copy_(value)


# Locations of tensors ---------------------------------------------------------------------------------------


def joined_view(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor | None:
    """One flat view of tensors that are consecutive in one storage, or in one `Flat`; otherwise None.

    Args:
        tensors: The tensors.
        like: Tensors with the required layouts.
    """
    first, step = tensors[0].detach(), tensors[0].element_size()
    if len(tensors) == 1 and first.shape == like[0].shape and not first.numel():
        return first.reshape(-1)
    storage, address, count, together = first.untyped_storage().data_ptr(), first.data_ptr(), 0, True
    for tensor, other in zip(tensors, like, strict=True):
        if tensor.data_ptr() != address or tensor.stride() != other.stride() or tensor.shape != other.shape:
            return None
        if tensor.dtype != first.dtype:
            return None
        together = together and tensor.untyped_storage().data_ptr() == storage
        address += tensor.numel() * step
        count += tensor.numel()
    if together:
        return first.as_strided((count,), (1,), first.storage_offset())
    flat = flat_of(first)
    if flat is None or flat.tensor.dtype != first.dtype or address > flat.begin + flat.nbytes:
        return None
    start = (first.data_ptr() - flat.begin) // step
    return flat.tensor[start : start + count]


def shares_storage(tensor: Tensor) -> bool:
    """Whether the memory of a tensor is shared, or a part of a larger storage or `Flat`."""
    shared = tensor.device.type == "cpu" and bool(tensor.is_shared())  # type: ignore[no-untyped-call]
    return shared or flat_of(tensor) is not None or room_of(tensor) != tensor.numel() * tensor.element_size()


def begin_of(tensor: Tensor) -> int:
    """The address of the flat memory, or otherwise of the storage, that contains a tensor."""
    flat = flat_of(tensor)
    return tensor.untyped_storage().data_ptr() if flat is None else flat.begin


def room_of(tensor: Tensor) -> int:
    """The size of the flat memory, or otherwise of the storage, that contains a tensor, in bytes."""
    flat = flat_of(tensor)
    return tensor.untyped_storage().nbytes() if flat is None else flat.nbytes
