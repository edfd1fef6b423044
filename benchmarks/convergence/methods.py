"""The methods of the convergence benchmark: algorithms of the library, and PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bagua_comm import Algorithm, DiLoCo, GradientAllReduce, after
from bagua_comm.algorithms import from_name

TORCH, TORCH_ADAM = "torch", "torch-adam"


@dataclass(frozen=True)
class Method:
    """One row of a table.

    Args:
        title: Its name in the table.
        make: Makes the algorithm for a run of this many steps; None stands for PyTorch's DistributedDataParallel.
        family: The methods that share its colour in the figure.
        exact: Whether its result should equal that of exact averaging.
        optimizer: The optimizer that it needs; that of the task if empty.
        lr: Its largest learning rate; that of the task for its optimizer if None.
        baseline: The method that it is compared with, if the task has that.
        note: A remark below the table.
    """

    title: str
    make: Callable[[int], Algorithm | None]
    family: str
    exact: bool = False
    optimizer: str = ""
    lr: float | None = None
    baseline: str = TORCH
    note: str = ""

    def object_name(self, steps: int) -> str:
        """The method as a Python expression."""
        algorithm = self.make(steps)
        return "torch.nn.parallel.DistributedDataParallel" if algorithm is None else repr(algorithm)


def _torch(title: str, **more: Any) -> Method:
    return Method(title, lambda steps: None, "torch", **more)


def _gradients(title: str, name: str, **arguments: Any) -> Method:
    return Method(title, lambda steps: from_name(name, **arguments), "gradients, every step", exact=True)


def _weights(title: str, name: str) -> Method:
    return Method(title, lambda steps: from_name(name), "weights, with neighbours or all")


def _diloco(title: str, local_steps: int, *, note: str = "", **arguments: Any) -> Method:
    def make(steps: int) -> Algorithm:
        return from_name("diloco", local_steps=local_steps, **arguments)

    return Method(title, make, "weights, now and then", note=note)


def _mean(title: str, average: dict[str, Any]) -> Method:
    return _gradients(title, "gradient-allreduce", average=average)


def _quantized(codec: Any) -> dict[str, Any]:
    """The settings of a mean that quantizes all arrays, small ones too."""
    return {"name": "quantized", "codec": codec, "min_bytes": 0}


_MOMENTUM = (
    "DiLoCo's outer momentum of 0.9 is its paper's, for hundreds of local steps and many outer ones. "
    "With it a change that persists is taken 0.7 / (1 - 0.9) = 7 times, which runs this short cannot bear; "
    "with 0.5, 1.4 times."
)


def _feedback(codec: Any, **arguments: Any) -> dict[str, Any]:
    """The settings of a quantized mean with error feedback."""
    return {"name": "error-feedback", "inner": {"name": "quantized", "codec": codec}, **arguments}


_NOT_ROTATED = {"name": "int4", "rotate": 1}

FOUR_BITS = {
    "int4-plain": _mean("four bits, not rotated", _quantized(_NOT_ROTATED)),
    "int4": _mean("four bits, rotated", _quantized("int4")),
    "int4-stochastic": _mean(
        "four bits, rotated, stochastic", _quantized({"name": "int4", "rounding": "stochastic"})
    ),
    "int4-plain-error-feedback": _mean("four bits, not rotated, error feedback", _feedback(_NOT_ROTATED)),
    "int4-error-feedback": _mean("four bits, rotated, error feedback", _feedback("int4")),
    "int4-loco": _mean("four bits, rotated, LoCo", _feedback("int4", decay=0.8, reset_every=1024)),
}
"""Gradients of four bits. Unless algorithms are named, only the task gpt trains with them, and with some."""


def _streaming(title: str, **arguments: Any) -> Method:
    settings = {"local_steps": 30, "fragments": 4, "delay": 5, "outer_momentum": 0.5, **arguments}
    title = f"streaming DiLoCo, 30 steps, 4 fragments, {title}"
    return Method(title, lambda steps: from_name("streaming-diloco", **settings), "weights, now and then")


STREAMING = {
    "diloco-30": _diloco("DiLoCo, 30 steps", 30),
    "streaming-30-at-once": _streaming("no delay", delay=0, mix=0),
    "streaming-30": _streaming("delay 5"),
    "streaming-30-int4": _streaming(
        "delay 5, four bits", average={"name": "quantized", "codec": "int4", "min_bytes": 0}
    ),
}
"""DiLoCo at once and in fragments, for slow links; trained only if they are named."""


def _sparse(title: str, local_steps: int, **arguments: Any) -> Method:
    def make(steps: int) -> Algorithm:
        return from_name("sparseloco", local_steps=local_steps, **arguments)

    return Method(title, make, "weights, now and then")


_BOTH: dict[str, Any] = {"whole_below": 4096, "divide": "senders"}

RATES = {"adam": (0.002, 0.004, 0.008), "muon": (0.008, 0.016, 0.032)}
"""The learning rates among which each training of `INNER` has its best."""


def _inner(optimizer: str, lr: float) -> dict[str, Method]:
    """Exact averages, DiLoCo and SparseLoCo, with this optimizer in each step."""
    note = "Algorithms with a learning rate of their own are compared with exact, Adam at 0.004."
    settings: dict[str, Any] = {"optimizer": optimizer, "lr": lr, "baseline": "exact-adam-0.004", "note": note}
    ends = f"{optimizer.capitalize()} at {lr:g}"
    exact, diloco = _gradients(f"exact, {ends}", "exact"), _diloco(f"DiLoCo, 30 steps, {ends}", 30)
    return {
        f"exact-{optimizer}-{lr:g}": replace(exact, exact=False, **settings),
        f"diloco-30-{optimizer}-{lr:g}": replace(diloco, **settings),
        **{
            f"sparseloco-{count}-both-{optimizer}-{lr:g}": replace(
                _sparse(f"SparseLoCo, {count} steps, by tensor, senders, {ends}", count, **_BOTH), **settings
            )
            for count in (10, 30)
        },
    }


INNER = {
    name: method for kind, rates in RATES.items() for lr in rates for name, method in _inner(kind, lr).items()
}
"""Adam and Muon, of gradients that are averaged and between exchanges of weights; trained only if named."""


LARGEST = {
    "diloco-100-int4": _diloco("DiLoCo, 100 steps, four bits", 100, average=_quantized("int4")),
    "diloco-200-int4": _diloco("DiLoCo, 200 steps, four bits", 200, average=_quantized("int4")),
    "diloco-10-mean": _diloco("DiLoCo, 10 steps, plain mean", 10, outer_lr=1.0, outer_momentum=0.0),
    "sparseloco-10": _sparse("SparseLoCo, 10 steps", 10),
    "sparseloco-10-256": _sparse("SparseLoCo, 10 steps, 256 of 4,096", 10, keep=256),
    "sparseloco-10-float32": _sparse("SparseLoCo, 10 steps, float32", 10, bits=32),
    "sparseloco-10-whole": _sparse("SparseLoCo, 10 steps, decay 1", 10, decay=1.0),
    "sparseloco-30": _sparse("SparseLoCo, 30 steps", 30),
    "sparseloco-30-256": _sparse("SparseLoCo, 30 steps, 256 of 4,096", 30, keep=256),
    "sparseloco-30-tensors": _sparse("SparseLoCo, 30 steps, by tensor", 30, whole_below=4096),
    "sparseloco-30-senders": _sparse("SparseLoCo, 30 steps, senders", 30, divide="senders"),
    "sparseloco-30-both": _sparse("SparseLoCo, 30 steps, by tensor, senders", 30, **_BOTH),
    "sparseloco-30-192": _sparse("SparseLoCo, 30 steps, 192 of 4,096", 30, keep=192),
    "sparseloco-15-96": _sparse("SparseLoCo, 15 steps, 96 of 4,096", 15, keep=96),
    "sparseloco-10-tensors": _sparse("SparseLoCo, 10 steps, by tensor", 10, whole_below=4096),
    "sparseloco-10-both": _sparse("SparseLoCo, 10 steps, by tensor, senders", 10, **_BOTH),
}
"""The largest changes of weights, and a dense mean of them, for as many steps; tasks train with them if named."""

METHODS = {
    TORCH: _torch("torch DDP (gloo)"),
    TORCH_ADAM: _torch("torch DDP (gloo), Adam", optimizer="adam", baseline=TORCH_ADAM),
    "exact": _gradients("exact", "exact"),
    "reproducible": _gradients("reproducible", "reproducible"),
    "bytegrad": _gradients("ByteGrad", "bytegrad"),
    "bagua": _gradients("eight bits, bagua's format", "bagua"),
    "float16": _gradients("float16", "float16"),
    "bfloat16": _gradients("bfloat16", "bfloat16"),
    **FOUR_BITS,
    "hierarchical": _gradients("hierarchical, eight bits", "hierarchical-bytes"),
    "error-feedback": _gradients("eight bits, error feedback", "error-feedback"),
    "qadam": Method(
        "QAdam",
        lambda steps: from_name("qadam", warmup_steps=max(1, steps // 5)),
        "gradients, every step",
        exact=True,
        optimizer="qadam",
        baseline=TORCH_ADAM,
    ),
    "decentralized-all": _weights("decentralized, all", "decentralized"),
    "shift-one": _weights("decentralized, shift one", "shift-one"),
    "one-peer": _weights("decentralized, one peer", "one-peer"),
    "shift-one-every-4": _weights("shift one, every 4 steps", "shift-one-every-4"),
    "low-precision-ring": _weights("low precision, ring", "low-precision-ring"),
    "low-precision-one-peer": _weights("low precision, one peer", "low-precision-one-peer"),
    "async": Method(
        "asynchronous",
        lambda steps: from_name("async", interval_s=0.05, warmup_steps=max(1, steps // 10)),
        "weights, now and then",
        note="How often asynchronous averages happen, and so its bytes, depends on how long steps take here.",
    ),
    "diloco-10": _diloco("DiLoCo, 10 steps", 10),
    "diloco-50": _diloco("DiLoCo, 50 steps", 50),
    "diloco-100": _diloco("DiLoCo, 100 steps", 100),
    "diloco-10-bytes": _diloco("DiLoCo, 10 steps, eight bits", 10, average="quantized"),
    "diloco-100-bytes": _diloco("DiLoCo, 100 steps, eight bits", 100, average="quantized"),
    "diloco-100-mean": _diloco("DiLoCo, 100 steps, plain mean", 100, outer_lr=1.0, outer_momentum=0.0),
    "exact-diloco-100": Method(
        "exact, then DiLoCo, 100 steps",
        lambda steps: after(max(1, steps // 4), GradientAllReduce(), DiLoCo(100)),
        "weights, now and then",
    ),
    **STREAMING,
    "diloco-10-momentum": _diloco("DiLoCo, 10 steps, momentum 0.9", 10, note=_MOMENTUM, outer_momentum=0.9),
    "diloco-100-momentum": _diloco("DiLoCo, 100 steps, momentum 0.9", 100, note=_MOMENTUM, outer_momentum=0.9),
    **LARGEST,
    **INNER,
}
"""The methods: algorithms of the library, with settings for short runs, and PyTorch's own."""
