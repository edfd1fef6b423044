"""What benchmarks/algorithms.py compares: the algorithms, and the tasks that they train."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from bagua_comm import (
    Algorithm,
    AsyncModelAverage,
    BFloat16,
    ByteGrad,
    Decentralized,
    DiLoCo,
    ErrorFeedback,
    Float16,
    GradientAllReduce,
    Hierarchical,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    MinMaxUInt8,
    QAdam,
    Quantized,
    every,
)

# ---------------------------------------------------------------------------------------------------
# Algorithms
# ---------------------------------------------------------------------------------------------------

TORCH, TORCH_ADAM = "torch", "torch-adam"
NODES = 2
"""Labels of emulated nodes; they matter to the hierarchical average only."""


@dataclass(frozen=True)
class Method:
    """One row of a table.

    Args:
        title: What it is, for the table.
        make: The algorithm for a run of so many steps; None for PyTorch's DistributedDataParallel.
        family: How it is coloured.
        exact: Whether it should end where exact averaging does.
        optimizer: The optimizer that it needs; the task's own if empty.
        baseline: What it is compared with, where the task has that.
        note: What to say of it below the table.
    """

    title: str
    make: Callable[[int], Algorithm | None]
    family: str
    exact: bool = False
    optimizer: str = ""
    baseline: str = TORCH
    note: str = ""

    def object_name(self, steps: int) -> str:
        """What was used, in Python."""
        algorithm = self.make(steps)
        return "torch.nn.parallel.DistributedDataParallel" if algorithm is None else repr(algorithm)


def _constant(algorithm: Algorithm | None) -> Callable[[int], Algorithm | None]:
    return lambda steps: algorithm


def _gradient(title: str, average: Any = None) -> Method:
    algorithm = GradientAllReduce() if average is None else GradientAllReduce(average)
    return Method(title, _constant(algorithm), "gradients, every step", exact=True)


def _weights(title: str, algorithm: Algorithm) -> Method:
    return Method(title, _constant(algorithm), "weights, with neighbours or all")


def _diloco(title: str, algorithm: Algorithm, note: str = "") -> Method:
    return Method(title, _constant(algorithm), "weights, now and then", note=note)


_EIGHT_BITS = Quantized(MinMaxUInt8())

METHODS = {
    TORCH: Method("torch DDP (gloo)", _constant(None), "torch"),
    TORCH_ADAM: Method("torch DDP (gloo), Adam", _constant(None), "torch", optimizer="adam", baseline=TORCH_ADAM),
    "exact": _gradient("exact"),
    "bytegrad": Method("ByteGrad", _constant(ByteGrad()), "gradients, every step", exact=True),
    "bagua": _gradient("eight bits, bagua's format", Quantized(MinMaxUInt8.bagua())),
    "float16": _gradient("float16", Quantized(Float16())),
    "bfloat16": _gradient("bfloat16", Quantized(BFloat16())),
    "hierarchical": _gradient("hierarchical, eight bits", Hierarchical(_EIGHT_BITS)),
    "error-feedback": _gradient("eight bits, error feedback", ErrorFeedback(_EIGHT_BITS)),
    "qadam": Method(
        "QAdam",
        lambda steps: QAdam(warmup_steps=max(1, steps // 5)),
        "gradients, every step",
        exact=True,
        optimizer="qadam",
        baseline=TORCH_ADAM,
    ),
    "decentralized-all": _weights("decentralized, all", Decentralized("all")),
    "shift-one": _weights("decentralized, shift one", Decentralized("shift_one")),
    "one-peer": _weights("decentralized, one peer", Decentralized("one_peer_exponential")),
    "shift-one-every-4": _weights("shift one, every 4 steps", every(4, Decentralized("shift_one"))),
    "low-precision-ring": _weights("low precision, ring", LowPrecisionDecentralized()),
    "low-precision-one-peer": _weights("low precision, one peer", LowPrecisionOnePeer()),
    "async": Method(
        "asynchronous",
        lambda steps: AsyncModelAverage(interval_s=0.05, warmup_steps=max(1, steps // 10)),
        "weights, now and then",
        note="How often asynchronous averages happen, and so its bytes, depends on how long steps take here.",
    ),
    "diloco-10": _diloco("DiLoCo, 10 steps", DiLoCo(10, outer_momentum=0.5)),
    "diloco-50": _diloco("DiLoCo, 50 steps", DiLoCo(50, outer_momentum=0.5)),
    "diloco-10-bytes": _diloco(
        "DiLoCo, 10 steps, eight bits", DiLoCo(10, outer_momentum=0.5, average=_EIGHT_BITS)
    ),
    "diloco-10-momentum": _diloco(
        "DiLoCo, 10 steps, momentum 0.9",
        DiLoCo(10),
        "DiLoCo's outer momentum of 0.9 is its paper's, for hundreds of local steps and many outer ones. With it "
        "a change that persists is taken 0.7 / (1 - 0.9) = 7 times, which runs this short cannot bear; with 0.5, "
        "1.4 times.",
    ),
}

# ---------------------------------------------------------------------------------------------------
# Tasks
# ---------------------------------------------------------------------------------------------------

Batch = tuple[Tensor, Tensor]


class Data(NamedTuple):
    """What a task trains on: batches of all ranks together for a seed, and what is held out."""

    batches: Callable[[int, int], Iterator[Batch]]
    """From a seed and the size of a batch: inputs and targets, without end."""
    held_out: Batch
    digest: str
    """Tells whether two runs had the same data."""


@dataclass(frozen=True)
class Task:
    """What is trained, how, and how the result is judged."""

    title: str
    data: str
    model: str
    load: Callable[[], Data]
    make_model: Callable[[], nn.Module]
    metric: str
    score: Callable[[Tensor, Tensor], Tensor]
    """From logits and targets: one number per target, whose mean is the metric."""
    better: str
    """Which metrics are: "higher" or "lower" ones."""
    decimals: int
    """Of the metric, in the table."""
    relative: bool
    """Whether differences are in per cent of the baseline, or absolute, in points."""
    tolerance: float
    """The largest difference of what should end where the baseline does."""
    optimizer: str
    lr: dict[str, float]
    steps: int
    batch_size: int

    def difference(self, metric: float, baseline: float) -> float:
        """How far from the baseline, in the unit of differences."""
        return 100 * (metric / baseline - 1) if self.relative else metric - baseline

    @property
    def unit(self) -> str:
        """The unit of differences."""
        return "%" if self.relative else "points"

    def optimizer_of(self, method: Method) -> str:
        """The optimizer that a method has here."""
        return method.optimizer or self.optimizer

    def methods(self) -> dict[str, Method]:
        """The methods that make sense here: a baseline of its own only for another optimizer."""
        return {k: m for k, m in METHODS.items() if k != TORCH_ADAM or self.optimizer != "adam"}

    def baseline_of(self, method: Method) -> str:
        """What a method is compared with here."""
        return method.baseline if method.baseline in self.methods() else TORCH


def correct_percent(logits: Tensor, targets: Tensor) -> Tensor:
    return 100.0 * (logits.argmax(-1) == targets)


def nats(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.transpose(1, -1), targets, reduction="none")


MOMENTUM = 0.9
OPTIMIZERS = {"sgd": f"SGD with momentum {MOMENTUM:g}", "adam": "Adam", "qadam": "QAdam"}

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
"""What has a symbol of its own; the next one is all the rest."""


def load_text() -> Data:
    """Windows of the sources of public one-file modules; every tenth module is held out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = [n for n in sorted(sys.stdlib_module_names) if n[0] != "_" and (library / f"{n}.py").is_file()]
    symbols = np.full(256, len(CHARACTERS), np.int64)
    symbols[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS))

    def read(modules: Sequence[str]) -> Tensor:
        text = "".join((library / f"{name}.py").read_text("utf-8") for name in modules)
        # One "?" stands for a character that is not in ASCII.
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
    """Causal self-attention and a feed-forward network, both after normalization and around a shortcut."""

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


def make_transformer() -> nn.Module:
    return Transformer(len(CHARACTERS) + 1, width=96, layers=2, heads=4)


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
