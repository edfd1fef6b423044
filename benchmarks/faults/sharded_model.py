"""The network that is trained in PyTorch, sharded by `fully_shard`, with `bagua_torch.fsdp.attach`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from bagua_comm import elastic
from bagua_torch import fsdp

from .model import ADAM_LR, Model, Steps


class ShardedModel(Model):
    """See `Model`. What depends on the ranks is made anew for each communicator."""

    def weights(self) -> list[np.ndarray]:
        """See `Model.weights`. Collective, and copies: no rank has all weights."""
        local = [parameter.to_local().detach().numpy() for parameter in self.module.parameters()]
        rows = self._comm.allgather_object(local)
        return [np.concatenate(parts) for parts in zip(*rows, strict=True)]

    def parts(self) -> dict[str, Any]:
        """See `Model.parts`; they are registered later."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """See `Model.state_dict`; steps of this model are not repeated."""
        raise NotImplementedError

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """See `Model.load_state_dict`."""
        raise NotImplementedError

    def make(self, comm: Any, state: elastic.State) -> None:
        """See `Model.make`."""
        self._comm = comm
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.module: Any = nn.Sequential(nn.Linear(64, 47), nn.ReLU(), nn.Linear(47, 10))
        fsdp.renew_group(comm)
        fully_shard(self.module[0])
        fully_shard(self.module)
        fsdp.attach(self.module, self.algorithm, comm=comm)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=ADAM_LR)
        state.register(model=self.module, optimizer=self.optimizer)

    def connect(self, comm: Any, *, init_sync: bool = True) -> Steps:
        """See `Model.connect`."""
        return ShardedSteps(self, comm)


class ShardedSteps(Steps):
    """See `Steps`."""

    def __init__(self, model: ShardedModel, comm: Any) -> None:
        self._model, self._comm = model, comm

    def take(self, step: int) -> None:
        """See `Steps.take`."""
        model = self._model
        model.optimizer.zero_grad()
        for microbatch in elastic.share(model.data.microbatches, self._comm):
            images, labels = map(torch.from_numpy, model.data.microbatch(step, microbatch))
            nn.functional.cross_entropy(model.module(images), labels).backward()
        model.optimizer.step()

    def settle(self) -> None:
        """See `Steps.settle`; a step is complete when it has been taken."""

    def close(self) -> None:
        """See `Steps.close`."""
