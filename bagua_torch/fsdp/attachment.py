"""`attach`: sharded models communicate by this library from then on."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from bagua_comm import ArrayError, Average, CommError, Communicator, Exact, Quantized, UnsupportedError
from bagua_comm.algorithms.diloco import OuterAlgorithm
from bagua_comm.averages.error_feedback import Residual
from bagua_comm.engine.monitor import HealthMonitor
from bagua_comm.objects.closing import Closing
from bagua_comm.trace import Counters, ExchangeCounters

from ..arrays import as_array, as_tensor
from ..entry import communicator_of, errors_on_all
from ..process_group.groups import GroupComms, LaneComms
from ..tensors.broadcast import broadcast_tensors, map_leaves
from ..tensors.checks import listed
from .checks import NAME, argument, check_hook, checked_units, compare_units
from .collectives import Gather, Reduce, Replicate
from .local_steps import LocalSteps, check_local_steps, name_of_replica
from .overlap import Prefetch, Reductions
from .passes import BackwardPasses
from .residuals import keep_residuals
from .torch_names import Unit, observe_forward, of_this_replica, sharded_modules
from .weighing import PassWeights, watch_steps

_log = logging.getLogger(__name__)

T = TypeVar("T")

_LOCAL = "local steps"
"""The key of the state of local steps in a state."""

_COUNTS = "means since the last reset"
"""The key of the numbers of means in a state, by module."""


class Attachment(Closing):
    """A model whose shards are gathered and reduced by this library; made by `attach`.

    Can be used as a context manager.
    """

    def __init__(
        self,
        comm: Communicator,
        units: list[Unit],
        reduce: Average,
        gather: Average,
        replicas: Average | OuterAlgorithm | None,
        model: nn.Module,
        overlap: bool,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._comm, self._units = comm, units
        algorithm = None if isinstance(replicas, Average) else replicas
        groups = [group for unit in units for group in unit.process_groups]
        if replicas is not None:
            groups += [unit.replicas for unit in units if unit.replicas is not None]
        overlaps = overlap and all(unit.device.type == "cpu" for unit in units)
        self._comms = GroupComms(comm, groups, NAME)
        self._lanes = [LaneComms(self._comms) for _ in range(2)] if overlaps else []
        gathering, reducing = self._lanes or (self._comms, self._comms)
        self._counters = Counters()
        for each in {*self._comms.all(), *gathering.all(), *reducing.all()}:
            each.counters = self._counters
        self._passes = BackwardPasses()
        has_replicas = algorithm is None and any(unit.replicas is not None for unit in units)
        self._reduced_over = {
            unit.process_groups[0].size() * (1 if unit.replicas is None or algorithm else unit.replicas.size())
            for unit in units
        }
        """The numbers of ranks over which gradients are averaged."""
        compares = overlaps and self._reduced_over == {comm.size}  # else some ranks may make other passes
        self._lane = comm.lane("thread") if has_replicas or compares else None
        """Of all ranks, for weights where a reduction has fewer, and for the times of passes."""
        self._weights = PassWeights(self._passes, self._lane if has_replicas else None)
        self._averages = [each for each in (reduce, replicas) if isinstance(each, Average)]
        self._health: HealthMonitor | None = None
        if self._lane is not None and compares:
            self._health = HealthMonitor(self._lane, _log, [lane for each in self._lanes for lane in each.lanes])
        self._reductions = Reductions(self._passes, self._health) if overlaps else None
        self._feeding: dict[str, Reduce | Replicate] = {}
        """The reductions with a residual, by the name of their module."""
        self._local: LocalSteps | None = None
        made: list[tuple[Unit, Reduce, Replicate | None]] = []
        try:  # `bind` and the broadcast may raise, so no module is changed before
            with errors_on_all(comm):
                gathered = (gathering.of(group) for unit in units for group in unit.process_groups)
                with argument("gather", gather):
                    gathers = {each: gather.bind_gather(each) for each in dict.fromkeys(gathered)}
                for unit in units:
                    over, average = reducing.of(unit.process_groups[0]), None
                    with argument("reduce", reduce):
                        reducer = Reduce(
                            reducing, unit, reduce, over, self._passes, self._reductions, self._weights
                        )
                    if reducer.feedback is not None and over.size > 1:
                        self._feeding[unit.name] = reducer
                    if isinstance(replicas, Average) and unit.replicas is not None:
                        average = Replicate(unit, replicas, self._comms.of(unit.replicas), self._passes)
                        if average.feedback is not None:
                            self._feeding[f"replicas of {unit.name or 'the root'}"] = average
                    made.append((unit, reducer, average))
            for unit in units:
                if replicas is not None and unit.replicas is not None:
                    broadcast_tensors(self._comms.of(unit.replicas), unit.shards)
            if algorithm is not None:
                group = units[0].replicas
                assert group is not None
                with errors_on_all(comm):
                    self._local = LocalSteps(self._comms.of(group), model, units, algorithm, optimizers)
        except CommError:  # the ranks cannot close communicators together
            raise
        except Exception:
            self._close_comms()
            raise
        self._prefetch = Prefetch(model) if overlaps else None
        self._unwatch = observe_forward(model, lambda: self._warn_of_others(model), lambda raised: None)
        reduces = comm.size > 1 or reduce.is_reproducible  # else no pass uses a weight
        self._handles = [watch_steps(model, self._weights)] if reduces else []
        for unit, reducer, average in made:
            if average is not None:
                unit.use_for_replicas(average)
                unit.before_forward(partial(check_hook, unit))
            elif algorithm is not None:
                unit.leave_out_replicas()
            include_unused = reduce.is_reproducible or not {reducer, average}.isdisjoint(self._feeding.values())
            unit.use(Gather(gathering, unit, gathers, self._prefetch), reducer, include_unused=include_unused)
            unit.on_reset(reducer.reset)
            if self._prefetch is not None:
                unit.before_forward(partial(self._prefetch.check, unit))
            if reduce.is_reproducible and average is None and unit.process_groups[0].size() == 1:
                unit.use_alone(reducer.alone)
        self._kept: list[object] = [*keep_residuals(comm, self._trained, self._wait)]
        """What `elastic.run` commits."""
        if self._local is not None and comm.engine_registry is not None:
            comm.engine_registry.keep(self._local)
            self._kept.append(self._local)

    def _warn_of_others(self, model: nn.Module) -> None:
        """In the first forward pass, warn of modules that were sharded after `attach`."""
        self._unwatch()
        known = {unit.name for unit in self._units}
        others = [name for name in sharded_modules(model) if name not in known]
        if others:
            found = ", ".join(repr(name) if name else "the root module" for name in others[:3])
            found += " and others" * (len(others) > 3)
            warnings.warn(
                f"{NAME}: fully_shard was called after attach for {found}, whose parameters and "
                "gradients PyTorch itself exchanges; call attach after all calls of fully_shard",
                stacklevel=2,
            )

    @property
    def weight(self) -> float | None:
        """The weight of this rank in the next backward pass that reduces gradients: its tokens; None if not set.

        Set it on all ranks before the pass: with a loss that is the mean over a rank's own tokens, gradients are
        then as of one process with the tokens of all ranks. See `bagua_comm.Engine.weight`. After the pass it is
        None again. With `Reproducible(addends=M)`, each pass of a step has its own. A rank without data sets 0,
        and makes the pass with any batch.

        Raises:
            ArrayError: The backward pass has begun. If the weight was set after it, the step of an optimizer
                raises it; if that of a rank is late, missing or out of range, the next pass does, on all ranks.
            UnsupportedError: Gradients are averaged over other ranks than those of `comm`, or divided by the
                number of those that send an element.
        """
        return self._weights.now

    @weight.setter
    def weight(self, weight: float | None) -> None:
        if self._reduced_over != {self._comm.size}:
            raise UnsupportedError(
                f"weight: gradients of this model are averaged over {self._reduced_over} ranks, expected the "
                f"{self._comm.size} ranks of comm"
            )
        for average in self._averages:
            average.check_weights()
        self._weights.set(weight)

    @property
    def counters(self) -> Counters:
        """The calls and bytes of all gathers and reductions on this rank, by operation."""
        return self._counters

    @property
    def exchanges(self) -> ExchangeCounters:
        """With local steps, the exchanges of this rank with other replicas, and how long steps waited."""
        return ExchangeCounters() if self._local is None else self._local.engine.counters

    def state_dict(self) -> dict[str, Mapping[str, object]]:
        """Return the state of this rank: the residuals of `ErrorFeedback`, by the names of modules.

        A residual is a flat tensor of the elements of the module's gradients, shards padded; zeros before the
        first step. Each rank has its own. The key has the rank and the number of ranks, on a mesh of two
        dimensions also the shard, so that torch.distributed.checkpoint saves and loads those of all ranks.
        Residuals of a `residual_codec` are decoded. With `reset_every` there are also the numbers of means since
        the last reset, equal on all ranks.

        With local steps, the anchors and momenta of the outer optimizer are under "local steps", as tensors that
        are sharded as the parameters are: `torch.distributed.checkpoint` loads them on any mesh.
        """
        self._wait()
        residuals = {name: as_tensor(each.residual_or_zeros()).clone() for name, each in self._trained.items()}
        counts = {name: torch.tensor(each.means) for name, each in self._counting.items()}
        found: dict[str, Mapping[str, object]] = {self._key: residuals, **({_COUNTS: counts} if counts else {})}
        if self._local is None:
            return found
        return {**(found if residuals else {}), _LOCAL: self._local.checkpoint()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, object]]) -> None:
        """Continue from the result of `state_dict` of this rank.

        Collective.

        Raises:
            ArrayError: The state is of another rank or number of ranks, of another model, or of another `reduce`;
                or the numbers of means since the last reset differ between ranks. Raised on all ranks.
        """
        local: dict[str, object] = {}
        with errors_on_all(self._comm):
            if (error := self._complaint(state)) is not None:
                raise error
            if self._local is not None:
                local = self._local.engine_state(state[_LOCAL])
        tensors: Mapping[str, Mapping[str, torch.Tensor]] = {
            section: {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}
            for section, values in state.items()
        }
        counts = {name: int(tensors[_COUNTS][name]) for name in self._counting}
        rows = self._comm.allgather_object(counts) if counts else []
        if any(row != rows[0] for row in rows):
            raise ArrayError("load_state_dict: ranks have states with different numbers of means since the reset")
        self._wait()
        with errors_on_all(self._comm):  # each engine compares the ranks of its shards alone
            if self._local is not None:
                self._local.load(local)
        for name, residual in tensors.get(self._key, {}).items():
            self._feedback(name).residual = as_array(residual.to(self._feeding[name].device, copy=True))
        for name, means in counts.items():
            self._counting[name].means = means

    def weights_replaced(self) -> None:
        """Report that the program has replaced the weights, with local steps; see `Engine.weights_replaced`.

        Call it on all ranks between the same two steps. `load_state_dict` of a module needs no report.
        """
        if self._local is not None:
            self._local.engine.weights_replaced()

    def of_replica(self, tree: T, replica: int | None = None) -> dict[str, T]:
        """A tree of sharded tensors as what one replica has of its own, for `torch.distributed.checkpoint`.

        With local steps, the weights of replicas differ between outer steps, and the states of their optimizers
        always do. On the whole mesh, a checkpoint would have some tensors of one replica, and some of another.

        Args:
            tree: Dicts and lists with sharded tensors, as `model.state_dict()` and the state of an optimizer.
            replica: The replica whose values are loaded, for example 0 on another number of replicas than saved
                them; None for that of this rank, as in `save`.

        Returns:
            The tree under the name of the replica. Its tensors share memory with those of `tree`.

        Raises:
            ArrayError: There are no local steps.
        """
        if self._local is None:
            raise ArrayError(
                f"{NAME}: of_replica is for local steps, as by replicas=DiLoCo(); save the tree itself"
            )
        name = self._local.replica if replica is None else name_of_replica(replica)
        return {name: map_leaves(tree, of_this_replica)}

    def _feedback(self, name: str) -> Residual:
        feedback = self._feeding[name].feedback
        assert feedback is not None
        return feedback

    @property
    def _trained(self) -> dict[str, Reduce | Replicate]:
        """The reductions with a residual, by module, of modules whose parameters are not all frozen."""
        return {name: each for name, each in self._feeding.items() if each.numel}

    @property
    def _counting(self) -> dict[str, Residual]:
        """The residuals that are reset after a number of means, by module."""
        found = {name: self._feedback(name) for name in self._trained}
        return {name: each for name, each in found.items() if each.settings.reset_every is not None}

    @property
    def _key(self) -> str:
        rank, size = self._comm.rank, self._comm.size
        groups = (unit.process_groups[0] for unit in self._units)
        shards = sorted({(group.rank(), group.size()) for group in groups} - {(rank, size)})
        return ", ".join([f"residuals of rank {rank} of {size}", *(f"shard {i} of {n}" for i, n in shards)])

    def _complaint(self, state: Mapping[str, Mapping[str, object]]) -> ArrayError | None:
        """Return the error to raise if the state does not fit."""
        name, key = "load_state_dict", self._key
        if not isinstance(state, Mapping) or not all(isinstance(each, Mapping) for each in state.values()):
            return ArrayError(f"{name}: state is {type(state).__name__}, expected a result of state_dict()")
        if key not in state and (self._trained or self._local is None):
            found = ", ".join(map(str, state)) or "nothing"
            return ArrayError(
                f"{name}: the state has {found}, expected {key}; residuals belong to a rank, so load them with "
                "as many ranks, or start without them"
            )
        if self._local is not None and _LOCAL not in state:
            return ArrayError(
                f"{name}: the state has no {_LOCAL!r}, expected the state of a handle with replicas="
                f"{self._local.engine.algorithm}"
            )
        residuals = {name: (each.dtype, (each.numel,)) for name, each in self._trained.items()}
        for section, what, fitting in (
            (_COUNTS, "number of means since the reset", dict.fromkeys(self._counting, (torch.int64, ()))),
            (key, "residual", residuals),
        ):
            given = state.get(section, {})
            for module in {**fitting, **given}:
                value, wanted = given.get(module, f"no {what}"), fitting.get(module)
                found, shape = str(value)[:40], "none" if wanted is None else f"{wanted[1]} of {wanted[0]}"
                if isinstance(value, torch.Tensor):
                    found = f"a {what} {tuple(value.shape)} of {value.dtype}"
                    if (value.dtype, value.shape) == wanted:
                        if section == key or value >= 0:
                            continue
                        found, shape = f"a {what} of {value.item()}", "at least 0"
                return ArrayError(
                    f"{name}: the state has {found} for module {module!r}, expected {shape}; it is of another "
                    "model, of one that was sharded in another way, or of another reduce"
                )
        return None

    def close(self) -> None:
        """Have PyTorch communicate as before, and close the communicators.

        Collective.
        """
        self._restore()
        self._close_comms()

    def _close_comms(self) -> None:
        with ExitStack() as ends:
            for each in (self._comms, *self._lanes):
                ends.callback(each.close)
            if self._local is not None:
                ends.callback(self._local.close)
            if self._health is not None:
                ends.callback(self._health.close)
            if self._lane is not None:
                ends.callback(self._lane.close)

    def _leave(self, error: BaseException) -> None:
        self._restore()
        for each in self._lanes:
            each.leave(error)
        if self._local is not None:
            self._local.engine.abort()
        if self._lane is not None:
            self._lane.abort()

    def _wait(self) -> None:
        for each in self._lanes:
            each.wait()

    def _restore(self) -> None:
        self._unwatch()
        for handle in self._handles:
            handle.remove()
        registry = self._comm.engine_registry
        for each in self._kept:
            if registry is not None:
                registry.drop(each)
        self._kept.clear()
        if self._prefetch is not None:
            self._prefetch.close()
        for unit in self._units:
            unit.restore()


def attach(
    model: nn.Module,
    reduce: Average | None = None,
    gather: Average | None = None,
    comm: Communicator | None = None,
    *,
    replicas: Average | OuterAlgorithm | None = None,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
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
            `Hierarchical(Exact())` and `Hierarchical(Quantized(codec))` do so in two levels, by their `inside`
            in nodes, and by their inner average between them. `Reproducible()` sends each gradient once as well,
            as integers; with `addends` a step has that many backward passes, of all ranks together. Another
            average reduces the whole gradient on all ranks, of which each keeps its shard: two times the bytes.
        gather: How parameters are gathered for the forward and backward passes: `Exact()`, the default,
            `Quantized(codec)`, or `Hierarchical` of one of these, by which each shard enters a node once, not
            once for each rank. All ranks compute with the same, quantized, parameters; those of the optimizer
            are not quantized.
        comm: The ranks of the mesh, and perhaps others; if None, the default communicator, which
            `bagua_torch.connect` makes. Communicators over the ranks of its process groups are made of it.
        replicas: On a mesh of two dimensions, (replicas, shards): how the shards of gradients are averaged over
            the replicas, by any average. The parameters of the first replica are copied to the others. If None,
            PyTorch's all-reduce averages them. Or `DiLoCo(...)`, `StreamingDiLoCo(...)` or `SparseLoCo(...)`:
            then replicas train apart, and each rank exchanges its shards of the weights with those of the other
            replicas, once in many steps; see below.
        optimizers: With local steps, all optimizers of the model's parameters, whose steps are counted.
        overlap: Whether a model on CPUs computes while its parameters and gradients are exchanged, on threads;
            see below. On GPUs PyTorch's streams do that.

    Returns:
        A handle with counters, the state of `reduce`, and `close`.

    Raises:
        ArrayError: `reduce`, `gather`, `replicas` or `overlap` is something else, or the model has no sharded
            modules; or there is `replicas`, but a module has no replicas, has a hook, or has parameters on the
            meta device; or there are local steps, and the optimizers do not step all trained parameters.
        MismatchError: The ranks have different models or arguments.
        UnsupportedError: The model is sharded over ranks that `comm` does not have, or over several meshes in one
            module, or is replicated by `replicate`; or a method does not take the dtypes of a module; or
            `replicas` is an algorithm without local steps, or a parameter is trained that is not sharded.

    All of these are raised on all ranks.

    With `overlap`, the parameters of the next module are gathered while a module computes: in forward passes in
    the order of the forward pass before, in backward passes as PyTorch asks for them. Gradients are complete when
    `backward()` returns; until then they may be NaN. Computing waits for a reduction whose result PyTorch reads
    at once: to add it to earlier gradients, to divide or cast it, to average it over replicas, and for
    `register_post_accumulate_grad_hook`. Results are equal with and without `overlap`, bit for bit;
    codecs that round stochastically draw other random numbers.

    With local steps, gradients are averaged over the ranks of a replica alone. After an outer step, the new
    weights are in the parameters when `step()` of the last optimizer returns. Each rank keeps an anchor of its
    shards and their outer momentum. Shards of trained parameters move to common memory, as parameters of
    `DistributedDataParallel` do. If the program loads other weights by `load_state_dict` of a module, the
    algorithm begins anew from them; after other ways to replace weights, call `weights_replaced` of the handle.

    With `ErrorFeedback`, each module keeps the errors of its gradients, one copy of the gradients of its whole
    parameters on each rank, or a quarter of that with `residual_codec=MinMaxUInt8()`. With it and with
    `Reproducible`, parameters that a step does not use get gradients of zeros instead of None, by
    `set_reduce_scatter_unused_params`, so that all steps have the same parameters.
    """
    world = communicator_of(NAME, comm)
    reduce = Quantized() if reduce is None else reduce
    gather = Exact() if gather is None else gather
    units: list[Unit] = []
    given: list[torch.optim.Optimizer] = []
    with errors_on_all(world):
        units = checked_units(model, reduce, gather, replicas)
        if not isinstance(overlap, bool):
            raise ArrayError(f"{NAME}: overlap is {overlap!r}, expected True or False")
        for unit in units:
            unit.reshard()  # else the next pass has the weights of the last one, not those of the first replica
        given = listed(optimizers, NAME)
        if isinstance(replicas, OuterAlgorithm):
            check_local_steps(model, units, replicas, given)
        elif given:
            raise ArrayError(
                f"{NAME}: optimizers were given, but replicas is {replicas}; they are for the local steps of "
                "DiLoCo, StreamingDiLoCo or SparseLoCo"
            )
    kinds = [type(each).__name__ for each in given]
    compare_units(
        world, units, reduce=reduce, gather=gather, replicas=replicas, optimizers=kinds, overlap=overlap
    )
    return Attachment(world, units, reduce, gather, replicas, model, overlap, given)
