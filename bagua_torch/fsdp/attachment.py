"""`attach`: sharded models communicate by this library from then on."""

from __future__ import annotations

from collections.abc import Mapping
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
from ..errors import MismatchError
from ..process_group import default
from .collectives import Gather, Reduce
from .groups import GroupComms, raise_on_all
from .torch_names import Unit, units_of

_NAME = "bagua_torch.fsdp.attach"


class Attachment(Closing):
    """A model whose shards are gathered and reduced by this library; made by `attach`.

    Can be used as a context manager.
    """

    def __init__(self, comm: Communicator, units: list[Unit], reduce: Average, gather: Exact | Quantized) -> None:
        self._comm, self._units = comm, units
        self._comms = GroupComms(comm, [group for unit in units for group in unit.process_groups])
        self._feeding: dict[str, Reduce] = {}
        reducers = []
        for unit in units:  # `bind` may raise, so no module is changed before all reducers are made
            over = self._comms.of(unit.process_groups[0])
            reducer = Reduce(self._comms, unit, reduce, over)
            reducers.append(reducer)
            if isinstance(reduce, ErrorFeedback) and over.size > 1:
                self._feeding[unit.name] = reducer
        for unit, reducer in zip(units, reducers, strict=True):
            unit.use(Gather(self._comms, gather), reducer, include_unused=unit.name in self._feeding)

    @property
    def counters(self) -> Counters:
        """The calls and bytes of all gathers and reductions on this rank, by operation."""
        return self._comms.all()[0].counters

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank: the residuals of `ErrorFeedback`, by the names of modules.

        A residual is a flat tensor of the elements of the module's gradients, shards padded; zeros before the
        first step. Each rank has its own. The key has the rank and the number of ranks, so that
        torch.distributed.checkpoint saves and loads those of all ranks.
        """
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
        for name, residual in state[self._key].items():
            reducer = self._feeding[name]
            reducer.residual = as_array(residual.to(reducer.device, copy=True))

    @property
    def _trained(self) -> dict[str, Reduce]:
        """The reductions with a residual, by module: those of parameters that are not all frozen."""
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
        self._comms.close()

    def _leave(self, error: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        for unit in self._units:
            unit.restore()


def attach(
    model: nn.Module,
    reduce: Average | None = None,
    gather: Exact | Quantized | None = None,
    comm: Communicator | None = None,
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

    Returns:
        A handle with counters, the state of `reduce`, and `close`.

    Raises:
        ArrayError: `reduce` or `gather` is something else, or the model has no sharded modules.
        MismatchError: The ranks have different models or arguments.
        UnsupportedError: The model is sharded over ranks that `comm` does not have, or over several meshes in one
            module, or is replicated by `replicate`; or a method does not take the dtypes of a module.

    All of these are raised on all ranks.

    With `ErrorFeedback`, each module keeps the errors of its gradients, one copy of the gradients of its whole
    parameters on each rank; and parameters that a step does not use get gradients of zeros instead of None, by
    `set_reduce_scatter_unused_params`, so that the errors belong to the same parameters in every step.
    """
    world = comm if comm is not None else default()
    reduce, gather = reduce or Quantized(), gather or Exact()
    units: list[Unit] = []
    error: BaguaError | None = None
    try:
        units = _checked_units(model, reduce, gather)
    except BaguaError as exc:
        error = exc
    raise_on_all(world, error)
    _compare(world, units, reduce, gather)
    return Attachment(world, units, reduce, gather)


def _checked_units(model: Any, reduce: Any, gather: Any) -> list[Unit]:
    """Return the units of a model; raise unless they can be reduced and gathered by these methods."""
    check_average_argument(_NAME, reduce, "reduce")
    if isinstance(reduce, Hierarchical) and isinstance(reduce.inner, ErrorFeedback):
        raise ArrayError(f"{_NAME}: reduce is {reduce}, whose residuals cannot be saved; use {reduce.inner}")
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
    return units


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


def _compare(comm: Communicator, units: list[Unit], reduce: Average, gather: Exact | Quantized) -> None:
    """Raise `MismatchError` on all ranks unless all have the same units and arguments. Collective."""
    mine = [f"reduce={reduce}, gather={gather}"]
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
