"""The network that is trained in PyTorch, wrapped in DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from bagua_comm import elastic
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
        self._model.optimizer.zero_grad()
        if self._model.holds:
            for microbatch in self._ddp.microbatches():
                self._backward(*self._model.data.microbatch(step, microbatch))
        else:
            mine = elastic.share(MICROBATCHES, self._comm)
            parts = zip(*(self._model.data.microbatch(step, microbatch) for microbatch in mine), strict=True)
            self._backward(*map(np.concatenate, parts))
        self._model.optimizer.step()

    def _backward(self, images: np.ndarray, labels: np.ndarray) -> None:
        outputs = self._ddp(torch.from_numpy(images))
        nn.functional.cross_entropy(outputs, torch.from_numpy(labels)).backward()

    def close(self) -> None:
        """See `Steps.close`."""
        self._ddp.close()
