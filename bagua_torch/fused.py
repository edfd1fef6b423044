"""An optimizer that steps flat tensors, each of which holds many parameters.

The class of the optimizer itself makes the steps, on an inner copy whose parameters are flat: one for each group,
dtype and device, or one for each bucket where DistributedDataParallel keeps gradients or weights in buckets.
Parameters, and what the optimizer keeps for them, are views of the flat tensors, so nothing is copied back.

Before each step everything is looked for where it was. Whatever lies elsewhere now (loaded, replaced, moved to
other buckets) is taken over, and parameters that stopped stepping together step apart from then on.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from bagua_comm import ArrayError, UnsupportedError

from .elementwise import bare, check_group, same_rest, step_of
from .flats import Flat, Layout, begin_of, is_dense, joined_view, lodges, room_of, same_place, views

LENT = ("found_inf", "grad_scale")
"""What a GradScaler leaves on an optimizer for one step."""


def fuse(optimizer: Optimizer, *, exact: bool = True) -> Any:
    """An optimizer of the same class that steps all parameters of a group at once.

    It takes over the groups and the state of `optimizer`, which must not step any more. Its results are equal, to
    the byte, to those of the class with `foreach=False`, and so is its `state_dict()`, which a plain optimizer
    loads; it loads that of a plain one. It needs no DistributedDataParallel; inside one the flat tensors are the
    buckets themselves. Fuse first; give the result to DistributedDataParallel and to schedulers.

    Parameters move into flat tensors in the first step, or when DistributedDataParallel is made: views of them
    that were taken before do not follow. Forward passes may round otherwise from then on, since matrix
    products on a CPU may round by the addresses of weights. Parameters that lie in memory of somebody else
    (weights in buckets, shared memory) stay there. Gradients are used where they lie if they lie together, and
    are copied together otherwise. A parameter without a gradient is skipped, as always; its neighbours then
    step as flat tensors of their own, so many such parameters take away the advantage. `units` says how many
    flat tensors there are.

    Args:
        optimizer: Any optimizer that works element by element; that is tried out here, on copies.
        exact: Refuse an optimizer whose fused results would differ in rounding. That concerns PyTorch's SGD,
            RMSprop and others in float16 and bfloat16, and SGD with `fused=True`.

    Raises:
        UnsupportedError: It does not work element by element (LAMB, LARS, Muon, Adafactor), needs a closure
            (LBFGS) or sparse gradients (SparseAdam), is differentiable, or would round otherwise; parameters
            overlap, have gaps, are lazy, or are on other devices than CPU and CUDA.
        ArrayError: It is no optimizer, is fused already, or something waits for its steps already.

    >>> optimizer = fuse(torch.optim.Adam(nn.Linear(2, 1).parameters(), lr=0.1))
    >>> isinstance(optimizer, torch.optim.Adam)
    True
    """
    if not isinstance(optimizer, Optimizer):
        raise ArrayError(f"fuse: optimizer is {optimizer!r}, expected an optimizer of torch.optim")
    kind = type(optimizer)
    if isinstance(optimizer, FusedOptimizer):
        raise ArrayError(f"fuse: this {kind.__name__} is fused already")
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if hooked or "step" in vars(optimizer):
        raise ArrayError(
            f"fuse: something waits for the steps of this {kind.__name__} (a scheduler, a hook, a "
            "DistributedDataParallel); fuse it first, and give them the result"
        )
    _check_parameters(optimizer.param_groups)
    elementwise: set[str] = set()
    for group in optimizer.param_groups:
        elementwise |= check_group(optimizer, kind, group, exact=exact)
    fused = _remake(kind)
    waiting = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    Optimizer.__setstate__(fused, {name: value for name, value in vars(optimizer).items() if name not in waiting})
    fused._begin(exact, elementwise)
    optimizer.register_step_pre_hook(_refuse)
    return fused


def _refuse(optimizer: Optimizer, *_: Any) -> None:
    raise ArrayError(f"{type(optimizer).__name__}: this optimizer was fused; step the one that fuse returned")


class Unit:
    """Parameters that lie one behind the other in memory, and make the same steps.

    Args:
        parameters: The parameters, in the order in which they lie.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        joined = joined_view(parameters, parameters)
        assert joined is not None
        self.flat = nn.Parameter(joined, requires_grad=parameters[0].requires_grad)
        """All of them, as the inner optimizer sees them."""
        self.gradient: Tensor | None = None
        """Their gradients, one behind the other."""
        self.gradients_at: list[int] = []
        """Where the gradients lie in `gradient`. We hold no gradient: one that is held counts as kept."""
        self.known: list[int] = []
        """The `id` of each gradient that we have found there."""
        self.copies: Flat | None = None
        """Memory of our own for gradients that do not lie together."""
        self.laid_for = [_place(p.grad) for p in self.parameters]
        """Where gradients were when the parameters were laid in this order, and in the last step."""
        self.last: list[int | None] = self.laid_for
        self.state: dict[str, list[Any]] = {}
        """What each parameter's state holds, by name, as we have put it there."""
        self.source: dict[str, Any] = {}
        """The inner optimizer's values that `state` was cut from."""

    def hold(self, gradients: Sequence[Tensor], elsewhere: Callable[[], None]) -> None:
        """Have the gradients in `flat.grad`. Copies those that do not lie together.

        Args:
            gradients: The gradients of all the parameters.
            elsewhere: Called if another order of parameters may need no copies.
        """
        places, ids = list(map(Tensor.data_ptr, gradients)), list(map(id, gradients))
        if places == self.gradients_at and ids == self.known:
            self.flat.grad = self.gradient
            return
        joined = joined_view(gradients, self.parameters)
        if joined is not None:
            self.gradient, self.gradients_at, self.known = joined, places, ids
        else:
            if self.copies is None:
                self.copies = Flat(torch.empty_like(self.flat))
            copies = self.copies.views(self._layouts)
            pairs = [(v, g) for v, g in zip(copies, gradients, strict=True) if not same_place(v, g)]
            torch._foreach_copy_([v for v, _ in pairs], [g for _, g in pairs])
            self.gradient, self.gradients_at, self.known = self.copies.tensor, [v.data_ptr() for v in copies], ids
            if places == self.last != self.laid_for and any(map(lodges, gradients)):
                elsewhere()
        self.last = list(places)
        self.flat.grad = self.gradient

    @property
    def _layouts(self) -> list[Layout]:
        return [Layout(p.shape, p.stride()) for p in self.parameters]

    def zero(self) -> bool:
        """Make all gradients zero at once; returns False if they are not where we want them."""
        present = [p.grad for p in self.parameters]
        if self.gradient is None or any(g is None or g.requires_grad for g in present):
            return False
        if [g.data_ptr() for g in present if g is not None] != self.gradients_at:
            copied = self.copies is not None and self.gradient is self.copies.tensor
            if self.copies is None or not copied or any(lodges(g) for g in present if g is not None):
                return False
            del present
            for parameter, part in zip(self.parameters, self.copies.parts(self._layouts), strict=True):
                parameter.grad = part
        self.gradient.zero_()
        return True


