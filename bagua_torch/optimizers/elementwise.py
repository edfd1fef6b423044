"""A test whether an optimizer works element by element: it runs on two shapes of the same numbers."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bagua_comm import UnsupportedError

from ..tensors import rng

STEPS = 4
"""Steps of an optimizer in a trial."""
RATE = 1e-3
"""The learning rate in a trial of an optimizer whose rate is 0."""
EVEN = (8 * 64, 4 * 64, 16 * 64)
"""Sizes that are multiples of the vector size, so that PyTorch computes no element in scalar code."""
UNEVEN = (1, 3, 6, 7, 9, 13, 15, 16, 21, 30, 33, 63, 65, 120, 129, 205, 257, 99)
"""Sizes with a remainder in scalar code."""


def bare(optimizer: Optimizer, kind: type[Optimizer], parameters: Mapping[int, Tensor]) -> Optimizer:
    """A copy of an optimizer, of class `kind`, without its state, groups and hooks.

    Args:
        optimizer: What to copy.
        kind: The class of the copy.
        parameters: The replacement of each parameter in the copy, by `id`.

    Raises:
        UnsupportedError: An attribute of the optimizer cannot be copied.
    """
    own = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups", "step") and not name.startswith("_optimizer_")
    }
    try:
        own = copy.deepcopy(own, dict(parameters))
    except Exception as exc:
        raise UnsupportedError(f"fuse: {kind.__name__} has an attribute that cannot be copied: {exc}") from exc
    other = kind.__new__(kind)
    Optimizer.__setstate__(other, {**own, "state": defaultdict(dict), "param_groups": []})
    return other


def step_of(kind: type[Optimizer]) -> Callable[[Optimizer], object]:
    """The method `step` of a class without PyTorch's wrapper for hooks."""
    step: Any = kind.step
    bare_step: Callable[[Optimizer], object] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return bare_step


def check_group(
    optimizer: Optimizer, kind: type[Optimizer], group: Mapping[str, Any], *, exact: bool
) -> set[str]:
    """Run copies of an optimizer with the settings of `group` on two shapes of the same numbers.

    Args:
        optimizer: The optimizer; it is not changed.
        kind: Its class.
        group: A group of parameters with its settings.
        exact: Whether to refuse results that differ only in rounding.

    Returns:
        The names of states that have one value for each element.

    Raises:
        UnsupportedError: Results differ, or the optimizer cannot run on flat tensors.
    """
    name = kind.__name__
    if group.get("differentiable"):
        raise UnsupportedError(f"fuse: {name} has differentiable=True; steps on flat tensors have no gradients")
    elementwise: set[str] = set()
    parameters = group["params"]
    kinds = {(p.dtype, p.device) for p in parameters if p.dtype.is_floating_point or p.dtype.is_complex}
    for dtype, device in sorted(kinds, key=str):
        even = _trial(optimizer, kind, group, EVEN, (32, -1), dtype, device)
        if not _same(*even):
            raise UnsupportedError(
                f"fuse: {name} does not work element by element: on two shapes of the same numbers its step "
                "gives other values, as those of LAMB, LARS, Muon and Adafactor do; use it unfused"
            )
        uneven = _trial(optimizer, kind, group, UNEVEN, (-1,), dtype, device)
        if exact and not _same(*uneven):
            raise UnsupportedError(
                f"fuse: in {dtype}, {name} as it is set rounds an element by its place in a tensor (PyTorch's "
                "code for vectors and for the rest differ), so fused it would not give the same bytes; keep "
                "weights in float32 without fused=True, or give exact=False"
            )
        elementwise |= even[0].kept
    return elementwise


class _Outcome:
    """The result of a trial: the values of all elements, and the values that exist once for each tensor."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        states = [optimizer.state.get(p, {}) for p in parameters]
        self.kept = {key for key, value in states[0].items() if _per_element(value, parameters[0])}
        self.elements = [torch.cat([p.detach().reshape(-1) for p in parameters])]
        self.rest: list[tuple[str, list[object]]] = []
        for key in sorted({key for state in states for key in state}, key=str):
            values = [state.get(key) for state in states]
            if key in self.kept and all(map(_per_element, values, parameters)):
                self.elements.append(torch.cat([value.reshape(-1) for value in values]))
            else:
                self.rest.append((key, values))


def _trial(
    optimizer: Optimizer,
    kind: type[Optimizer],
    group: Mapping[str, Any],
    sizes: Sequence[int],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[_Outcome, _Outcome]:
    """Run the optimizer on tensors of these sizes, each in the given shape, and on one flat tensor."""
    generator = torch.Generator().manual_seed(0)

    def numbers() -> Tensor:
        count = sum(sizes)
        scale = torch.logspace(-4, 2, count, dtype=torch.float64)[torch.randperm(count, generator=generator)]
        return (torch.randn(count, generator=generator, dtype=torch.float64) * scale).to(device, dtype)

    start, gradients = numbers(), [numbers() for _ in range(STEPS)]
    with rng.fork():
        several = _run(optimizer, kind, group, start, gradients, sizes, shape)
        flat = _run(optimizer, kind, group, start, gradients, [sum(sizes)], (-1,))
    return several, flat


def _run(
    optimizer: Optimizer,
    kind: type[Optimizer],
    group: Mapping[str, Any],
    start: Tensor,
    gradients: Sequence[Tensor],
    sizes: Sequence[int],
    shape: tuple[int, ...],
) -> _Outcome:
    parameters = [nn.Parameter(part.clone().reshape(shape)) for part in torch.split(start, list(sizes))]
    everyone = (p for each in (*optimizer.param_groups, group) for p in each["params"])
    other = bare(optimizer, kind, dict.fromkeys(map(id, everyone), parameters[0]))
    settings = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
    rate = settings.get("lr")
    if isinstance(rate, (int, float, Tensor)) and rate == 0:  # as at the beginning of a warm-up
        settings["lr"] = rate + RATE
    other.param_groups.append({**settings, "params": parameters})
    step = step_of(kind)
    for gradient in gradients:
        for parameter, part in zip(parameters, torch.split(gradient, list(sizes)), strict=True):
            parameter.grad = part.clone().reshape(shape)
        try:
            step(other)
        except Exception as exc:
            raise UnsupportedError(
                f"fuse: {kind.__name__} cannot be fused: its step without a closure, on dense gradients and flat "
                f"tensors, raised {type(exc).__name__}: {exc}; use it unfused"
            ) from exc
    return _Outcome(other, parameters)


def _per_element(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _same(several: _Outcome, flat: _Outcome) -> bool:
    """Whether elements are equal to the byte, and values for each tensor are equal for all tensors."""
    if several.kept != flat.kept or len(several.elements) != len(flat.elements):
        return False
    if not all(map(_equal, several.elements, flat.elements)):
        return False
    if [key for key, _ in several.rest] != [key for key, _ in flat.rest]:
        return False
    return all(
        _equal(value, wanted)
        for (_, values), (_, (wanted,)) in zip(several.rest, flat.rest, strict=True)
        for value in values
    )


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))
    return bool(type(a) is type(b) and a == b)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def same_rest(one: Iterable[tuple[str, object]], other: Iterable[tuple[str, object]]) -> bool:
    """Whether two parameters have equal states, apart from elementwise ones."""
    a, b = dict(one), dict(other)
    return a.keys() == b.keys() and all(a[key] is b[key] or _equal(a[key], b[key]) for key in a)
