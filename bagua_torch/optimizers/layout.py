"""The memory of a fused optimizer's parameters: checks, contiguous runs, and moves into flat storages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bagua_comm import UnsupportedError

from ..tensors.flats import Flat, Layout, begin_of, is_dense, joined_view, room_of, shares_storage, views

T = TypeVar("T")


def check_parameters(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise `UnsupportedError` for parameters that cannot be parts of flat tensors."""
    ends: list[tuple[int, int, str]] = []
    for number, group in enumerate(groups):
        for index, p in enumerate(group["params"]):
            what = f"fuse: parameter {index} of group {number}, of shape "
            if nn.parameter.is_lazy(p):
                raise UnsupportedError(f"{what}unknown, is lazy; run the module once before")
            what += f"{tuple(p.shape)},"
            if type(p) not in (nn.Parameter, Tensor) or p.device.type not in ("cpu", "cuda"):
                raise UnsupportedError(f"{what} is a {type(p).__name__} on {p.device}, expected a plain tensor")
            if not is_dense(Layout(p.shape, p.stride())):
                raise UnsupportedError(f"{what} has gaps or repeats in its memory; make it contiguous")
            if p.numel():
                ends.append((p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), what))
    ends.sort()
    for (_, end, what), (begin, _, _) in itertools.pairwise(ends):
        if begin < end:
            raise UnsupportedError(f"{what} shares memory with another one; tie them by using one parameter")


def contiguous_runs(parameters: Sequence[Tensor], storages: dict[int, Flat]) -> list[list[Tensor]]:
    """Divide parameters into runs that are contiguous in memory, after moving those that may be moved.

    Args:
        parameters: Parameters of one group, dtype and device.
        storages: The memory allocated for parameters so far, by address. New memory is added.
    """
    loose = [p for p in parameters if p.numel() and (not shares_storage(p) or begin_of(p) in storages)]
    moving = {id(p) for p in loose}
    fixed = [p for p in parameters if p.numel() and id(p) not in moving]
    runs = [[p] for p in parameters if not p.numel()]
    runs += linked_runs(fixed, fixed)

    in_bucket: dict[int, list[Tensor]] = {}
    for p in loose:
        if p.grad is not None and p.grad.layout is torch.strided and shares_storage(p.grad) and p.grad.numel():
            in_bucket.setdefault(begin_of(p.grad), []).append(p)
    ordered: list[list[Tensor]] = []
    for inside in in_bucket.values():
        gradients = [p.grad for p in inside if p.grad is not None]
        linked = linked_runs(inside, gradients)
        size = sum(g.nbytes for g in gradients)
        if len(linked) == 1 and (len(inside) > 1 or 2 * size >= room_of(gradients[0])):
            ordered += linked
            moving -= {id(p) for p in inside}
    ordered.append([p for p in loose if id(p) in moving])
    for run in filter(None, ordered):
        if run[0].data_ptr() != begin_of(run[0]) or joined_view(run, run) is None:
            flat = Flat(torch.empty(sum(p.numel() for p in run), dtype=run[0].dtype, device=run[0].device))
            storages[flat.begin] = flat
            for p, part in zip(run, flat.parts([Layout(p.shape, p.stride()) for p in run]), strict=True):
                part.copy_(p.detach())
                p.data = part
        runs.append(run)
    return runs


def linked_runs(parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Sort parameters by the addresses of `tensors`, one for each, and divide them where those have gaps."""
    pairs = sorted(zip(tensors, parameters, strict=True), key=lambda pair: pair[0].data_ptr())
    runs = divided(pairs, lambda a, b: joined_view([a[0], b[0]], [a[1], b[1]]) is not None)
    return [[p for _, p in run] for run in runs]


def divided(items: Iterable[T], together: Callable[[T, T], bool]) -> list[list[T]]:
    """Divide items into runs of neighbours of which each is `together` with the one before."""
    runs: list[list[T]] = []
    for item in items:
        if runs and together(runs[-1][-1], item):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def split_flat(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat tensor: one for each parameter, in its shape and strides."""
    return views(flat, [Layout(p.shape, p.stride()) for p in parameters])


def address_of(gradient: Tensor | None) -> int | None:
    """The address of a gradient; None without a strided one."""
    return gradient.data_ptr() if gradient is not None and gradient.layout is torch.strided else None


def addresses_of(parameters: Sequence[Tensor]) -> tuple[list[int], list[tuple[int, ...]]]:
    """The addresses and strides of parameters."""
    return [p.data_ptr() for p in parameters], [p.stride() for p in parameters]
