"""Optimizers that step flat tensors, each of which holds many parameters.

The class of the original optimizer makes the steps, in an inner copy whose parameters are flat: one for each
group, dtype and device, or one for each bucket where DistributedDataParallel keeps gradients or weights in
buckets. Parameters and their states are views of the flat tensors, so nothing is copied back.

Each step first compares all addresses with those of the last step. Tensors that have moved since (loaded,
replaced, assigned to other buckets) are adopted, and parameters that no longer step together form groups of
their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from bagua_comm import ArrayError, UnsupportedError
from bagua_comm.errors import warn

from ..tensors.flats import Flat, begin_of, joined_view
from .elementwise import bare, check_group, same_rest, step_of
from .flat_group import FlatGroup
from .layout import addresses_of, check_parameters, contiguous_runs, divided, split_flat

_SLOWER_THAN_FUSED, _SLOWER_THAN_PLAIN = (64, 128, 1024), (1024, 4096, 32768)
"""Elements of a parameter, on average, from which PyTorch's `fused=True`, or the class as it is, steps faster
than a flat tensor with a copy: with 0, 1, or more states for each element (see `benchmarks.fused -e`)."""

SCALER_ATTRIBUTES = ("found_inf", "grad_scale")
"""Attributes that a GradScaler sets on an optimizer for one step."""


def fuse(optimizer: Optimizer, *, exact: bool = True) -> Any:
    """An optimizer of the same class that steps all parameters of a group at once.

    It takes over the groups and the state of `optimizer`, which must not step afterwards. Its results equal, to
    the byte, those of the class with `foreach=False`. So does its `state_dict()`: a plain optimizer loads it, and
    the fused one loads that of a plain optimizer. It does not need DistributedDataParallel; inside one, the flat
    tensors are the buckets themselves. Call `fuse` first, and give the result to DistributedDataParallel and to
    schedulers.

    Parameters move into flat tensors in the first step, or when DistributedDataParallel is constructed: views of
    them taken earlier do not follow. Forward passes may round differently afterwards, since matrix products on a
    CPU may round by the addresses of weights. Parameters in memory with another owner (weights in buckets, shared
    memory) stay there. Gradients that are contiguous are used in place, as those that DistributedDataParallel or
    `zero_grad(set_to_none=False)` leaves in their memory; others, which each backward pass makes anew, are copied
    together. If that takes longer than it saves, a warning says what is faster, and larger parameters step as
    without `fuse` from then on (`units` is then 0). A parameter
    without a gradient is skipped, as always. Its neighbours then step as separate flat tensors, so many such
    parameters cost most of the speed. `units` is the number of flat tensors.

    Args:
        optimizer: Any optimizer that works element by element. This is tested here, on copies.
        exact: Refuse an optimizer whose fused results would differ in rounding. This concerns PyTorch's SGD,
            RMSprop and others in float16 and bfloat16, and SGD with `fused=True`.

    Raises:
        UnsupportedError: The optimizer does not work element by element (LAMB, LARS, Muon, Adafactor), needs a
            closure (LBFGS) or sparse gradients (SparseAdam), is differentiable, or would round differently; or
            parameters overlap, have gaps, are lazy, or are on devices other than CPU and CUDA.
        ArrayError: `optimizer` is not an optimizer, is fused already, or has hooks or a scheduler already.

    >>> optimizer = fuse(torch.optim.Adam(torch.nn.Linear(2, 1).parameters(), lr=0.1))
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
            f"fuse: this {kind.__name__} has hooks or a wrapped step already (a scheduler, a hook, a "
            "DistributedDataParallel); fuse it first, and give them the result"
        )
    check_parameters(optimizer.param_groups)
    elementwise: set[str] = set()
    for group in optimizer.param_groups:
        elementwise |= check_group(optimizer, kind, group, exact=exact)
    fused = _remake(kind)
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    Optimizer.__setstate__(fused, {name: value for name, value in vars(optimizer).items() if name not in hooks})
    fused._begin(exact, elementwise)
    optimizer.register_step_pre_hook(_refuse)
    return fused


def _refuse(optimizer: Optimizer, *_: object) -> None:
    raise ArrayError(f"{type(optimizer).__name__}: this optimizer was fused; step the one that fuse returned")


