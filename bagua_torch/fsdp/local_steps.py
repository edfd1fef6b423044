"""Local steps of the replicas of a sharded model: its ranks exchange their shards once in many steps.

On a mesh of two dimensions, (replicas, shards), gradients are averaged over the shards of a replica alone, so
that replicas train apart. After a step of the optimizers, `DiLoCo`, `StreamingDiLoCo` or `SparseLoCo` averages
the changes of the weights over the replicas. Each rank does so for its own shards, with the ranks of the other
replicas that keep the same ones, by an engine over the buckets of these shards. The anchors and the outer
momentum are sharded as the parameters are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from bagua_comm import ArrayError, Communicator, Hierarchical, Point, UnsupportedError
from bagua_comm.algorithms.diloco import OuterAlgorithm
from bagua_comm.engine import EngineCallbacks, check_fit

from ..arrays import torch_stream
from ..tensors.checks import check_optimizers
from ..training.backward import WeakCall
from ..training.engine import TorchEngine
from ..training.scaling import on_skipped_step
from .checks import NAME
from .outer_state import engine_state, outer_state
from .shard_memory import ShardMemory, for_shards, plan_of
from .torch_names import TrainedShard, Unit, observe_forward, of_this_replica

_OWN = "own"
"""The key of what belongs to one replica, in commits of `elastic.run`."""


def name_of_replica(number: int) -> str:
    """The key of what belongs to one replica, in checkpoints."""
    return f"replica {number}"


def shards_of(model: nn.Module, units: Sequence[Unit]) -> dict[str, TrainedShard]:
    """The shards of this rank of all parameters that are trained, by name."""
    return {name: shard for unit in units for name, shard in unit.trained_shards(model).items()}


def check_local_steps(
    model: nn.Module,
    units: Sequence[Unit],
    algorithm: OuterAlgorithm,
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Raise unless all parameters that are trained can be exchanged in shards, after steps of these optimizers.

    Raises:
        ArrayError: No parameter is trained, the optimizers do not step those that are, or the algorithm does not
            take this number of replicas or these shards.
        UnsupportedError: A parameter is not sharded, or offloaded, or a tensor of another class; or modules have
            different replicas.
    """
    shards = shards_of(model, units)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ArrayError(f"{NAME}: replicas is {algorithm}, but the model has no parameter to train")
    replicas = {tuple(dist.get_process_group_ranks(unit.replicas)) for unit in units if unit.replicas is not None}
    problems = [f"modules have replicas on different ranks: {sorted(replicas)}"] * (len(replicas) > 1)
    problems += [
        f"{name!r} is trained, but not sharded, so that nothing would exchange it"
        for name in trained.keys() - shards.keys()
    ]
    for unit in units:
        for name, shard in unit.trained_shards(model).items():
            if shard.local.device != unit.device:
                problems.append(f"the shard of {name!r} is on {shard.local.device}, offloaded from {unit.device}")
            if type(shard.local) is not torch.Tensor:
                problems.append(f"the shard of {name!r} is a {type(shard.local).__name__}, not a plain tensor")
    if isinstance(algorithm.mean, Hierarchical) and algorithm.mean.has_residual:
        problems.append("its average keeps residuals of parts that depend on nodes: leave Hierarchical out")
    if problems:
        raise UnsupportedError(f"{NAME}: replicas is {algorithm}, but {problems[0]}")
    check_optimizers(optimizers, trained, algorithm, NAME)
    (ranks,) = replicas
    check_fit(algorithm, plan_of(shards, algorithm, len(ranks)), len(ranks))


