"""The strategy for Lightning Fabric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bagua_comm import Algorithm, ArrayError, Communicator

from ..ddp.wrapper import DistributedDataParallel
from ..process_group import provide_group
from .packages import FABRICS, Package, new_strategy
from .strategy import KEY, RankStrategy, gather_states, load_states, make_equal

if TYPE_CHECKING:
    from lightning.fabric.strategies import ParallelStrategy as _FabricBase
else:
    _FabricBase = object


class BaguaFabricStrategy(RankStrategy, _FabricBase):  # type: ignore[misc]
    """A strategy for Lightning Fabric: DistributedDataParallel over any algorithm of bagua_comm.

    Collective. Start the program by mpirun, torchrun or `python -m bagua_comm run`. Set the module up together
    with its optimizers, `model, optimizer = fabric.setup(model, optimizer)`. `fabric.no_backward_sync`,
    `fabric.save` and `fabric.load` work as with Fabric's strategies. For BatchNorm over all ranks, call
    `bagua_torch.sync_batchnorm.convert(model, fabric.strategy.comm)` before.

    Where an algorithm exchanges weights, call `fabric.strategy.average_weights(model)` before evaluation;
    `fabric.save` does so.

    Args:
        algorithm: What to exchange and when; `GradientAllReduce()` if None.
        comm: The ranks; if None, the default communicator, for which `bagua_torch.connect` is called if needed.
        package: The distribution of Fabric. Needed only if the program imports both `lightning` and
            `lightning_fabric`.
        checkpoint_io: As for Fabric's strategies.
        precision: As for Fabric's strategies.
        options: Other arguments of `bagua_torch.DistributedDataParallel`, by name.

    Raises:
        UnsupportedError: Neither distribution is installed; or both are imported, and `package` is not given.
    """

    def __new__(cls, *_: object, package: Package | None = None, **__: object) -> BaguaFabricStrategy:  # noqa: D102
        return new_strategy(cls, "strategies", FABRICS, package)  # type: ignore[no-any-return]

    def __init__(
        self,
        algorithm: Algorithm | None = None,
        *,
        comm: Communicator | None = None,
        package: Package | None = None,
        checkpoint_io: object = None,
        precision: object = None,
        **options: Any,
    ) -> None:
        found = self._join(FABRICS, algorithm, comm, options)
        super().__init__(checkpoint_io=checkpoint_io, precision=precision, **found)
        self._backward_sync_control = NoBackwardSync()

    def setup_environment(self) -> None:
        """Set up the device and torch.distributed. Collective."""
        self.set_world_ranks()
        super().setup_environment()
        provide_group(self.comm)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], scheduler: object = None
    ) -> tuple[nn.Module, Sequence[torch.optim.Optimizer], object]:
        """Wrap the module with its optimizers. Collective."""
        return self._wrap(module, optimizers), optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap the module without optimizers; algorithms that depend on steps refuse this. Collective."""
        try:
            return self._wrap(module, [])
        except ArrayError as exc:
            raise ArrayError(f"{exc}. In Fabric: model, optimizer = fabric.setup(model, optimizer)") from exc

    def module_to_device(self, module: nn.Module) -> None:
        """Move the module to this rank's device."""
        module.to(self.root_device)

    def average_weights(self, module: nn.Module) -> None:
        """Average weights that differ between ranks, before evaluation; `module` is the result of `fabric.setup`.

        Collective. Buffers become rank 0's.

        Raises:
            ArrayError: `module` is not a result of `fabric.setup`.
        """
        wrapper = next((part for part in module.modules() if isinstance(part, DistributedDataParallel)), None)
        if wrapper is None:
            raise ArrayError(
                f"average_weights: this {type(module).__name__} was not set up here; give fabric.setup's result"
            )
        make_equal(wrapper)
        wrapper.resume()

    # Checkpoints ------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, object]:
        """The state of the plain module; weights that differ between ranks are averaged first. Collective."""
        if isinstance(module, DistributedDataParallel):
            self.average_weights(module)
            module = module.module
        return super().get_module_state_dict(module)  # type: ignore[no-any-return]

    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, object], strict: bool = True
    ) -> None:
        """Load the state of the plain module."""
        plain = module.module if isinstance(module, DistributedDataParallel) else module
        super().load_module_state_dict(plain, state_dict, strict=strict)

    def save_checkpoint(
        self, path: object, state: dict[str, object], storage_options: object = None, **options: object
    ) -> None:
        """Write a checkpoint on rank 0, with the algorithm's state of every rank. Collective."""
        wrappers = {name: part for name, part in state.items() if isinstance(part, DistributedDataParallel)}
        for wrapper in wrappers.values():
            self.average_weights(wrapper)  # before its state is taken
        kept = {name: gather_states(wrapper) for name, wrapper in wrappers.items()}
        kept = {name: ranks for name, ranks in kept.items() if ranks}
        if kept:
            state = {**state, KEY: kept}
        super().save_checkpoint(path, state, storage_options=storage_options, **options)

    def load_checkpoint(
        self, path: object, state: object = None, strict: bool = True, **options: object
    ) -> dict[str, object]:
        """Load a checkpoint and the algorithm's state; return the entries that are not in `state`. Collective."""
        rest: dict[str, Any] = super().load_checkpoint(path, state, strict=strict, **options)
        if isinstance(state, dict) and state:
            kept = rest.pop(KEY, {})
            for name, part in state.items():
                if isinstance(part, DistributedDataParallel) and name in kept:
                    load_states(part, kept[name])
        return rest


class NoBackwardSync:
    """Fabric's control of gradient synchronization."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """A context in which backward passes are not averaged, if `enabled`."""
        if not enabled:
            return nullcontext()
        if not isinstance(module, DistributedDataParallel):
            raise ArrayError(
                f"no_backward_sync: the {type(module).__name__} was not set up with this strategy; give the "
                "result of fabric.setup"
            )
        return module.no_sync()