class FusedOptimizer(Optimizer):
    """Base that `fuse` adds to the class of an optimizer; see `fuse`."""

    _kind: type[Optimizer]
    _step_inner: Callable[[Optimizer], object]

    def _begin(self, exact: bool, elementwise: set[str]) -> None:
        by_id = {id(p): p for group in self.param_groups for p in group["params"]}
        self._template = bare(self, self._kind, by_id)  # for trials
        self._inner = bare(self._template, self._kind, by_id)
        self._exact, self._elementwise = exact, elementwise
        self._flat_groups: list[list[FlatGroup]] = []  # by parameter group
        self._storages: dict[int, Flat] = {}  # allocated here for parameters, by address
        self._known: tuple[object, list[int], object] | None = (
            None  # the parameters of the flat groups; None if these must be built anew
        )
        self._advised = self._is_plain = False  # whether a warning was given; whether parameters step as they are

    @property
    def units(self) -> int:
        """Number of flat tensors; 0 before the first step."""
        return sum(map(len, self._flat_groups))

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        exact, elementwise = state.pop("_exact", True), state.pop("_elementwise", set())
        super().__setstate__(state)
        if "_flat_groups" not in vars(self):
            self._begin(exact, elementwise)
        self._known = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        state = self.__getstate__()
        return _remake, (self._kind,), {**state, "_exact": self._exact, "_elementwise": self._elementwise}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; see `torch.optim.Optimizer.add_param_group`.

        Raises:
            UnsupportedError: With these settings it cannot be fused; see `fuse`.
        """
        before = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            check_parameters(self.param_groups)
            self._check(self.param_groups[-1])
        except UnsupportedError:
            del self.param_groups[before:]
            raise
        self._known = None

    def _check(self, group: Mapping[str, Any]) -> None:
        self._elementwise |= check_group(self._template, self._kind, group, exact=self._exact)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of the `state_dict()` of this or of a plain optimizer.

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
        """The state dict of a plain optimizer, with a separate state for each parameter."""
        packed = super().state_dict()
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
        """Drop the gradients, or set them to zero; see `torch.optim.Optimizer.zero_grad`."""
        keeps = not (set_to_none or self._is_plain or self._moved())
        if not (keeps and all(flat_group.zero() for flat_group in self._all_groups())):
            super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; see the class.

        Raises:
            UnsupportedError: A gradient is sparse, or parameters can no longer be fused.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_plain:
            self._step_inner(self)
            return loss
        if self._moved():
            self.flatten()
        self._hold_gradients()
        if self._advise():
            self._step_inner(self)
            return loss
        rows = zip(self.param_groups, self._inner.param_groups, self._flat_groups, strict=True)
        for mine, inner, flat_groups in rows:
            inner.update({key: value for key, value in mine.items() if key != "params"})
            inner["params"] = [flat_group.flat for flat_group in flat_groups]
        scaler = {name: vars(self)[name] for name in SCALER_ATTRIBUTES if name in vars(self)}
        vars(self._inner).update(scaler)
        try:
            self._step_inner(self._inner)
        except BaseException:
            for name in scaler:
                vars(self).pop(name, None)
            raise
        finally:
            for name in scaler:
                vars(self._inner).pop(name, None)
        rows = zip(self.param_groups, self._inner.param_groups, self._flat_groups, strict=True)
        for mine, inner, flat_groups in rows:
            mine.update({key: value for key, value in inner.items() if key != "params"})
            for flat_group in flat_groups:
                if flat_group.flat.grad is not None:
                    self._split_state(flat_group)
                    increment_version(flat_group.parameters)
        return loss

    def _advise(self) -> bool:
        """Warn, once, if gradients are new in each step and something else is faster.

        Returns whether flat groups are given up for that reason.
        """
        copied = [] if self._advised else [g for g in self._all_groups() if g.copied > 2]
        if not copied:
            return False
        elements = sum(g.flat.numel() for g in copied) / sum(len(g.parameters) for g in copied)
        states = min(2, max(len(self._elementwise.intersection(g.state)) for g in copied))
        self._advised = True
        if elements < _SLOWER_THAN_FUSED[states]:
            return False
        self._is_plain = elements >= _SLOWER_THAN_PLAIN[states]
        taken = "so it now steps as without fuse" if self._is_plain else "which take time to copy"
        warn(
            f"fuse: the gradients of {self._kind.__name__} are new tensors in each step, {taken}; PyTorch's own "
            "fused=True is faster here, and so is zero_grad(set_to_none=False), which keeps gradients in place"
        )
        if self._is_plain:
            for entry in self.state.values():
                for key, value in entry.items():
                    if isinstance(value, Tensor) and key not in self._elementwise:  # shared by the parameters
                        entry[key] = value.clone()
            self._drop(self._all_groups())
            self._inner.state.clear()
            self._flat_groups = [[] for _ in self._flat_groups]
        return self._is_plain

    # Flat groups --------------------------------------------------------------------------------------------

    def _all_groups(self) -> list[FlatGroup]:
        return [flat_group for flat_groups in self._flat_groups for flat_group in flat_groups]

    def _moved(self) -> bool:
        """Whether a parameter or a state has moved since the flat groups were built."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self._known is None:
            return True
        state, ids, addresses = self._known
        if self.state is not state or list(map(id, parameters)) != ids or addresses_of(parameters) != addresses:
            return True
        for flat_group in self._all_groups():
            entries: list[Any] = [state.get(p) for p in flat_group.parameters]
            if not flat_group.state:
                if any(entries):
                    return True
                continue
            if not all(entries):
                return True
            for key, values in flat_group.state.items():
                if not all(map(is_, [entry.get(key) for entry in entries], values)):
                    return True
        return False

    @torch.no_grad()
    def flatten(self) -> None:
        """Build all flat groups from the present parameters, gradients and states. Steps do it on demand."""
        check_parameters(self.param_groups)
        inner = self._inner
        inner.state.clear()
        self._drop(self._all_groups())
        self._flat_groups = []
        inner.param_groups = []
        for group in self.param_groups:
            by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
            for p in group["params"]:
                by_type.setdefault((p.dtype, p.device), []).append(p)
            flat_groups = [
                self._make_group(part)
                for parameters in by_type.values()
                for run in contiguous_runs(parameters, self._storages)
                for part in divided(run, self._step_together)
            ]
            self._flat_groups.append(flat_groups)
            inner.param_groups.append({"params": [flat_group.flat for flat_group in flat_groups]})
        used = {begin_of(p) for group in self.param_groups for p in group["params"]}
        self._storages = {address: flat for address, flat in self._storages.items() if address in used}
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._known = self.state, list(map(id, parameters)), addresses_of(parameters)

    def _step_together(self, before: Tensor, p: Tensor) -> bool:
        """Whether two neighbours have equal values of states that exist once for each tensor."""
        return same_rest(self._rest(before), self._rest(p))

    def _drop(self, flat_groups: Sequence[FlatGroup]) -> None:
        """Hook for subclasses: the inner optimizer will not step these groups again."""

    def _rest(self, p: Tensor) -> list[tuple[str, object]]:
        """The state of a parameter, with None for values that have one entry for each element."""
        entry = self.state.get(p, {})
        return [(key, None if self._is_elementwise(key, value, p) else value) for key, value in entry.items()]

    def _is_elementwise(self, key: str, value: object, p: Tensor) -> bool:
        if not isinstance(value, Tensor) or value.shape != p.shape:
            return False
        return p.numel() > 1 or key in self._elementwise

    def _make_group(self, parameters: Sequence[Tensor]) -> FlatGroup:
        """Make the flat group of contiguous parameters, with their state."""
        flat_group = FlatGroup(parameters)
        entries = [self.state.get(p, {}) for p in parameters]
        if entries[0]:
            self._inner.state[flat_group.flat] = state = {}
            for key, value in entries[0].items():
                if not self._is_elementwise(key, value, parameters[0]):
                    state[key] = value.clone() if isinstance(value, Tensor) else value
                    continue
                values = [entry[key] for entry in entries]
                flat = joined_view(values, parameters)
                if flat is None:
                    flat = torch.empty(flat_group.flat.numel(), dtype=value.dtype, device=value.device)
                    torch._foreach_copy_(split_flat(flat, parameters), values)
                state[key] = flat
            self._split_state(flat_group)
        return flat_group

    def _split_state(self, flat_group: FlatGroup) -> None:
        """Set each parameter's state to its part of the inner optimizer's state of the group."""
        inner = self._inner.state.get(flat_group.flat, {})
        gone = flat_group.state.keys() - inner.keys()
        changed = [key for key, value in inner.items() if value is not flat_group.source.get(key, flat_group)]
        if not changed and not gone:
            return
        entries = [self.state[p] for p in flat_group.parameters]
        for key in changed:
            value = flat_group.source[key] = inner[key]
            if isinstance(value, Tensor) and value.shape == flat_group.flat.shape:
                self._elementwise.add(key)
                flat_group.state[key] = split_flat(value, flat_group.parameters)
            else:
                flat_group.state[key] = [value] * len(entries)
            for entry, own in zip(entries, flat_group.state[key], strict=True):
                entry[key] = own
        for key in gone:
            del flat_group.state[key], flat_group.source[key]
            for entry in entries:
                entry.pop(key, None)

    def _hold_gradients(self) -> None:
        """Set the flat gradient of each group. A group with some gradients missing is divided."""
        for flat_groups in self._flat_groups:
            for flat_group in list(flat_groups):
                missing = [p.grad is None for p in flat_group.parameters]
                if not any(missing):
                    self._hold(flat_group)
                elif all(missing):
                    flat_group.flat.grad = None
                else:
                    at = flat_groups.index(flat_group)
                    flat_groups[at : at + 1] = self._split_group(flat_group, missing)

    def _hold(self, flat_group: FlatGroup) -> None:
        gradients = [p.grad for p in flat_group.parameters if p.grad is not None]
        for g in gradients:
            if g.layout is not torch.strided:
                raise UnsupportedError(
                    f"fused {self._kind.__name__}: a gradient of shape {tuple(g.shape)} has layout {g.layout}, "
                    "expected dense ones; make its layer with sparse=False, or give the layer a plain optimizer"
                )
        flat_group.hold(gradients, self._flatten_at_next_step)

    def _flatten_at_next_step(self) -> None:
        self._known = None

    def _split_group(self, flat_group: FlatGroup, missing: Sequence[bool]) -> list[FlatGroup]:
        """Divide a group into groups of neighbours that all have a gradient, or all have none."""
        pieces = divided(range(len(missing)), lambda before, i: missing[before] == missing[i])
        self._inner.state.pop(flat_group.flat, None)
        self._drop([flat_group])
        made = []
        for piece in pieces:
            new = self._make_group([flat_group.parameters[i] for i in piece])
            if not missing[piece[0]]:
                self._hold(new)
            made.append(new)
        return made


