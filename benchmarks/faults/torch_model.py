"""The network that is trained in PyTorch, wrapped in DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from bagua_torch import DistributedDataParallel

from .training import LR, MICROBATCHES, MOMENTUM, Data, Model, Steps


class TorchModel(Model):
    """See `Model`."""

    def __init__(self, data: Data, algorithm: Any, *, alike: bool) -> None:
        super().__init__(data, algorithm, alike=alike)
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.module = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=LR, momentum=MOMENTUM)

    def weights(self) -> list[np.ndarray]:
        """See `Model.weights`."""
        return [parameter.detach().numpy() for parameter in self.module.parameters()]

    def state_dict(self) -> dict[str, Any]:
        """See `Model.state_dict`."""
        return {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """See `Model.load_state_dict`."""
        self.module.load_state_dict(saved["module"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def connect(self, comm: Any) -> Steps:
        """See `Model.connect`."""
        return TorchSteps(self, comm)


class TorchSteps(Steps):
    """See `Steps`."""

    def __init__(self, model: TorchModel, comm: Any) -> None:
        self._model, self._comm = model, comm
        self._ddp = DistributedDataParallel(model.module, [model.optimizer], model.algorithm, comm=comm)
        self.engine = self._ddp.engine

    def take(self, step: int) -> None:
        """See `Steps.take`."""
        data = self._model.data
        batches = [data.microbatch(step, i) for i in range(self._comm.rank, MICROBATCHES, self._comm.size)]
        images, labels = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*batches, strict=True))
        self._model.optimizer.zero_grad()
        nn.functional.cross_entropy(self._ddp(images), labels).backward()
        self._model.optimizer.step()

    def close(self) -> None:
        """See `Steps.close`."""
        self._ddp.close()
