"""Lightning's Trainer and Fabric over any algorithm of bagua_comm.

    trainer = Trainer(strategy=BaguaStrategy(ByteGrad()))
    fabric = Fabric(strategy=BaguaFabricStrategy(ByteGrad()))

mpirun, torchrun or `python -m bagua_comm run` starts the processes; a strategy asks its communicator who they
are, so `devices` and `num_nodes` need not be given.

Lightning has two distributions, `lightning` and `pytorch_lightning`, whose classes know nothing of each other. A
strategy therefore gets its base class when it is made: `BaguaStrategy(...)` is an instance of `BaguaStrategy`,
and of the ParallelStrategy of the distribution that the program has imported. `_based` does that.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from bagua_comm import Algorithm, ArrayError, Communicator, UnsupportedError
from bagua_comm.algorithms.base import exchanges_weights

from .arrays import as_array, torch_stream
from .broadcast import broadcast_tensors, map_leaves
from .ddp import DistributedDataParallel
from .layer_sync import BatchNormOverRanks
from .process_group import default, provide_group

if TYPE_CHECKING:
    from lightning.fabric.strategies import ParallelStrategy as _FabricBase
    from lightning.pytorch.strategies import ParallelStrategy as _TrainerBase
else:
    _FabricBase = _TrainerBase = object

Package: TypeAlias = Literal["lightning", "pytorch_lightning"]
"""A distribution of Lightning."""

TRAINERS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
FABRICS = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
"""Where a distribution keeps its Trainer, and its Fabric."""

KEY = "bagua"
"""Under this key, checkpoints hold what the algorithm keeps."""


class _Strategy:
    """What the strategies of Trainer and Fabric have in common: the ranks, and what they tell each other."""

    comm: Communicator
    algorithm: Algorithm | None

    def _join(
        self, homes: Mapping[str, str], algorithm: Algorithm | None, comm: Communicator | None, options: Any
    ) -> dict[str, Any]:
        """Find the ranks; returns what Lightning's base class wants to know of them. Collective."""
        self.algorithm, self._options = algorithm, options
        self.comm = comm if comm is not None else default()
        self._num_nodes = len(set(self.comm.allgather_object(self.comm.node)))
        cuda = self.comm.device is not None and torch.cuda.is_available()
        self._device = torch.device(f"cuda:{self.comm.device}") if cuda else torch.device("cpu")
        fabric = FABRICS[_package_of(type(self), homes)]
        environments = importlib.import_module(f"{fabric}.plugins.environments")
        environment = _based(_Ranks, environments.ClusterEnvironment)
        return {
            "parallel_devices": [self._device] * self.comm.local_size,
            "cluster_environment": environment(self.comm),
        }

    def _wrap(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> DistributedDataParallel:
        """The module, exchanged by the algorithm. Collective."""
        stepping = [optimizer for optimizer in optimizers if optimizer.param_groups]  # Lightning has an empty one
        return DistributedDataParallel(module, stepping, self.algorithm, comm=self.comm, **self._options)

    # What Lightning asks for ------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return self._device

    @property
    def is_distributed(self) -> bool:
        """True: every rank gets its own share of the data."""
        return True

    @property
    def num_nodes(self) -> int:
        """How many hosts the ranks are on."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, given: int) -> None:
        if given not in (1, self._num_nodes):
            raise ArrayError(
                f"{type(self).__name__}: num_nodes is {given}, but the {self.comm.size} ranks are on "
                f"{self._num_nodes} nodes; leave num_nodes out"
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How a DistributedSampler divides the data."""
        return {"num_replicas": self.comm.size, "rank": self.comm.rank}

    def _set_world_ranks(self) -> None:
        utilities = importlib.import_module("lightning_utilities.core.rank_zero")
        utilities.rank_zero_only.rank = self.comm.rank

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. Collective."""
        self.comm.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank `src`. Collective."""
        return self.comm.broadcast_object(obj, root=src)

    def _reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce a tensor over all ranks, in place; anything else is returned as it is. Collective."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        _check_group(group)
        op = _op_of(reduce_op)
        with torch_stream(tensor.device), torch.no_grad():
            values = as_array(tensor)
            self.comm.allreduce(values, out=values, op=op)
        return tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all ranks, stacked: (ranks, ...). Collective.

        With `sync_grads`, gradients flow back to the ranks that they came from.
        """
        if sync_grads:
            return super().all_gather(tensor, group, sync_grads)  # type: ignore[misc, no-any-return]
        _check_group(group)
        gathered = tensor.new_empty((self.comm.size, *tensor.shape))
        with torch_stream(tensor.device), torch.no_grad():
            self.comm.allgather(as_array(tensor.detach().contiguous()), as_array(gathered))
        return gathered


class BaguaStrategy(_Strategy, _TrainerBase):  # type: ignore[misc]
    """A strategy for Lightning's Trainer: DistributedDataParallel over any algorithm of bagua_comm.

    Collective. Start the program by mpirun, torchrun or `python -m bagua_comm run`, and pass
    `Trainer(strategy=BaguaStrategy(...))`. The Trainer's checkpoints, metrics with `sync_dist`, early stopping,
    clipping, accumulation, mixed precision and manual optimization work as with Lightning's own DDPStrategy; with
    `GradientAllReduce()` the results are the same. In manual optimization every `manual_backward` is averaged.
    `Trainer(sync_batchnorm=True)` makes each BatchNorm a `bagua_torch.SyncBatchNorm` while `fit` runs.

    Where an algorithm exchanges weights, ranks' weights differ while they train. They are averaged, and training
    goes on from the average, whenever they are looked at: before validation, and in a checkpoint, and at the end
    of `fit`. Meanwhile asynchronous averaging is stopped.

    The strategy also sets up torch.distributed (gloo, and NCCL for CUDA tensors) where nobody has, since
    torchmetrics and some callbacks use it. Gradients do not go there.

    Args:
        algorithm: What to exchange and when; `GradientAllReduce()` if None.
        comm: The ranks; if None, those that `bagua_torch.connect` found, which is called if it was not yet.
        package: The distribution whose Trainer gets this strategy. It need be given only if the program imports
            both.
        checkpoint_io: As for Lightning's own strategies.
        precision_plugin: As for Lightning's own strategies.
        options: Further arguments of `bagua_torch.DistributedDataParallel`, by name.

    Raises:
        UnsupportedError: Neither distribution is installed; or both are imported, and `package` is not given.
    """

    def __new__(cls, *_: Any, package: Package | None = None, **__: Any) -> BaguaStrategy:  # noqa: D102
        return _new(cls, "strategies", TRAINERS, package)  # type: ignore[no-any-return]

    def __init__(
        self,
        algorithm: Algorithm | None = None,
        *,
        comm: Communicator | None = None,
        package: Package | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        found = self._join(TRAINERS, algorithm, comm, options)
        super().__init__(checkpoint_io=checkpoint_io, precision_plugin=precision_plugin, **found)
        self._resting = self._failed = False

    @property
    def wrapper(self) -> DistributedDataParallel | None:
        """The wrapped module, while `fit` runs; None at other times."""
        return self.model if isinstance(self.model, DistributedDataParallel) else None

    # The beginning and the end ----------------------------------------------------------------------------

    def set_world_ranks(self) -> None:
        """Tell Lightning's loggers which rank this is."""
        self._set_world_ranks()

    def setup_environment(self) -> None:
        """Set up the device, and torch.distributed for those that use it. Collective."""
        super().setup_environment()
        provide_group(self.comm)
        home = FABRICS[_package_of(type(self), TRAINERS)]
        importlib.import_module(f"{home}.utilities.seed").reset_seed()  # as Lightning's own strategies do

    def setup(self, trainer: Any) -> None:
        """Move the module to its device, make its optimizers and wrap it. Collective."""
        self._resting = self._failed = False
        fitting = trainer.state.fn == "fit"
        sync: Any = getattr(self, "_layer_sync", None)
        if fitting and sync is not None:
            if type(sync).__name__ == "TorchSyncBatchNorm":  # what sync_batchnorm=True stands for
                sync = _based(BatchNormOverRanks, type(sync).__base__)(self.comm)
            self._layer_sync, self.model = sync, sync.apply(self.lightning_module)
        super().setup(trainer)
        module: Any = self.model
        if fitting:
            self.model = self._wrap(module, self.optimizers)
        else:
            broadcast_tensors(self.comm, [*module.parameters(), *module.buffers()])

    def model_to_device(self) -> None:
        """Move the module to this rank's device."""
        self.model.to(self.root_device)

    def on_exception(self, exception: BaseException) -> None:
        """Note that this rank leaves by an error, so that `teardown` waits for no other."""
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """End the wrapper, and leave the module to itself. Collective, except after an error."""
        wrapper = self.wrapper
        if wrapper is not None:
            self.model = self.lightning_module
            if not self._failed:
                wrapper.close()
            if self._layer_sync is not None:
                self.model = self._layer_sync.revert(self.model)
        super().teardown()

    # A training step --------------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging them."""
        with self.wrapper.no_sync() if self.wrapper is not None else nullcontext():
            yield

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """See to it that every backward pass of manual optimization is averaged. Collective."""
        if self.wrapper is not None and not self.lightning_module.automatic_optimization:
            self.wrapper.expect_backward()

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Complete a backward pass that reached no parameter on this rank. Collective."""
        if self.wrapper is not None:
            self.wrapper.end_backward()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks, in place; anything else is returned as it is. Collective."""
        return self._reduce(tensor, group, reduce_op)

    # Where weights differ between ranks ---------------------------------------------------------------------

    def _rest(self) -> None:
        """Make weights and buffers the same on all ranks, and exchange nothing. Collective."""
        if self.wrapper is not None and not self._resting:
            _make_equal(self.wrapper)
            self._resting = True

    def _go_on(self) -> None:
        if self.wrapper is not None and self._resting:
            self.wrapper.resume()
            self._resting = False

    def on_validation_start(self) -> None:
        """Make weights and buffers the same on all ranks. Collective."""
        self._rest()

    def on_validation_end(self) -> None:
        """Go on exchanging. Collective."""
        self._go_on()

    def on_train_end(self) -> None:
        """Make weights and buffers the same on all ranks. Collective."""
        self._rest()

    # Checkpoints ------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of the plain module; weights that differ between ranks are averaged first. Collective."""
        resting = self._resting
        self._rest()
        state: dict[str, Any] = super().lightning_module_state_dict()
        if not resting:
            self._go_on()
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint on rank 0, with what the algorithm keeps on every rank. Collective."""
        if self.wrapper is not None and "optimizer_states" in checkpoint:
            kept = _gather_kept(self.wrapper)
            if kept:
                checkpoint[KEY] = kept
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers, and what the algorithm keeps. Collective."""
        super().load_optimizer_state_dict(checkpoint)
        if self.wrapper is not None and KEY in checkpoint:
            _load_kept(self.wrapper, checkpoint[KEY])


class BaguaFabricStrategy(_Strategy, _FabricBase):  # type: ignore[misc]
    """A strategy for Lightning Fabric: DistributedDataParallel over any algorithm of bagua_comm.

    Collective. Start the program by mpirun, torchrun or `python -m bagua_comm run`. Set the module up together
    with its optimizers, `model, optimizer = fabric.setup(model, optimizer)`. `fabric.no_backward_sync`,
    `fabric.save` and `fabric.load` work as with Fabric's own strategies. For BatchNorm over all ranks, call
    `bagua_torch.sync_batchnorm.convert(model, fabric.strategy.comm)` before.

    Where an algorithm exchanges weights, call `fabric.strategy.average_weights(model)` before evaluation;
    `fabric.save` does it itself.

    Args:
        algorithm: What to exchange and when; `GradientAllReduce()` if None.
        comm: The ranks; if None, those that `bagua_torch.connect` found, which is called if it was not yet.
        package: The distribution whose Fabric gets this strategy; it need be given only if the program imports
            both `lightning` and `lightning_fabric`.
        checkpoint_io: As for Fabric's own strategies.
        precision: As for Fabric's own strategies.
        options: Further arguments of `bagua_torch.DistributedDataParallel`, by name.

    Raises:
        UnsupportedError: Neither distribution is installed; or both are imported, and `package` is not given.
    """

    def __new__(cls, *_: Any, package: Package | None = None, **__: Any) -> BaguaFabricStrategy:  # noqa: D102
        return _new(cls, "strategies", FABRICS, package)  # type: ignore[no-any-return]

    def __init__(
        self,
        algorithm: Algorithm | None = None,
        *,
        comm: Communicator | None = None,
        package: Package | None = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        **options: Any,
    ) -> None:
        found = self._join(FABRICS, algorithm, comm, options)
        super().__init__(checkpoint_io=checkpoint_io, precision=precision, **found)
        self._backward_sync_control = _NoSync()

    def set_world_ranks(self) -> None:
        """Tell Lightning's loggers which rank this is."""
        self._set_world_ranks()

    def setup_environment(self) -> None:
        """Set up the device, and torch.distributed for those that use it. Collective."""
        self._set_world_ranks()
        super().setup_environment()
        provide_group(self.comm)

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: Any, scheduler: Any = None) -> Any:
        """Wrap the module, with the optimizers that step it. Collective."""
        return self._wrap(module, optimizers), optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap the module; algorithms that depend on steps need its optimizers as well. Collective."""
        try:
            return self._wrap(module, [])
        except ArrayError as exc:
            raise ArrayError(f"{exc}. In Fabric: model, optimizer = fabric.setup(model, optimizer)") from exc

    def module_to_device(self, module: nn.Module) -> None:
        """Move the module to this rank's device."""
        module.to(self.root_device)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks, in place; anything else is returned as it is. Collective."""
        return self._reduce(tensor, group, reduce_op)

    def average_weights(self, module: nn.Module) -> None:
        """Average weights that differ between ranks, before evaluation; `module` is what `fabric.setup` gave.

        Collective. Buffers become rank 0's.

        Raises:
            ArrayError: `fabric.setup` did not give this module.
        """
        wrapper = next((part for part in module.modules() if isinstance(part, DistributedDataParallel)), None)
        if wrapper is None:
            raise ArrayError(
                f"average_weights: this {type(module).__name__} was not set up here; give what fabric.setup gave"
            )
        _make_equal(wrapper)
        wrapper.resume()

    # Checkpoints ------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The state of the plain module; weights that differ between ranks are averaged first. Collective."""
        if isinstance(module, DistributedDataParallel):
            self.average_weights(module)
            module = module.module
        return super().get_module_state_dict(module)  # type: ignore[no-any-return]

    def load_module_state_dict(self, module: nn.Module, state_dict: Any, strict: bool = True) -> None:
        """Load the state of the plain module."""
        plain = module.module if isinstance(module, DistributedDataParallel) else module
        super().load_module_state_dict(plain, state_dict, strict=strict)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, **options: Any
    ) -> None:
        """Write a checkpoint on rank 0, with what the algorithm keeps on every rank. Collective."""
        wrappers = {name: part for name, part in state.items() if isinstance(part, DistributedDataParallel)}
        for wrapper in wrappers.values():
            self.average_weights(wrapper)  # before its state is taken
        kept = {name: _gather_kept(wrapper) for name, wrapper in wrappers.items()}
        kept = {name: ranks for name, ranks in kept.items() if ranks}
        if kept:
            state = {**state, KEY: kept}
        super().save_checkpoint(path, state, storage_options=storage_options, **options)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, **options: Any
    ) -> dict[str, Any]:
        """Load a checkpoint, and what the algorithm keeps; returns what `state` did not ask for. Collective."""
        rest: dict[str, Any] = super().load_checkpoint(path, state, strict=strict, **options)
        if isinstance(state, dict) and state:
            kept = rest.pop(KEY, {})
            for name, part in state.items():
                if isinstance(part, DistributedDataParallel) and name in kept:
                    _load_kept(part, kept[name])
        return rest