class FusedOptimizer(Optimizer):
    """What `fuse` adds to the class of an optimizer; see there."""

    _kind: type[Optimizer]
    _step_inner: Any

    def _begin(self, exact: bool, elementwise: set[str]) -> None:
        everyone = {id(p): p for group in self.param_groups for p in group["params"]}
        self._template = bare(self, self._kind, everyone)  # for trials
        self._inner = bare(self._template, self._kind, everyone)
        self._exact, self._elementwise = exact, elementwise
        self._units: list[list[Unit]] = []  # of each group
        self._homes: dict[int, Flat] = {}  # memory that we made for parameters, by address
        self._known: Any = None  # what units were made for; None if they must be made anew

    @property
    def units(self) -> int:
        """How many flat tensors there are; 0 before the first step."""
        return sum(map(len, self._units))

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        exact, elementwise = state.pop("_exact", True), state.pop("_elementwise", set())
        super().__setstate__(state)
        if "_units" not in vars(self):
            self._begin(exact, elementwise)
        self._known = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        state: Any = self.__getstate__()
        return _remake, (self._kind,), {**state, "_exact": self._exact, "_elementwise": self._elementwise}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; see `torch.optim.Optimizer.add_param_group`.

        Raises:
            UnsupportedError: With these settings it cannot be fused; see `fuse`.
        """
        before = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            _check_parameters(self.param_groups)
            self._check(self.param_groups[-1])
        except UnsupportedError:
            del self.param_groups[before:]
            raise
        self._known = None

    def _check(self, group: Mapping[str, Any]) -> None:
        self._elementwise |= check_group(self._template, self._kind, group, exact=self._exact)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` of this or of a plain optimizer gave. Copies it.

        Raises:
            UnsupportedError: With its settings the optimizer cannot be fused; see `fuse`.
        """
        for mine, saved in zip(self.param_groups, state_dict["param_groups"]):  # noqa: B905 - the class compares
            self._check({**mine, **saved, "params": mine["params"]})
        super().load_state_dict(state_dict)
        for entry in self.state.values():
            for key, value in entry.items():
                entry[key] = value.clone() if isinstance(value, Tensor) else value

    def state_dict(self) -> dict[str, Any]:
        """What a plain optimizer's `state_dict()` holds: for each parameter a state of its own."""
        packed: dict[str, Any] = super().state_dict()
        packed["state"] = {
            number: {
                key: value.clone() if isinstance(value, Tensor) and key not in self._elementwise else value
                for key, value in entry.items()
            }
            if isinstance(entry, dict)
            else entry
            for number, entry in packed["state"].items()
        }
        return packed

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, or make them zero; see `torch.optim.Optimizer.zero_grad`."""
        units = [unit for group in self._units for unit in group]
        if set_to_none or self._moved() or not all(unit.zero() for unit in units):
            super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change the parameters by one step; see the class.

        Raises:
            UnsupportedError: A gradient is sparse, or parameters have become such that they cannot be fused.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._moved():
            self.lay_out()
        self._hold_gradients()
        for mine, inner, units in zip(self.param_groups, self._inner.param_groups, self._units, strict=True):
            inner.update({key: value for key, value in mine.items() if key != "params"})
            inner["params"] = [unit.flat for unit in units]
        lent = {name: vars(self)[name] for name in LENT if name in vars(self)}
        vars(self._inner).update(lent)
        try:
            self._step_inner(self._inner)
        except BaseException:
            for name in lent:
                vars(self).pop(name, None)
            raise
        finally:
            for name in lent:
                vars(self._inner).pop(name, None)
        for mine, inner, units in zip(self.param_groups, self._inner.param_groups, self._units, strict=True):
            mine.update({key: value for key, value in inner.items() if key != "params"})
            for unit in units:
                if unit.flat.grad is not None:
                    self._show(unit)
                    increment_version(unit.parameters)
        return loss

    # Where everything lies ----------------------------------------------------------------------------------

    def _moved(self) -> bool:
        """Whether a parameter or a state is not where it was."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self._known is None:
            return True
        state, ids, places = self._known
        if self.state is not state or list(map(id, parameters)) != ids or _places(parameters) != places:
            return True
        for unit in (unit for units in self._units for unit in units):
            entries: list[Any] = [state.get(p) for p in unit.parameters]
            if not unit.state:
                if any(entries):
                    return True
                continue
            if not all(entries):
                return True
            for key, values in unit.state.items():
                if not all(map(is_, [entry.get(key) for entry in entries], values)):
                    return True
        return False

    @torch.no_grad()
    def lay_out(self) -> None:
        """Make all units anew from the parameters, gradients and states as they are, as a step does at need."""
        _check_parameters(self.param_groups)
        inner = self._inner
        inner.state.clear()
        self._forget([unit for units in self._units for unit in units])
        self._units = []
        inner.param_groups = []
        for group in self.param_groups:
            kinds: dict[Any, list[Tensor]] = {}
            for p in group["params"]:
                kinds.setdefault((p.dtype, p.device), []).append(p)
            units = [
                self._make_unit(part)
                for parameters in kinds.values()
                for run in _runs(parameters, self._homes)
                for part in self._split(run)
            ]
            self._units.append(units)
            inner.param_groups.append({"params": [unit.flat for unit in units]})
        used = {begin_of(p) for group in self.param_groups for p in group["params"]}
        self._homes = {address: flat for address, flat in self._homes.items() if address in used}
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._known = self.state, list(map(id, parameters)), _places(parameters)

    def _split(self, run: Sequence[Tensor]) -> list[list[Tensor]]:
        """Cut a run where states differ in what there is once for each tensor."""
        parts = [[run[0]]]
        for before, p in itertools.pairwise(run):
            if self._step_together(before, p):
                parts[-1].append(p)
            else:
                parts.append([p])
        return parts

    def _step_together(self, before: Tensor, p: Tensor) -> bool:
        return same_rest(self._rest(before), self._rest(p))

    def _forget(self, units: Sequence[Unit]) -> None:
        """The inner optimizer will not see these units again."""

    def _rest(self, p: Tensor) -> list[tuple[str, Any]]:
        """What is kept for a parameter: names only where it is kept for each element."""
        entry = self.state.get(p, {})
        return [(key, None if self._is_elementwise(key, value, p) else value) for key, value in entry.items()]

    def _is_elementwise(self, key: str, value: Any, p: Tensor) -> bool:
        if not isinstance(value, Tensor) or value.shape != p.shape:
            return False
        return p.numel() > 1 or key in self._elementwise

    def _make_unit(self, parameters: Sequence[Tensor]) -> Unit:
        """A unit of parameters that lie together, with their state."""
        unit = Unit(parameters)
        entries = [self.state.get(p, {}) for p in parameters]
        if entries[0]:
            self._inner.state[unit.flat] = state = {}
            for key, value in entries[0].items():
                if not self._is_elementwise(key, value, parameters[0]):
                    state[key] = value.clone() if isinstance(value, Tensor) else value
                    continue
                values = [entry[key] for entry in entries]
                flat = joined_view(values, parameters)
                if flat is None:
                    flat = torch.empty(unit.flat.numel(), dtype=value.dtype, device=value.device)
                    torch._foreach_copy_(_cut(flat, parameters), values)
                state[key] = flat
            self._show(unit)
        return unit

    def _show(self, unit: Unit) -> None:
        """Give each parameter its part of what the inner optimizer keeps for the unit."""
        inner = self._inner.state.get(unit.flat, {})
        gone = unit.state.keys() - inner.keys()
        changed = [key for key, value in inner.items() if value is not unit.source.get(key, unit)]
        if not changed and not gone:
            return
        entries = [self.state[p] for p in unit.parameters]
        for key in changed:
            value = unit.source[key] = inner[key]
            if isinstance(value, Tensor) and value.shape == unit.flat.shape:
                self._elementwise.add(key)
                unit.state[key] = _cut(value, unit.parameters)
            else:
                unit.state[key] = [value] * len(entries)
            for entry, own in zip(entries, unit.state[key], strict=True):
                entry[key] = own
        for key in gone:
            del unit.state[key], unit.source[key]
            for entry in entries:
                entry.pop(key, None)

    def _hold_gradients(self) -> None:
        """Have the gradients of each unit in one tensor; units that have only some are cut."""
        for units in self._units:
            for unit in list(units):
                gradients = [p.grad for p in unit.parameters]
                missing = [g is None for g in gradients]
                if not any(missing):
                    self._hold(unit, gradients)
                elif all(missing):
                    unit.flat.grad = None
                else:
                    at = units.index(unit)
                    units[at : at + 1] = self._cut_unit(unit, missing)

    def _hold(self, unit: Unit, gradients: Sequence[Any]) -> None:
        for g in gradients:
            if g.layout is not torch.strided:
                raise UnsupportedError(
                    f"fused {self._kind.__name__}: a gradient of shape {tuple(g.shape)} has layout {g.layout}, "
                    "expected dense ones; make its layer with sparse=False, or give the layer a plain optimizer"
                )
        unit.hold(gradients, self._lay_out_next_time)

    def _lay_out_next_time(self) -> None:
        self._known = None

    def _cut_unit(self, unit: Unit, missing: Sequence[bool]) -> list[Unit]:
        """Units of those neighbours that have a gradient, and of those that have none."""
        pieces = [[0]]
        for i in range(1, len(missing)):
            if missing[i] == missing[i - 1]:
                pieces[-1].append(i)
            else:
                pieces.append([i])
        self._inner.state.pop(unit.flat, None)
        self._forget([unit])
        made = []
        for piece in pieces:
            new = self._make_unit([unit.parameters[i] for i in piece])
            gradients = [p.grad for p in new.parameters]
            if not missing[piece[0]]:
                self._hold(new, gradients)
            made.append(new)
        return made


