"""Train a small network on scikit-learn's digits without a framework: gradients by hand, any algorithm.

    bagua run -n 3 examples/train_numpy.py --algorithm hierarchical
    python examples/train_numpy.py --algorithm low_precision_one_peer

Every rank trains on its own part of the images. `Engine` exchanges gradients or weights, depending on the
algorithm, while this program computes; the arrays are views of its buckets. CuPy arrays work in the same way.
"""

from __future__ import annotations

import argparse
import inspect
import json
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import bagua_comm
from bagua_comm import Communicator, Engine, Plan, Point, QAdam, TensorSpec, optim
from bagua_comm.algorithms import NAMED, Algorithm, from_name

Arrays = dict[str, np.ndarray]

SETTINGS: dict[str, dict[str, Any]] = {
    "async": {"interval_s": 0.01, "warmup_steps": 20},
    "diloco": {"local_steps": 10, "average": "quantized"},
    "hierarchical": {"inner": "quantized"},
    "qadam": {"warmup_steps": 50},
}
"""Settings that suit a short training; other algorithms keep their defaults."""

SHAPES = {"hidden.weight": (64, 128), "hidden.bias": (128,), "output.weight": (128, 10), "output.bias": (10,)}


NAMES = [
    name
    for name, make in NAMED.items()
    if all(parameter.default is not parameter.empty for parameter in inspect.signature(make).parameters.values())
]
"""The algorithms that need no settings."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--algorithm", default="bytegrad", metavar="NAME", help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        algorithm_of(options)
    except bagua_comm.ArrayError as exc:
        parser.error(str(exc))
    return options


def algorithm_of(options: argparse.Namespace) -> Algorithm:
    return from_name(options.algorithm, **SETTINGS.get(options.algorithm, {}))


def gradients(weight: Arrays, grad: Arrays, engine: Engine, x: np.ndarray, y: np.ndarray) -> float:
    """Write the gradients of the cross entropy into `grad`, last layer first; returns the loss."""
    hidden = np.maximum(x @ weight["hidden.weight"] + weight["hidden.bias"], 0)
    scores = hidden @ weight["output.weight"] + weight["output.bias"]
    scores -= scores.max(1, keepdims=True)
    probability = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    loss = -np.log(probability[np.arange(len(y)), y]).mean()

    delta = probability
    delta[np.arange(len(y)), y] -= 1
    delta /= len(y)
    grad["output.weight"][...] = hidden.T @ delta
    grad["output.bias"][...] = delta.sum(0)
    engine.ready("output.weight")  # this bucket may be sent while the next layer is computed
    engine.ready("output.bias")
    delta = (delta @ weight["output.weight"].T) * (hidden > 0)
    grad["hidden.weight"][...] = x.T @ delta
    grad["hidden.bias"][...] = delta.sum(0)
    engine.ready("hidden.weight")
    engine.ready("hidden.bias")
    return float(loss)


def accuracy(weight: Arrays, x: np.ndarray, y: np.ndarray) -> float:
    hidden = np.maximum(x @ weight["hidden.weight"] + weight["hidden.bias"], 0)
    return float(((hidden @ weight["output.weight"] + weight["output.bias"]).argmax(1) == y).mean())


def train(comm: Communicator, options: argparse.Namespace) -> None:
    digits = load_digits()
    order = np.random.default_rng(options.seed).permutation(len(digits.target))
    images, labels = (digits.data / 16).astype(np.float32)[order], digits.target[order]
    train_x, test_x = np.split(images, [-360])
    train_y, test_y = np.split(labels, [-360])

    # The last layer's gradients come first, so its tensors lead the plan.
    specs = [TensorSpec(name, shape, "float32") for name, shape in reversed(SHAPES.items())]
    algorithm = algorithm_of(options)
    groups = algorithm.groups(specs)  # some algorithms need certain tensors in different buckets
    plan = Plan.pack(specs, bucket_bytes=8 * 1024, alignment=32 * comm.size, groups=groups)
    weights, grads = plan.allocate(), plan.allocate()
    weight, grad = plan.cut(weights), plan.cut(grads)
    random = np.random.default_rng(options.seed)  # the same weights on all ranks
    for name, view in weight.items():
        if view.ndim == 2:
            view[...] = random.standard_normal(SHAPES[name]) * (2 / SHAPES[name][0]) ** 0.5

    adam = isinstance(algorithm, QAdam)
    optimizer = (
        optim.QAdam(lr=3e-3, warmup_steps=algorithm.warmup_steps)
        if isinstance(algorithm, QAdam)
        else optim.SGD(lr=options.lr, momentum=0.9)
    )
    states = [optimizer.init(flat) for flat in weights]
    shuffle = np.random.default_rng(options.seed + 1)
    steps = len(train_x) // (options.batch_size * comm.size)
    loss = 0.0
    with Engine(comm, algorithm, plan, {"weight": weights, "grad": grads}) as engine:
        for _ in range(options.epochs):
            mine = shuffle.permutation(len(train_x))[comm.rank :: comm.size]
            for step in range(steps):
                batch = mine[step * options.batch_size : (step + 1) * options.batch_size]
                engine.at(Point.FORWARD)
                loss = gradients(weight, grad, engine, train_x[batch], train_y[batch])
                engine.at(Point.BACKWARD)
                for i, state in enumerate(states):
                    momentum = (engine.states[i].momentum,) if adam else ()
                    optimizer.step(weights[i], grads[i], state, *momentum)
                engine.at(Point.STEP)
        engine.stop()
        sent = engine.counter
    for flat in weights:  # they differ between ranks if the algorithm exchanges weights
        comm.allreduce(flat, out=flat, op="avg")
        comm.check_consistency(flat)

    result = {
        "algorithm": options.algorithm,
        "ranks": comm.size,
        "accuracy": round(accuracy(weight, test_x, test_y), 4),
        "wire_bytes_per_step": round(sent.wire_bytes / max(1, steps * options.epochs)),
    }
    if comm.rank == 0:
        print(f"{algorithm}")
        print(f"test accuracy {result['accuracy']:.4f}, loss of the last batch {loss:.3f}")
        print(f"result: {json.dumps(result)}", flush=True)


if __name__ == "__main__":
    with bagua_comm.connect(timeout_s=120) as comm:
        train(comm, parse_arguments())