class LocalSteps:
    """The steps of the optimizers of a sharded model, and the exchanges of its shards.

    Collective. A step ends when all optimizers have stepped, or when a GradScaler has left out their steps.
    Weights that are exchanged then are in the parameters when the last of them returns.

    Args:
        comm: The ranks that keep the same shards.
        model: The model.
        units: The parameters, as they are sharded.
        algorithm: What to exchange and when.
        optimizers: All optimizers of these parameters.
    """

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        units: Sequence[Unit],
        algorithm: OuterAlgorithm,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._comm, self._units, self._optimizers = comm, units, optimizers
        self.replica = name_of_replica(comm.rank)
        """The name of this rank's replica."""
        self._shards = shards = shards_of(model, units)
        algorithm = for_shards(algorithm, shards)
        self._memory = ShardMemory(shards, plan_of(shards, algorithm, comm.size))
        callbacks = EngineCallbacks(wrote=WeakCall(self._wrote), detach=WeakCall(self.detach))
        device = next(iter(shards.values())).local.device
        self.engine = TorchEngine(comm, algorithm, self._memory, device, callbacks)
        self._stepped: set[int] = set()
        """The optimizers, by id, that have stepped in the present step."""
        self._has_begun = False
        self._was_run = False
        """Whether the model has run since the last step."""
        self._begins_anew = False
        """Whether weights become the anchors before the model runs, since other ranks have committed theirs."""
        self._others = {name: p for name, p in model.named_parameters() if name not in shards}
        """The parameters that are not trained."""
        self._hooks = [  # those of optimizers keep this object, as nobody may keep the handle
            each
            for optimizer in optimizers
            for each in (
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
                on_skipped_step(optimizer, WeakCall(self._after_step)),
            )
        ]
        self._hooks.append(register_optimizer_step_post_hook(WeakCall(self._after_any_step)))
        loading = WeakCall(self._before_loading)
        for each in model.modules():
            self._hooks.append(each.register_load_state_dict_pre_hook(loading))  # type: ignore[no-untyped-call]
        self._unwatch = observe_forward(model, WeakCall(self._note_forward), lambda raised: None)

    def _note_forward(self) -> None:
        self._was_run |= torch.is_grad_enabled()
        if self._begins_anew:
            self._begins_anew = False
            self._memory.reclaim()
            with torch_stream(self.engine.device):
                for bucket, state in zip(self.engine.buckets, self.engine.states, strict=True):
                    bucket.flat[...] = state.anchor
            self._wrote()
            self.engine.keep_weights()

    def _wrote(self) -> None:
        """Notice that shards are new: modules that an evaluation has left gathered gather them again."""
        self._memory.note_new_weights()
        for unit in self._units:
            unit.reshard()

    def _before_loading(self, *_: object) -> None:
        self.engine.expect_weights()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._has_begun and not self._only_makes_state(optimizer):
            self._begin()

    def _begin(self) -> None:
        unfrozen = [name for name, parameter in self._others.items() if parameter.requires_grad]
        if unfrozen:
            raise ArrayError(
                f"{NAME}: {unfrozen[0]!r} was frozen when attach was called, and is trained now, but not "
                "exchanged; close the handle, and call attach again"
            )
        self._has_begun = True
        self._memory.reclaim()
        self.engine.at(Point.FORWARD)

    def _after_any_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Raise if an optimizer has made a step that nothing counts: no replica would exchange any more."""
        if not self._was_run or self._has_begun:  # counted, or a part of one that is, or no step of training
            return
        ours = {id(shard.parameter): name for name, shard in self._shards.items()}
        stepped = [p for group in optimizer.param_groups for p in group["params"] if id(p) in ours]
        if stepped:
            raise ArrayError(
                f"{NAME}: {ours[id(stepped[0])]!r} was stepped by another optimizer ({type(optimizer).__name__}) "
                "than those that were given, whose steps are counted; close the handle, and call attach again "
                "with all optimizers"
            )

    def _only_makes_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is such a step as PyTorch's checkpoints make, so that an optimizer has its state."""
        return not self._was_run and all(group.get("lr") == 0 for group in optimizer.param_groups)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._only_makes_state(optimizer):
            return
        if not self._has_begun:  # a GradScaler has left out the step
            self._begin()
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            self._stepped.clear()
            self._has_begun = self._was_run = False
            self._memory.reclaim()
            self.engine.at(Point.BACKWARD)
            self.engine.at(Point.STEP)
            self.engine.settle()

    def checkpoint(self) -> dict[str, object]:
        """The state of the algorithm, for `torch.distributed.checkpoint`; see `outer_state`."""
        return outer_state(self.engine, self._shards, self.replica, of_this_replica)

    def engine_state(self, state: Mapping[str, object]) -> dict[str, object]:
        """What `load` takes, from the result of `checkpoint` on any mesh. Raises `ArrayError` if it is none."""
        return engine_state(self._shards, self.replica, state)

    def load(self, state: Mapping[str, object]) -> None:
        """Continue from a result of `engine_state`. Collective."""
        self.engine.load_state_tensors(state)

    def state_dict(self) -> dict[str, object]:
        """The state of the algorithm, for `elastic.run`, which gives each rank its shards."""
        return outer_state(self.engine, self._shards, _OWN)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from a commit of other ranks, whose replicas had weights of their own: from the anchors.

        Collective. Each rank may have received its shards from another replica.
        """
        self.load(engine_state(self._shards, _OWN, state))
        self._begins_anew = True

    def close(self) -> None:
        """Finish the exchanges under way, and close the engine. Parameters stay in their memory.

        Collective.
        """
        self.detach()
        self.engine.close()

    def detach(self) -> None:
        """Remove all hooks. Nothing is sent to other ranks."""
        self._unwatch()
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
