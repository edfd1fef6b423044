"""The two tasks: their models, data, optimizers, and scores."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from .methods import FOUR_BITS, INNER, LARGEST, METHODS, STREAMING, TORCH, TORCH_ADAM, Method

Batch = tuple[Tensor, Tensor]


class Data(NamedTuple):
    """The data of a task: batches of all ranks together, and what is held out."""

    batches: Callable[[int, int], Iterator[Batch]]
    """An endless iterator over inputs and targets, from a seed and a batch size."""
    held_out: Batch
    digest: str
    """A fingerprint of the data."""


@dataclass(frozen=True)
class Task:
    """A training task: the model, its data, its optimizer, and the score of the result.

    Args:
        title: Its heading.
        data: Describes the data.
        model: Describes the model.
        load: Loads the data.
        make_model: Makes the model.
        metric: The name of the metric, with its unit.
        score: From logits and targets: one number for each target, whose mean is the metric.
        better: "higher" or "lower", whichever metric is better.
        decimals: Decimals of the metric in the table.
        relative: Whether differences are in per cent of the baseline; otherwise they are absolute, in points.
        tolerance: The largest difference to the baseline that still counts as the same.
        optimizer: Its optimizer, unless the method needs another.
        lr: The learning rate with each optimizer.
        steps: Steps of a run.
        batch_size: Samples of a rank in a step.
        compared: The methods that are trained unless others are named.
    """

    title: str
    data: str
    model: str
    load: Callable[[], Data]
    make_model: Callable[[], nn.Module]
    metric: str
    score: Callable[[Tensor, Tensor], Tensor]
    better: str
    decimals: int
    relative: bool
    tolerance: float
    optimizer: str
    lr: dict[str, float]
    steps: int
    batch_size: int
    compared: tuple[str, ...] = tuple(
        name for name in METHODS if name not in {**FOUR_BITS, **INNER, **LARGEST, **STREAMING}
    )

    def difference(self, metric: float, baseline: float) -> float:
        """The difference to the baseline, in the unit of differences."""
        return 100 * (metric / baseline - 1) if self.relative else metric - baseline

    @property
    def unit(self) -> str:
        """The unit of differences."""
        return "%" if self.relative else "points"

    def optimizer_of(self, method: Method) -> str:
        """The optimizer that a method has here."""
        return method.optimizer or self.optimizer

    def lr_of(self, method: Method) -> float:
        """The largest learning rate that a method has here."""
        return self.lr[self.optimizer_of(method)] if method.lr is None else method.lr

    def methods(self) -> dict[str, Method]:
        """The methods that make sense here.

        Adam's baseline does only where the task has another optimizer, and Muon where the model has blocks.
        """
        unsuitable = {TORCH_ADAM: self.optimizer == "adam", **dict.fromkeys(INNER, self.optimizer != "adam")}
        return {name: method for name, method in METHODS.items() if not unsuitable.get(name)}

    def compared_methods(self) -> list[str]:
        """The names of the methods that are trained unless others are named."""
        return [name for name in self.methods() if name in self.compared]

    def baseline_of(self, method: Method) -> str:
        """The method that the others are compared with."""
        return method.baseline if method.baseline in self.methods() else TORCH


def correct_percent(logits: Tensor, targets: Tensor) -> Tensor:
    return 100.0 * (logits.argmax(-1) == targets)


def nats(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.transpose(1, -1), targets, reduction="none")


MOMENTUM = 0.9
OPTIMIZERS = {
    "sgd": f"SGD with momentum {MOMENTUM:g}",
    "adam": "Adam",
    "qadam": "QAdam",
    "muon": "Muon, with AdamW for all but the matrices of blocks",
}

# Digits -----------------------------------------------------------------------------------------------


def load_digits() -> Data:
    """1,197 images to train on, in a new order for every epoch, and 600 to test with."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[:, None]
    split = train_test_split(images, digits.target, test_size=600, random_state=0, stratify=digits.target)
    train_x, test_x, train_y, test_y = map(torch.from_numpy, split)

    def batches(seed: int, size: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(train_x), generator=generator)
        while True:
            while len(order) < size:
                order = torch.cat([order, torch.randperm(len(train_x), generator=generator)])
            yield train_x[order[:size]], train_y[order[:size]]
            order = order[size:]

    return Data(batches, (test_x, test_y), _digest(images, digits.target))