class FusedBorrower(FusedOptimizer):
    """A fused optimizer that can keep a part of its state in arrays of an algorithm, such as `QAdamOptimizer`."""

    def _begin(self, exact: bool, elementwise: set[str]) -> None:
        super()._begin(exact, elementwise)
        self._lent: dict[Tensor, Tensor] = {}
        self._lent_at: list[int] = []
        self._how: dict[str, Any] = {}

    def borrow(self, parameters: Iterable[Tensor], momenta: Mapping[Tensor, Tensor], **how: Any) -> None:
        """Keep the momentum of each parameter in the tensor given for it; see `QAdamOptimizer.borrow`."""
        parameters = list(parameters)
        super().borrow(parameters, momenta, **how)  # type: ignore[misc]
        for p in parameters:
            self._lent.pop(p, None)
        self._lent.update(momenta)
        self._how = how
        at = [tensor.data_ptr() for tensor in self._lent.values()]
        if at != self._lent_at:
            self._known, self._lent_at = None, at
        if self._known is not None:
            for unit in (unit for units in self._units for unit in units):
                self._lend(unit)

    def give_back(self, parameters: Iterable[Tensor]) -> None:
        """Keep the momentum of each parameter in a tensor of its own again."""
        parameters = list(parameters)
        super().give_back(parameters)  # type: ignore[misc]
        if [p for p in parameters if self._lent.pop(p, None) is not None]:
            self._known, self._lent_at = None, [tensor.data_ptr() for tensor in self._lent.values()]

    def _make_unit(self, parameters: Sequence[Tensor]) -> Unit:
        unit = super()._make_unit(parameters)
        self._lend(unit)
        return unit

    def _lend(self, unit: Unit) -> None:
        if unit.parameters[0] in self._lent:
            joined = joined_view([self._lent[p] for p in unit.parameters], unit.parameters)
            inner: Any = self._inner
            inner.borrow([unit.flat], {unit.flat: joined}, **self._how)

    def _step_together(self, before: Tensor, p: Tensor) -> bool:
        if (before in self._lent) != (p in self._lent):
            return False
        if p in self._lent and joined_view([self._lent[before], self._lent[p]], [before, p]) is None:
            return False
        return super()._step_together(before, p)

    def _forget(self, units: Sequence[Unit]) -> None:
        inner: Any = self._inner
        inner.give_back([unit.flat for unit in units])


