"""The network that is trained in PyTorch, wrapped in DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from bagua_comm import elastic
from bagua_comm.data import PlainSampler
from bagua_torch import DistributedDataParallel, QAdamOptimizer, fuse, sync_batchnorm

from .model import ADAM_LR, IMAGES, LR, MOMENTUM, Data, Model, Steps

WARMUP_STEPS = 20
"""Warm-up steps of QAdam's optimizer; those of the algorithm."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=ADAM_LR),
    "qadam": lambda parameters: QAdamOptimizer(parameters, lr=ADAM_LR, warmup_steps=WARMUP_STEPS),
}
OPTIMIZERS |= {f"fused {name}": lambda parameters, of=of: fuse(of(parameters)) for name, of in OPTIMIZERS.items()}

BATCH = 4 * IMAGES
"""Images of a rank in a step, where they come from a sampler: 60 steps are some epochs."""


class TorchModel(Model):
    """See `Model`.

    Args:
        data: The training data.
        algorithm: The algorithm by which ranks exchange.
        alike: Whether all ranks have the same weights after each step of it.
        optimizer: One of `OPTIMIZERS`.
        extras: See `plans.Case`.
    """

    def __init__(
        self, data: Data, algorithm: Any, *, alike: bool, optimizer: str = "sgd", extras: Collection[str] = ()
    ) -> None:
        super().__init__(data, algorithm, alike=alike)
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.synchronizes = "syncbn" in extras
        """Whether batches are normalized over all ranks."""
        between = [nn.BatchNorm1d(48)] if {"batchnorm", "syncbn"} & set(extras) else []
        self.module = nn.Sequential(nn.Linear(64, 48), *between, nn.ReLU(), nn.Linear(48, 10))
        self.optimizer = OPTIMIZERS[optimizer](self.module.parameters())
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=7, enabled="scaler" in extras)
        self.sampler = PlainSampler(len(data.labels), batch_size=BATCH) if "sampler" in extras else None

    def weights(self) -> list[np.ndarray]:
        """See `Model.weights`. BatchNorm's statistics are among them."""
        return [tensor.detach().numpy() for tensor in self.module.state_dict().values()]

    def parts(self) -> dict[str, Any]:
        """See `Model.parts`."""
        parts = {"module": self.module, "optimizer": self.optimizer, "scaler": self.scaler}
        return parts if self.sampler is None else {**parts, "sampler": self.sampler}

    def state_dict(self) -> dict[str, Any]:
        """See `Model.state_dict`."""
        return {name: part.state_dict() for name, part in self.parts().items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """See `Model.load_state_dict`."""
        for name, part in self.parts().items():
            part.load_state_dict(saved[name])

    def connect(self, comm: Any, *, init_sync: bool = True) -> Steps:
        """See `Model.connect`."""
        return TorchSteps(self, comm, init_sync=init_sync)


class TorchSteps(Steps):
    """See `Steps`."""

    def __init__(self, model: TorchModel, comm: Any, *, init_sync: bool) -> None:
        self._model, self._comm = model, comm
        if model.synchronizes:
            sync_batchnorm.convert(model.module, comm)
        self._ddp = DistributedDataParallel(
            model.module, [model.optimizer], model.algorithm, comm=comm, init_sync=init_sync
        )
        self.engine = self._ddp.engine
        self._batches: Iterator[list[int]] = iter(())
        self._has_begun = False  # to take batches from the sampler

    def take(self, step: int) -> None:
        """See `Steps.take`."""
        model = self._model
        model.optimizer.zero_grad()
        if model.holds:
            for microbatch in self._ddp.microbatches():
                self._backward(*model.data.microbatch(step, microbatch))
        elif model.sampler is not None:
            batch = self._next_batch(model.sampler)
            self._backward(model.data.images[batch], model.data.labels[batch])
        else:
            mine = elastic.share(self._model.data.microbatches, self._comm)
            parts = zip(*(model.data.microbatch(step, microbatch) for microbatch in mine), strict=True)
            self._backward(*map(np.concatenate, parts))
        model.scaler.step(model.optimizer)
        model.scaler.update()

    def _next_batch(self, sampler: PlainSampler) -> list[int]:
        """This rank's batch of the next step; after an epoch comes another one."""
        batch = next(self._batches, None)
        if batch is None:
            if self._has_begun or len(sampler) == 0:  # else a part of the epoch is left
                sampler.set_epoch(sampler.epoch + 1)
            self._batches, self._has_begun = iter(sampler), True
            batch = next(self._batches)
        return batch

    def _backward(self, images: np.ndarray, labels: np.ndarray) -> None:
        outputs = self._ddp(torch.from_numpy(images))
        loss = nn.functional.cross_entropy(outputs, torch.from_numpy(labels))
        self._model.scaler.scale(loss).backward()

    def close(self) -> None:
        """See `Steps.close`."""
        self._ddp.close()
