"""`attach`: sharded models communicate by this library from then on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from bagua_comm import (
    ArrayError,
    Average,
    BaguaError,
    Communicator,
    ErrorFeedback,
    Exact,
    Hierarchical,
    Quantized,
    UnsupportedError,
)
from bagua_comm.algorithms.base import check_average, check_average_argument
from bagua_comm.closing import Closing
from bagua_comm.trace import Counters

from ..arrays import as_array, as_tensor, dtype_name
from ..broadcast import broadcast_tensors
from ..errors import MismatchError
from ..process_group import default
from .collectives import Gather, Reduce, Replicate
from .groups import GroupComms, LaneComms, raise_on_all
from .overlap import Prefetch, Reductions
from .torch_names import Unit, units_of

_NAME = "bagua_torch.fsdp.attach"


class Attachment(Closing):
    """A model whose shards are gathered and reduced by this library; made by `attach`.

    Can be used as a context manager.
    """

    def __init__(
        self,
        comm: Communicator,
        units: list[Unit],
        reduce: Average,
        gather: Exact | Quantized,
        replicas: Average | None,
        model: nn.Module,
        overlap: bool,
    ) -> None:
        self._comm, self._units = comm, units
        groups = [group for unit in units for group in unit.process_groups]
        if replicas is not None:
            groups += [unit.replicas for unit in units if unit.replicas is not None]
        overlaps = overlap and all(unit.device.type == "cpu" for unit in units)
        self._comms = GroupComms(comm, groups)
        self._lanes = [LaneComms(self._comms) for _ in range(2)] if overlaps else []
        gathering, reducing = self._lanes or (self._comms, self._comms)
        self._counters = Counters()
        for each in {*self._comms.all(), *gathering.all(), *reducing.all()}:
            each.counters = self._counters
        self._reductions = Reductions() if overlaps else None
        self._feeding: dict[str, Reduce | Replicate] = {}
        """What has a residual, by the name of its module."""
        reducers, averages = [], []
        for unit in units:  # `bind` and the broadcast may raise, so no module is changed before
            over = reducing.of(unit.process_groups[0])
            reducers.append(Reduce(reducing, unit, reduce, over, self._reductions))
            if isinstance(reduce, ErrorFeedback) and over.size > 1:
                self._feeding[unit.name] = reducers[-1]
            average = None
            if replicas is not None and unit.replicas is not None:
                average = Replicate(unit, replicas, self._comms.of(unit.replicas))
                if isinstance(replicas, ErrorFeedback):
                    self._feeding[f"replicas of {unit.name or 'the root'}"] = average
            averages.append(average)
        for unit in units if replicas is not None else []:
            if unit.replicas is not None:
                broadcast_tensors(self._comms.of(unit.replicas), unit.shards)
        feeding = {*self._feeding.values()}
        self._prefetch = Prefetch(model) if overlaps else None
        for unit, reducer, average in zip(units, reducers, averages, strict=True):
            if average is not None:
                unit.use_for_replicas(average)
            unit.use(
                Gather(gathering, unit, gather, self._prefetch),
                reducer,
                include_unused=bool(feeding & {reducer, average}),
            )

    @property
    def counters(self) -> Counters:
        """The calls and bytes of all gathers and reductions on this rank, by operation."""
        return self._counters

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank: the residuals of `ErrorFeedback`, by the names of modules.

        A residual is a flat tensor of the elements of the module's gradients, shards padded; zeros before the
        first step. Each rank has its own. The key has the rank and the number of ranks, so that
        torch.distributed.checkpoint saves and loads those of all ranks.
        """
        self._wait()
        residuals = {name: as_tensor(each.residual_or_zeros()).clone() for name, each in self._trained.items()}
        return {self._key: residuals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict` of this rank.

        Collective.

        Raises:
            ArrayError: The state is of another rank or number of ranks, of another model, or of another `reduce`.
                Raised on all ranks.
        """
        raise_on_all(self._comm, self._complaint(state))
        self._wait()
        for name, residual in state[self._key].items():
            each = self._feeding[name]
            each.residual = as_array(residual.to(each.device, copy=True))

    @property
    def _trained(self) -> dict[str, Reduce | Replicate]:
        """What has a residual, by module, of modules whose parameters are not all frozen."""
        return {name: each for name, each in self._feeding.items() if each.numel}

    @property
    def _key(self) -> str:
        return f"residuals of rank {self._comm.rank} of {self._comm.size}"

    def _complaint(self, state: Mapping[str, Any]) -> ArrayError | None:
        """Return the error to raise if the state does not fit."""
        name, key = "load_state_dict", self._key
        if not isinstance(state, Mapping) or not all(isinstance(each, Mapping) for each in state.values()):
            return ArrayError(f"{name}: state is {type(state).__name__}, expected a result of state_dict()")
        if key not in state:
            found = ", ".join(map(str, state)) or "nothing"
            return ArrayError(
                f"{name}: the state has {found}, expected {key}; residuals belong to a rank, so load them with "
                "as many ranks, or start without them"
            )
        expected = {name: (each.numel, each.dtype) for name, each in self._trained.items()}
        for module in {**expected, **state[key]}:
            residual = state[key].get(module, "no residual")
            mine = expected.get(module)
            wanted = "none" if mine is None else f"a flat tensor of {mine[0]} elements of {mine[1]}"
            found = str(residual)[:40]
            if isinstance(residual, torch.Tensor):
                if mine is not None and (residual.dtype, residual.shape) == (mine[1], (mine[0],)):
                    continue
                found = f"{tuple(residual.shape)} of {residual.dtype}"
            return ArrayError(
                f"{name}: the state has {found} for module {module!r}, expected {wanted}; it is of another "
                "model, of one that was sharded in another way, or of another reduce"
            )
        return None

    def close(self) -> None:
        """Have PyTorch communicate as before, and close the communicators.

        Collective.
        """
        self._restore()
        with ExitStack() as ends:
            for each in (self._comms, *self._lanes):
                ends.callback(each.close)

    def _leave(self, error: BaseException) -> None:
        self._restore()
        for each in self._lanes:
            each.leave(error)

    def _wait(self) -> None:
        for each in self._lanes:
            each.wait()

    def _restore(self) -> None:
        if self._prefetch is not None:
            self._prefetch.close()
        for unit in self._units:
            unit.restore()


def attach(
    model: nn.Module,
    reduce: Average | None = None,
    gather: Exact | Quantized | None = None,
    comm: Communicator | None = None,
    *,
    replicas: Average | None = None,
    overlap: bool = True,
) -> Attachment:
    """Gather the parameters and reduce the gradients of a sharded model by this library.

    Collective. Call it once, after all calls of `fully_shard`, and before the first forward pass. All modules
    that `fully_shard` has sharded communicate by `comm` from then on. Parameters and optimizer are as PyTorch has
    sharded them; `clip_grad_norm_`, checkpoints and `full_tensor` use PyTorch's own communication.

    The scaling is PyTorch's: gradients are averaged over the ranks, unless `set_gradient_divide_factor` sets
    another divisor. Modules without another rank to communicate with are not changed.

    Args:
        model: A model in which `fully_shard` has sharded modules.
        reduce: How gradients are averaged; `Quantized()` if None. `Exact()`, `Quantized(codec)` and
            `ErrorFeedback(Quantized(codec))` send each gradient once, to the rank that keeps it;
            `Hierarchical(Exact())` and `Hierarchical(Quantized(codec))` do so exactly inside nodes, and by their
            inner average between them. Another average reduces the whole gradient on all ranks, of which each
            keeps its shard: two times the bytes.
        gather: How parameters are gathered for the forward and backward passes: `Exact()`, the default, or
            `Quantized(codec)`. All ranks compute with the same, quantized, parameters; those of the optimizer are
            not quantized.
        comm: The ranks of the mesh, and perhaps others; if None, the default communicator, which
            `bagua_torch.connect` makes. Communicators over the ranks of its process groups are made of it.
        replicas: On a mesh of two dimensions, (replicas, shards): how the shards of gradients are averaged over
            the replicas, by any average. The parameters of the first replica are copied to the others. If None,
            PyTorch's all-reduce averages them.
        overlap: Whether a model on CPUs computes while its parameters and gradients are exchanged, on threads;
            see below. On GPUs PyTorch's streams do that.

    Returns:
        A handle with counters, the state of `reduce`, and `close`.

    Raises:
        ArrayError: `reduce`, `gather`, `replicas` or `overlap` is something else, or the model has no sharded
            modules; or there is `replicas`, but a module has no replicas, has a hook, or has parameters on the
            meta device.
        MismatchError: The ranks have different models or arguments.
        UnsupportedError: The model is sharded over ranks that `comm` does not have, or over several meshes in one
            module, or is replicated by `replicate`; or a method does not take the dtypes of a module.

    All of these are raised on all ranks.

    With `overlap`, the parameters of the next module are gathered while a module computes: in forward passes in
    the order of the forward pass before, in backward passes as PyTorch asks for them. Gradients are complete when
    `backward()` returns; until then they may be NaN. Computing waits for a reduction whose result PyTorch reads
    at once: to add it to earlier gradients, to divide or cast it, to average it over replicas, and for
    `register_post_accumulate_grad_hook`. Results are equal with and without `overlap`, bit for bit.

    With `ErrorFeedback`, each module keeps the errors of its gradients, one copy of the gradients of its whole
    parameters on each rank; and parameters that a step does not use get gradients of zeros instead of None, by
    `set_reduce_scatter_unused_params`, so that the errors belong to the same parameters in every step.
    """
    world = comm if comm is not None else default()
    reduce, gather = reduce or Quantized(), gather or Exact()
    units: list[Unit] = []
    error: BaguaError | None = None
    try:
        units = _checked_units(model, reduce, gather, replicas)
        if not isinstance(overlap, bool):
            raise ArrayError(f"{_NAME}: overlap is {overlap!r}, expected True or False")
    except BaguaError as exc:
        error = exc
    raise_on_all(world, error)
    _compare(world, units, f"reduce={reduce}, gather={gather}, replicas={replicas}, overlap={overlap}")
    return Attachment(world, units, reduce, gather, replicas, model, overlap)


def _checked_units(model: Any, reduce: Any, gather: Any, replicas: Any) -> list[Unit]:
    """Return the units of a model; raise unless they can be reduced and gathered by these methods."""
    for name, method in (("reduce", reduce), ("replicas", replicas)):
        if method is not None:
            check_average_argument(_NAME, method, name)
        if isinstance(method, Hierarchical) and isinstance(method.inner, ErrorFeedback):
            raise ArrayError(f"{_NAME}: {name} is {method}, whose residuals cannot be saved; use {method.inner}")
    if not isinstance(gather, (Exact, Quantized)):
        raise ArrayError(f"{_NAME}: gather is {gather!r}, expected Exact() or Quantized(codec)")
    if not isinstance(model, nn.Module):
        raise ArrayError(f"{_NAME}: model is a {type(model).__name__}, expected a module")
    try:
        units = list(units_of(model))
    except ValueError as exc:
        raise UnsupportedError(
            f"{_NAME}: module {exc.args[0]!r} has parameters on several meshes (shard_placement_fn), for which "
            "PyTorch does not support custom communication; shard its parts by calls of their own"
        ) from exc
    if not units:
        raise ArrayError(
            f"{_NAME}: the model has no sharded parameters; call torch.distributed.fsdp.fully_shard on it first"
        )
    for unit in units:
        _check_unit(unit, reduce, gather)
        if replicas is not None:
            _check_replicas(unit, replicas)
    return units


def _check_replicas(unit: Unit, replicas: Average) -> None:
    what = f"module {unit.name!r}" if unit.name else "the root module"
    if unit.replicas is None:
        raise ArrayError(
            f"{_NAME}: replicas is {replicas}, but {what} has none; give fully_shard a mesh of two dimensions, "
            "(replicas, shards)"
        )
    if unit.has_hook:
        raise ArrayError(f"{_NAME}: replicas is {replicas}, but set_all_reduce_hook was called for {what}")
    if any(shard.is_meta for shard in unit.shards):
        raise ArrayError(
            f"{_NAME}: {what} has parameters on the meta device, which cannot be copied to the replicas; "
            "initialize them first"
        )
    for dtype in unit.reduce_dtypes:
        check_average(replicas, _name_of(dtype))


def _check_unit(unit: Unit, reduce: Average, gather: Exact | Quantized) -> None:
    what = f"module {unit.name!r}" if unit.name else "the root module"
    if not unit.process_groups:
        raise UnsupportedError(
            f"{_NAME}: {what} is replicated, not sharded; use fully_shard, or bagua_torch.DistributedDataParallel"
        )
    if unit.is_custom:
        raise ArrayError(
            f"{_NAME}: {what} has custom communication already; close the handle of the earlier call"
        )
    if isinstance(gather, Quantized):
        dtypes = unit.gather_dtypes
        if len(dtypes) > 1:
            names = ", ".join(sorted(map(str, dtypes)))
            raise UnsupportedError(
                f"{_NAME}: {what} has parameters of several dtypes ({names}), which are gathered as bytes; use "
                "gather=Exact(), shard them by calls of their own, or give MixedPrecisionPolicy(param_dtype=...)"
            )
        gather.check(_name_of(dtypes[0]))
    for dtype in unit.reduce_dtypes:
        check_average(reduce, _name_of(dtype))


def _name_of(dtype: torch.dtype) -> str:
    return dtype_name(torch.empty(0, dtype=dtype))


def _compare(comm: Communicator, units: list[Unit], arguments: str) -> None:
    """Raise `MismatchError` on all ranks unless all have the same units and arguments. Collective."""
    mine = [arguments]
    mine += [
        f"{unit.name or 'the root'}: {unit.parameters}, gathered in {unit.gather_dtypes}, reduced in "
        f"{unit.reduce_dtypes}"
        for unit in units
    ]
    rows: list[list[str]] = comm.allgather_object(mine)
    for rank, theirs in enumerate(rows):
        if theirs != rows[0]:
            pairs = zip([*rows[0], "nothing more"], [*theirs, "nothing more"], strict=False)
            first, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise MismatchError(f"{_NAME}: rank 0 has {first}, but rank {rank} has {other}")