class FusedSharingOptimizer(FusedOptimizer):
    """A fused optimizer that can share state with an algorithm, such as a fused `QAdamOptimizer`."""

    def _begin(self, exact: bool, elementwise: set[str]) -> None:
        super()._begin(exact, elementwise)
        self._attached: dict[Tensor, Tensor] = {}
        self._attached_at: list[int] = []
        self._sharing: dict[str, object] = {}

    def attach(self, parameters: Iterable[Tensor], momenta: Mapping[Tensor, Tensor], **sharing: object) -> None:
        """Keep the momentum of each parameter in the tensor given for it; see `QAdamOptimizer.attach`."""
        parameters = list(parameters)
        super().attach(parameters, momenta, **sharing)  # type: ignore[misc]
        for p in parameters:
            self._attached.pop(p, None)
        self._attached.update(momenta)
        self._sharing = sharing
        at = [tensor.data_ptr() for tensor in self._attached.values()]
        if at != self._attached_at:
            self._known, self._attached_at = None, at
        if self._known is not None:
            for flat_group in self._all_groups():
                self._attach(flat_group)

    def detach(self, parameters: Iterable[Tensor]) -> None:
        """Keep the momentum of each parameter in a separate tensor again."""
        parameters = list(parameters)
        super().detach(parameters)  # type: ignore[misc]
        if [p for p in parameters if self._attached.pop(p, None) is not None]:
            self._known, self._attached_at = None, [tensor.data_ptr() for tensor in self._attached.values()]

    def _make_group(self, parameters: Sequence[Tensor]) -> FlatGroup:
        flat_group = super()._make_group(parameters)
        self._attach(flat_group)
        return flat_group

    def _attach(self, flat_group: FlatGroup) -> None:
        if flat_group.parameters[0] in self._attached:
            joined = joined_view([self._attached[p] for p in flat_group.parameters], flat_group.parameters)
            inner: Any = self._inner
            inner.attach([flat_group.flat], {flat_group.flat: joined}, **self._sharing)

    def _step_together(self, before: Tensor, p: Tensor) -> bool:
        if (before in self._attached) != (p in self._attached):
            return False
        both = [self._attached[before], self._attached[p]] if p in self._attached else []
        if both and joined_view(both, [before, p]) is None:
            return False
        return super()._step_together(before, p)

    def _drop(self, flat_groups: Sequence[FlatGroup]) -> None:
        inner: Any = self._inner
        inner.detach([flat_group.flat for flat_group in flat_groups])


@functools.cache
def _class_of(kind: type[Optimizer]) -> type[FusedOptimizer]:
    """The fused class of `kind`, derived from `FusedOptimizer` and `kind`."""
    base = FusedSharingOptimizer if hasattr(kind, "shares_state") else FusedOptimizer
    members = {"_kind": kind, "_step_inner": staticmethod(step_of(kind)), "__module__": kind.__module__}
    return type(f"Fused{kind.__name__}", (base, kind), members)


def _remake(kind: Any) -> FusedOptimizer:
    """An empty fused optimizer, for copies and pickles."""
    return _class_of(kind).__new__(_class_of(kind))
