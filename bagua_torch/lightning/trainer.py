"""The strategy for Lightning's Trainer."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from bagua_comm import Algorithm, Communicator

from ..bases import with_base
from ..ddp.wrapper import DistributedDataParallel
from ..process_group import provide_group
from ..tensors.broadcast import broadcast_tensors
from .layer_sync import BatchNormOverRanks
from .packages import FABRICS, TRAINERS, Package, new_strategy, package_of
from .strategy import KEY, RankStrategy, gather_states, load_states, make_equal

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _TrainerBase
else:
    _TrainerBase = object


class BaguaStrategy(RankStrategy, _TrainerBase):  # type: ignore[misc]
    """A strategy for Lightning's Trainer: DistributedDataParallel over any algorithm of bagua_comm.

    Collective. Start the program by mpirun, torchrun or `python -m bagua_comm run`, and pass
    `Trainer(strategy=BaguaStrategy(...))`. The Trainer's checkpoints, metrics with `sync_dist`, early stopping,
    clipping, accumulation, mixed precision and manual optimization work as with Lightning's DDPStrategy; with
    `GradientAllReduce()` the results are the same. In manual optimization every `manual_backward` is averaged.
    `Trainer(sync_batchnorm=True)` makes each BatchNorm a `bagua_torch.SyncBatchNorm` while `fit` runs.

    Where an algorithm exchanges weights, ranks' weights differ during training. They are averaged, and training
    continues from the average, before validation, in a checkpoint, and at the end of `fit`. Meanwhile
    asynchronous averaging is stopped.

    The strategy also initializes torch.distributed (gloo, and NCCL for CUDA tensors) if needed, since
    torchmetrics and some callbacks use it. Gradients are not sent by it.

    Args:
        algorithm: What to exchange and when; `GradientAllReduce()` if None.
        comm: The ranks; if None, the default communicator, for which `bagua_torch.connect` is called if needed.
        package: The distribution of the Trainer. Needed only if the program imports both.
        checkpoint_io: As for Lightning's strategies.
        precision_plugin: As for Lightning's strategies.
        options: Other arguments of `bagua_torch.DistributedDataParallel`, by name.

    Raises:
        UnsupportedError: Neither distribution is installed; or both are imported, and `package` is not given.
    """

    def __new__(cls, *_: object, package: Package | None = None, **__: object) -> BaguaStrategy:  # noqa: D102
        return new_strategy(cls, "strategies", TRAINERS, package)  # type: ignore[no-any-return]

    def __init__(
        self,
        algorithm: Algorithm | None = None,
        *,
        comm: Communicator | None = None,
        package: Package | None = None,
        checkpoint_io: object = None,
        precision_plugin: object = None,
        **options: Any,
    ) -> None:
        found = self._join(TRAINERS, algorithm, comm, options)
        super().__init__(checkpoint_io=checkpoint_io, precision_plugin=precision_plugin, **found)
        self._paused = self._failed = False

    @property
    def wrapper(self) -> DistributedDataParallel | None:
        """The wrapped module while `fit` runs, otherwise None."""
        return self.model if isinstance(self.model, DistributedDataParallel) else None

    # Setup and teardown -----------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Set up the device and torch.distributed. Collective."""
        super().setup_environment()
        provide_group(self.comm)
        home = FABRICS[package_of(type(self), TRAINERS)]
        importlib.import_module(f"{home}.utilities.seed").reset_seed()  # as Lightning's strategies do

    def setup(self, trainer: Any) -> None:
        """Move the module to its device, construct its optimizers and wrap it. Collective."""
        self._paused = self._failed = False
        fitting = trainer.state.fn == "fit"
        sync: Any = getattr(self, "_layer_sync", None)
        if fitting and sync is not None:
            if type(sync).__name__ == "TorchSyncBatchNorm":  # the value of sync_batchnorm=True
                sync = with_base(BatchNormOverRanks, type(sync).__base__)(self.comm)
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
        """Record the failure of this rank, so that `teardown` does not wait for others."""
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Close the wrapper and restore the module. Collective, except after an error."""
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
        """Average every backward pass of manual optimization. Collective."""
        if self.wrapper is not None and not self.lightning_module.automatic_optimization:
            self.wrapper.expect_backward()

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Complete a backward pass that reached no parameter on this rank. Collective."""
        if self.wrapper is not None:
            self.wrapper.end_backward()

    # Weights that differ between ranks --------------------------------------------------------------------

    def _pause(self) -> None:
        """Equalize weights and buffers of all ranks, and stop exchanges. Collective."""
        if self.wrapper is not None and not self._paused:
            make_equal(self.wrapper)
            self._paused = True

    def _resume(self) -> None:
        if self.wrapper is not None and self._paused:
            self.wrapper.resume()
            self._paused = False

    def on_validation_start(self) -> None:
        """Equalize weights and buffers of all ranks. Collective."""
        self._pause()

    def on_validation_end(self) -> None:
        """Resume exchanges. Collective."""
        self._resume()

    def on_train_end(self) -> None:
        """Equalize weights and buffers of all ranks. Collective."""
        self._pause()

    # Checkpoints ------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, object]:
        """The state of the plain module; weights that differ between ranks are averaged first. Collective."""
        paused = self._paused
        self._pause()
        state: dict[str, object] = super().lightning_module_state_dict()
        if not paused:
            self._resume()
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, object], filepath: object, storage_options: object = None
    ) -> None:
        """Write a checkpoint on rank 0, with the algorithm's state of every rank. Collective."""
        if self.wrapper is not None and "optimizer_states" in checkpoint:
            kept = gather_states(self.wrapper)
            if kept:
                checkpoint[KEY] = kept
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers and the algorithm's state. Collective."""
        super().load_optimizer_state_dict(checkpoint)
        if self.wrapper is not None and KEY in checkpoint:
            load_states(self.wrapper, checkpoint[KEY])