def make_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 64),
        nn.Tanh(),
        nn.Linear(64, 10),
    )


# Text -------------------------------------------------------------------------------------------------

CONTEXT = 64
HELD_OUT_WINDOWS = 1024
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
"""The characters with symbols of their own; the next symbol stands for all others."""


def load_text() -> Data:
    """Windows of the sources of public one-file modules; every tenth module is held out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = [n for n in sorted(sys.stdlib_module_names) if n[0] != "_" and (library / f"{n}.py").is_file()]
    symbols = np.full(256, len(CHARACTERS), np.int64)
    symbols[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS))

    def read(modules: Sequence[str]) -> Tensor:
        text = "".join((library / f"{name}.py").read_text("utf-8") for name in modules)
        # A character that is not in ASCII becomes one "?".
        return torch.from_numpy(symbols[np.frombuffer(text.encode("ascii", "replace"), np.uint8)])

    held_out = names[9::10]
    train, test = read([name for name in names if name not in held_out]), read(held_out)

    def windows(text: Tensor, count: int, generator: torch.Generator) -> Batch:
        starts = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
        rows = text[starts + torch.arange(CONTEXT + 1)]
        return rows[:, :-1], rows[:, 1:]

    def batches(seed: int, size: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield windows(train, size, generator)

    judged = windows(test, HELD_OUT_WINDOWS, torch.Generator().manual_seed(0))
    return Data(batches, judged, _digest(train.numpy(), test.numpy()))


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each after normalization and with a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """From (n, context, width) to the same."""
        query, key, value = self.project(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class Transformer(nn.Module):
    """From (n, context) symbols to (n, context, symbols) logits of the next ones."""

    def __init__(self, symbols: int, *, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.places = nn.Embedding(CONTEXT, width)
        for embedding in (self.symbols, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.logits = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, symbols))

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        return self.logits(self.blocks(self.symbols(x) + self.places.weight[: x.shape[1]]))


def make_transformer(width: int = 96) -> nn.Module:
    return Transformer(len(CHARACTERS) + 1, width=width, layers=2, heads=4)


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


TASKS = {
    "digits": Task(
        title="Digits",
        data="scikit-learn's digits, 8 x 8: 1,197 images to train on, 600 fixed ones to test with",
        model="CNN of 2 convolutions and 2 linear layers, no BatchNorm; tanh, so that rounding does not grow",
        load=cache(load_digits),
        make_model=make_cnn,
        metric="test accuracy (%)",
        score=correct_percent,
        decimals=2,
        better="higher",
        relative=False,
        tolerance=0.5,
        optimizer="sgd",
        lr={"sgd": 0.1, "adam": 0.003, "qadam": 0.003},
        steps=400,
        batch_size=16,
    ),
    "text": Task(
        title="Text",
        data="sources of Python's standard library, about 4 MB; every tenth module held out, 1,024 windows of it",
        model="character-level transformer, 2 layers, width 96, 4 heads, context 64",
        load=cache(load_text),
        make_model=make_transformer,
        metric="validation loss (nats per character)",
        score=nats,
        decimals=4,
        better="lower",
        relative=True,
        tolerance=1.0,
        optimizer="adam",
        lr={"adam": 0.004, "qadam": 0.004},
        steps=400,
        batch_size=8,
    ),
}

ALL = tuple(TASKS)
"""The tasks that `--task all` runs."""

TASKS["gpt"] = replace(
    TASKS["text"],
    title="Text, a smaller model and more steps",
    model="character-level GPT, 2 layers, width 64, 4 heads, context 64",
    make_model=partial(make_transformer, 64),
    steps=800,
    compared=(TORCH, "bytegrad", "int4-plain", "int4", "int4-error-feedback", "int4-loco"),
)
"""Long enough to tell four bits from eight: at the end, the loss of exact averages still falls."""

for _name, _optimizer, _lr in (("digits", "adam", 0.003), ("text", "sgd", 0.2)):
    _task = TASKS[_name]
    TASKS[f"{_name}-{_optimizer}"] = replace(
        _task,
        title=f"{_task.title}, with {OPTIMIZERS[_optimizer]}",
        optimizer=_optimizer,
        lr={**_task.lr, _optimizer: _lr},
    )
