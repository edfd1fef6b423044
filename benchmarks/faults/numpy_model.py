"""The network that is trained without a framework: two layers, gradients by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from bagua_comm import Engine, Plan, Point, QAdam, TensorSpec, elastic, optim

from .model import ADAM_LR, LR, MOMENTUM, Data, Model, Steps

SHAPES = {"output.bias": (10,), "output.weight": (48, 10), "hidden.bias": (48,), "hidden.weight": (64, 48)}
"""Tensors in the order of their gradients."""

ALIGNMENT = 12 * 32
"""Of buckets: they are divided among 1, 2, 3, 4 or 6 ranks, and so stay as they are when ranks die."""


class NumpyModel(Model):
    """See `Model`."""

    def __init__(self, data: Data, algorithm: Any, *, alike: bool) -> None:
        super().__init__(data, algorithm, alike=alike)
        specs = [TensorSpec(name, shape, "float32") for name, shape in SHAPES.items()]
        self.plan = Plan.pack(specs, bucket_bytes=4096, alignment=ALIGNMENT)
        self.flats, self.grads = self.plan.allocate(), self.plan.allocate()
        self.weight, self.grad = self.plan.cut(self.flats), self.plan.cut(self.grads)
        random = np.random.default_rng(0)
        for view in self.weight.values():
            if view.ndim == 2:
                view[...] = random.standard_normal(view.shape) * (2 / len(view)) ** 0.5
        adam = isinstance(algorithm, QAdam)
        self.optimizer: Any = (
            optim.QAdam(lr=ADAM_LR, warmup_steps=algorithm.warmup_steps)
            if adam
            else optim.SGD(lr=LR, momentum=MOMENTUM)
        )
        self.kept = [self.optimizer.init(flat) for flat in self.flats]

    def weights(self) -> list[np.ndarray]:
        """See `Model.weights`."""
        return self.flats

    def parts(self) -> dict[str, Any]:
        """See `Model.parts`."""
        return {"model": self}

    def state_dict(self) -> dict[str, Any]:
        """See `Model.state_dict`."""
        return {"weights": list(self.flats), "optimizer": [dict(vars(kept)) for kept in self.kept]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """See `Model.load_state_dict`."""
        for flat, value in zip(self.flats, saved["weights"], strict=True):
            flat[...] = value
        for kept, values in zip(self.kept, saved["optimizer"], strict=True):
            for name, value in values.items():
                if isinstance(value, np.ndarray):
                    getattr(kept, name)[...] = value
                else:
                    setattr(kept, name, value)

    def connect(self, comm: Any, *, init_sync: bool = True) -> Steps:
        """See `Model.connect`."""
        return NumpySteps(self, comm)

    def add_gradients(self, step: int, microbatch: int) -> None:
        """Add the gradients of the cross entropy of one microbatch to `grad`."""
        x, y = self.data.microbatch(step, microbatch)
        weight, grad = self.weight, self.grad
        hidden = np.maximum(x @ weight["hidden.weight"] + weight["hidden.bias"], 0)
        scores = hidden @ weight["output.weight"] + weight["output.bias"]
        delta = np.exp(scores - scores.max(1, keepdims=True))
        delta /= delta.sum(1, keepdims=True)
        delta[np.arange(len(y)), y] -= 1
        delta /= len(y)
        grad["output.bias"] += delta.sum(0)
        grad["output.weight"] += hidden.T @ delta
        delta = (delta @ weight["output.weight"].T) * (hidden > 0)
        grad["hidden.bias"] += delta.sum(0)
        grad["hidden.weight"] += x.T @ delta


class NumpySteps(Steps):
    """See `Steps`."""

    def __init__(self, model: NumpyModel, comm: Any) -> None:
        self._model, self._comm = model, comm
        storage = {"weight": model.flats, "grad": model.grads}
        self.engine = Engine(comm, model.algorithm, model.plan, storage)

    def take(self, step: int) -> None:
        """See `Steps.take`."""
        model, engine = self._model, self.engine
        mine = elastic.share(self._model.data.microbatches, self._comm)
        engine.at(Point.FORWARD)
        for grad in model.grads:
            grad[...] = 0
        for microbatch in mine:
            model.add_gradients(step, microbatch)
            if model.holds and microbatch != mine[-1]:
                engine.hold()
        if not model.holds:
            for grad in model.grads:
                grad /= len(mine)
        for name in model.grad:
            engine.ready(name)
        engine.at(Point.BACKWARD)
        for i, kept in enumerate(model.kept):
            momentum = (engine.states[i].momentum,) if isinstance(model.algorithm, QAdam) else ()
            model.optimizer.step(model.flats[i], model.grads[i], kept, *momentum)
        engine.at(Point.STEP)

    def close(self) -> None:
        """See `Steps.close`."""
        self.engine.close()