class _NoSync:
    """What Fabric asks for when a backward pass shall not be averaged."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not enabled:
            return nullcontext()
        if not isinstance(module, DistributedDataParallel):
            raise ArrayError(
                f"no_backward_sync: the {type(module).__name__} was not set up with this strategy; give what "
                "fabric.setup returned"
            )
        return module.no_sync()


class _Ranks:
    """Lightning's ClusterEnvironment: which rank this is, as the communicator says."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return socket.gethostname()

    @property
    def main_port(self) -> int:
        raise UnsupportedError("BaguaStrategy: ranks meet by their communicator, which has no port")

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._comm.size

    def set_world_size(self, size: int) -> None:
        """The communicator knows it."""

    def global_rank(self) -> int:
        return self._comm.rank

    def set_global_rank(self, rank: int) -> None:
        """The communicator knows it."""

    def local_rank(self) -> int:
        return self._comm.local_rank

    def node_rank(self) -> int:
        return self._comm.node


# ---------------------------------------------------------------------------------------------------------
# What algorithms keep, in checkpoints
# ---------------------------------------------------------------------------------------------------------


def _make_equal(wrapper: DistributedDataParallel) -> None:
    """Average the weights, where ranks' differ, and copy rank 0's buffers; exchange nothing more. Collective."""
    if exchanges_weights(wrapper.algorithm):
        wrapper.stop()
        wrapper.average_weights()
    else:
        wrapper.copy_buffers()