@functools.cache
def _class_of(kind: Any) -> type[FusedOptimizer]:
    """The class of a fused optimizer: a `kind` and a `FusedOptimizer`."""
    base = FusedBorrower if hasattr(kind, "borrows") else FusedOptimizer
    members = {"_kind": kind, "_step_inner": staticmethod(step_of(kind)), "__module__": kind.__module__}
    return type(f"Fused{kind.__name__}", (base, kind), members)


def _remake(kind: Any) -> Any:
    """An empty fused optimizer, for copies and pickles."""
    return _class_of(kind).__new__(_class_of(kind))


# Memory -----------------------------------------------------------------------------------------------------


def _check_parameters(groups: Iterable[Mapping[str, Any]]) -> None:
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


def _runs(parameters: Sequence[Tensor], homes: dict[int, Flat]) -> list[list[Tensor]]:
    """Parameters of one group, dtype and device in runs that lie together. Moves those that may be moved.

    Args:
        parameters: The parameters.
        homes: The memory that we made for parameters, by address; what is made here is added.
    """
    loose = [p for p in parameters if p.numel() and (not lodges(p) or begin_of(p) in homes)]
    moving = {id(p) for p in loose}
    fixed = [p for p in parameters if p.numel() and id(p) not in moving]
    runs = [[p] for p in parameters if not p.numel()]
    runs += _chains(fixed, fixed)

    in_bucket: dict[int, list[Tensor]] = {}
    for p in loose:
        if p.grad is not None and p.grad.layout is torch.strided and lodges(p.grad) and p.grad.numel():
            in_bucket.setdefault(begin_of(p.grad), []).append(p)
    ordered: list[list[Tensor]] = []
    for inside in in_bucket.values():
        gradients = [p.grad for p in inside if p.grad is not None]
        chains = _chains(inside, gradients)
        size = sum(g.nbytes for g in gradients)
        if len(chains) == 1 and (len(inside) > 1 or 2 * size >= room_of(gradients[0])):
            ordered += chains
            moving -= {id(p) for p in inside}
    ordered.append([p for p in loose if id(p) in moving])
    for run in filter(None, ordered):
        if run[0].data_ptr() != begin_of(run[0]) or joined_view(run, run) is None:
            flat = Flat(torch.empty(sum(p.numel() for p in run), dtype=run[0].dtype, device=run[0].device))
            homes[flat.begin] = flat
            for p, part in zip(run, flat.parts([Layout(p.shape, p.stride()) for p in run]), strict=True):
                part.copy_(p.detach())
                p.data = part
        runs.append(run)
    return runs


def _chains(parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parameters by the addresses of `tensors`, one for each; cut where one does not follow the one before."""
    pairs = sorted(zip(tensors, parameters, strict=True), key=lambda pair: pair[0].data_ptr())
    chains: list[list[Tensor]] = []
    for i, (tensor, p) in enumerate(pairs):
        if i and joined_view([pairs[i - 1][0], tensor], [pairs[i - 1][1], p]) is not None:
            chains[-1].append(p)
        else:
            chains.append([p])
    return chains


def _cut(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat tensor: one for each parameter, in its shape and its order of dimensions."""
    return views(flat, [Layout(p.shape, p.stride()) for p in parameters])


def _place(gradient: Tensor | None) -> int | None:
    return gradient.data_ptr() if gradient is not None and gradient.layout is torch.strided else None


def _places(parameters: Sequence[Tensor]) -> tuple[list[int], list[Any]]:
    return [p.data_ptr() for p in parameters], [p.stride() for p in parameters]