def _gather_kept(wrapper: DistributedDataParallel) -> list[dict[str, Any]]:
    """On rank 0 what every rank's algorithm keeps, and its optimizers if they differ; else empty. Collective."""
    if not wrapper.keeps_state():
        return []
    mine: dict[str, Any] = {"algorithm": wrapper.get_extra_state()}
    if exchanges_weights(wrapper.algorithm):
        mine["optimizers"] = [optimizer.state_dict() for optimizer in wrapper.optimizers]
    on_host = map_leaves(mine, lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf)
    return wrapper.comm.gather_object(on_host, root=0) or []


def _load_kept(wrapper: DistributedDataParallel, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Go on from what `_gather_kept` gave; on another number of ranks, from what rank 0 had. Collective."""
    comm = wrapper.comm
    mine = ranks[comm.rank if len(ranks) == comm.size else 0]
    for optimizer, state in zip(wrapper.optimizers, mine.get("optimizers", ()), strict=False):
        optimizer.load_state_dict(state)
    wrapper.set_extra_state(mine["algorithm"])


# ---------------------------------------------------------------------------------------------------------
# Lightning's two distributions
# ---------------------------------------------------------------------------------------------------------


def _new(cls: type, module: str, homes: Mapping[str, str], package: str | None) -> Any:
    """A new object of `cls` on the ParallelStrategy of a distribution."""
    if package is not None and package not in homes:
        raise UnsupportedError(f"{cls.__name__}: package is {package!r}, expected one of {', '.join(homes)}")
    package = package if package is not None else _imported(cls.__name__, homes)
    try:
        strategies = importlib.import_module(f"{homes[package]}.{module}")
    except ImportError as exc:
        raise UnsupportedError(
            f"{cls.__name__}: {homes[package]} cannot be imported ({exc}); pip install 'bagua-comm[lightning]'"
        ) from exc
    return object.__new__(_based(cls, strategies.ParallelStrategy))


def _imported(name: str, homes: Mapping[str, str]) -> str:
    """The distribution that the program has imported; if none, one that is installed."""
    imported = [package for package, home in homes.items() if home in sys.modules]
    if len(imported) > 1:
        raise UnsupportedError(
            f"{name}: this program has imported both {' and '.join(homes.values())}; say whose the Trainer "
            f"or the Fabric is: {name}(..., package={imported[0]!r}) or package={imported[1]!r}"
        )
    return next(iter(imported or filter(_is_installed, homes)), "lightning")


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _package_of(cls: type, homes: Mapping[str, str]) -> str:
    """The distribution that `_based` has put behind a strategy."""
    modules = {base.__module__ for base in cls.__mro__}
    return next(package for package, home in homes.items() if any(m.startswith(home + ".") for m in modules))


@functools.cache
def _based(cls: type, base: type) -> type:
    """The class `cls`, with `base` behind it."""
    if issubclass(cls, base):
        return cls
    made = type(cls.__name__, (cls, base), {"__doc__": cls.__doc__, "__module__": cls.__module__})
    made.__qualname__ = cls.__qualname__
    return made


def _check_group(group: Any) -> None:
    world = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    if group is not None and group is not world:
        raise UnsupportedError(
            f"BaguaStrategy: group is {group}, expected None: it reduces over all ranks; for some of them call "
            "torch.distributed.all_reduce(tensor, group=group)"
        )


def _op_of(given: Any) -> Any:
    """Our name of a reduction: of Lightning's names, and of torch.distributed's ReduceOp."""
    name = given if isinstance(given, str) else getattr(given, "name", None) or str(given).rpartition(".")[2]
    op = {"mean": "avg", "product": "prod"}.get(name.lower(), name.lower())
    if op not in ("sum", "avg", "min", "max", "prod"):
        raise ArrayError(f"BaguaStrategy: reduce_op is {given!r}, expected mean, sum, min, max or product")
    return op
