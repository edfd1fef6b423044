"""A training step of a model on a GPU that two ranks share: its time, and the overlap of its exchange.

A part of benchmarks.gpu, which starts it on 2 ranks (`world.launch`). The model has two convolutions and a
few wide linear layers. It is replicated (`exact`, `bytegrad`), and sharded by FSDP2 (`sharded exact`, and
`sharded bytes`, whose gradients are reduced in eight bits). PyTorch's own DistributedDataParallel and FSDP2
(`torch`, `sharded torch`) train the same from the same weights on the same data, over NCCL if they can. `overlap`
is read from the trace: the share of the time of exchanges that lies within a backward pass; of a sharded model,
that of its reductions. `losses` are rank 0's, one for each step.

    --device cpu    without a GPU, over gloo; only to see whether the program works
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import bagua_torch
import bagua_torch.fsdp
from bagua_comm import Algorithm, Average, Communicator, Exact, Quantized
from bagua_comm.algorithms import from_name
from bagua_comm.trace import Recorder, Span
from bagua_torch.training.spans import StageSpan

from ..bench.timing import Overlap, in_us
from .device import Hold
from .part import Results, part_parser
from .world import joined

WIDTH, LAYERS, IMAGES = 2048, 6, 256
CLASSES = 10
ALGORITHMS = ("exact", "bytegrad")
SHARDED: dict[str, Average] = {"sharded exact": Exact(), "sharded bytes": Quantized(min_bytes=0)}
SHARDED_CALLS = 3
"""Calls for each call of a replicated model, about, of a sharded one, which makes so many times fewer steps."""

REDUCTIONS = ("reduce_scatter", "quantized_reduce_scatter")
"""The names of reductions in the trace."""

WARMUP = 3
HOLD_S = 0.5


class Task:
    """The model, its data and its optimizer: the same for all algorithms; each rank has other data.

    Args:
        rank: The rank.
        shrink: By how much everything is smaller.
        device: Where it trains.
        mesh: Over these ranks each linear layer is sharded, and the rest; None for a model that is not.
    """

    backward: StageSpan | None = None
    """Times backward passes, if there is one: until the gradient of the data, which comes last."""

    def __init__(self, rank: int, shrink: int, device: str, mesh: DeviceMesh | None = None) -> None:
        torch.manual_seed(0)
        self._is_sharded = mesh is not None
        width, images = max(8, WIDTH // shrink), max(4, IMAGES // shrink)
        channels = max(4, 64 // shrink)
        linear = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.model = nn.Sequential(
            nn.Conv2d(3, channels, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(channels * 64, width),
            nn.ReLU(),
            *linear,
            nn.Linear(width, CLASSES),
        ).to(device)
        if mesh is not None:
            for each in (*(layer for layer in self.model if isinstance(layer, nn.Linear)), self.model):
                fully_shard(each, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        random = torch.Generator().manual_seed(rank)
        self.x = torch.randn(images, 3, 32, 32, generator=random).to(device)
        self.y = torch.randint(CLASSES, (images,), generator=random).to(device)

    def step(self, model: nn.Module) -> torch.Tensor:
        """One step; the loss stays on the device."""
        self.optimizer.zero_grad(set_to_none=self._is_sharded)
        x, span = self.x, self.backward
        if span is not None:
            x = x.clone().requires_grad_()
            x.register_hook(lambda _: span.end())
        loss = nn.functional.cross_entropy(model(x), self.y)
        if span is not None:
            span.begin()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def wait(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def refusing_to_wait(device: str) -> Iterator[None]:
    """In the body of `with`, PyTorch raises if a call makes the host wait for the device."""
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def timed(task: Task, model: nn.Module, device: str, steps: int, barrier: Callable[[], object]) -> dict[str, Any]:
    """Losses and times of `steps` steps, after a few to warm up. Collective."""
    losses = [task.step(model) for _ in range(WARMUP)]
    wait(device)
    barrier()
    marks = [mark(device)]
    with refusing_to_wait(device):
        for _ in range(steps):
            losses.append(task.step(model))
            marks.append(mark(device))
    wait(device)
    seconds = [between(marks[i], marks[i + 1]) for i in range(steps)]
    return {"step_us": in_us(np.array(seconds)), "losses": [float(loss) for loss in losses]}


def mark(device: str) -> Any:
    """A moment on the device that does the work, which may be the host."""
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Any, end: Any) -> float:
    """The seconds between two moments."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


# ---------------------------------------------------------------------------------------------------
# Ours
# ---------------------------------------------------------------------------------------------------


def ours(comm: Communicator, algorithm: Algorithm, options: argparse.Namespace) -> dict[str, Any]:
    """Train with one algorithm. Collective."""
    task = Task(comm.rank, options.shrink, options.device)
    with contextlib.closing(
        bagua_torch.DistributedDataParallel(task.model, [task.optimizer], algorithm, comm=comm)
    ) as model:
        result = timed(task, model, options.device, options.iterations, comm.barrier)
        result["overlap"] = overlap(spans_of(comm), options.device, options.iterations)
        result["wire_bytes_per_step"] = model.engine.counter.wire_bytes // (WARMUP + options.iterations)
        return {**result, **waits(task, model, options.device, comm)}


def ours_sharded(
    comm: Communicator, reduce: Average, group: dist.ProcessGroup, options: argparse.Namespace
) -> dict[str, Any]:
    """Train a sharded model, whose gradients are reduced by this average. Collective."""
    task = Task(comm.rank, options.shrink, options.device, DeviceMesh.from_group(group, options.device))
    task.backward = StageSpan("backward", comm.tracer, task.x.device)
    steps = steps_of_sharded(options)
    with bagua_torch.fsdp.attach(task.model, reduce, Exact(), comm) as handle:
        result = timed(task, task.model, options.device, steps, comm.barrier)
        result["overlap"] = overlap(spans_of(comm), options.device, steps, REDUCTIONS)
        result["wire_bytes_per_step"] = handle.counters.total().wire_bytes // (WARMUP + steps)
        return {**result, **waits(task, task.model, options.device, comm)}


def steps_of_sharded(options: argparse.Namespace) -> int:
    """The steps of a sharded model."""
    return max(1, int(options.iterations) // SHARDED_CALLS)


def spans_of(comm: Communicator) -> list[Span]:
    """The spans that this rank has traced."""
    assert isinstance(comm.tracer, Recorder)
    return comm.tracer.spans()


def waits(task: Task, model: nn.Module, device: str, comm: Communicator) -> dict[str, bool]:
    """Whether the host waits for nothing in a step, on a GPU. Collective."""
    if device == "cpu":
        return {}
    comm.barrier()
    held = Hold()(HOLD_S)  # on CuPy's current stream, which is PyTorch's: the default one
    task.step(model)
    found = {"host_waits_for_nothing": not held.done}
    wait(device)
    return found


def overlap(
    spans: list[Span], device: str, steps: int, exchange: Collection[str] = ("exchange",)
) -> dict[str, float]:
    """The overlap of exchanges, which are spans of these names, and backward passes in the last steps.

    >>> def span(name, thread, start, end):
    ...     return Span(name, thread, start, end, {})
    >>> found = overlap([span("backward", "main", 0, 60), span("exchange", "lane", 30, 90)], "cpu", 1)
    >>> found["exchange_within_backward"], found["backward_beside_exchange"]
    (0.5, 0.5)
    """
    on_device = [span for span in spans if span.thread.startswith("device: ") == (device == "cuda")]
    found = Overlap.of(on_device, steps, exchange)
    return {
        "backward_us_per_step": found.backward_ns / steps / 1e3,
        "exchange_us_per_step": found.exchange_ns / steps / 1e3,
        "exchanges_per_step": found.exchanges / steps,
        "exchange_within_backward": found.both_ns / found.exchange_ns if found.exchanges else 0.0,
        "backward_beside_exchange": found.both_ns / found.backward_ns if found.backward_ns else 0.0,
    }


# ---------------------------------------------------------------------------------------------------
# PyTorch's
# ---------------------------------------------------------------------------------------------------


def theirs(comm: Communicator, options: argparse.Namespace, group: dist.ProcessGroup) -> dict[str, Any]:
    """Train with PyTorch's DistributedDataParallel. Collective."""
    task = Task(comm.rank, options.shrink, options.device)
    model = nn.parallel.DistributedDataParallel(task.model, process_group=group)
    return timed(task, model, options.device, options.iterations, comm.barrier)


def theirs_sharded(comm: Communicator, options: argparse.Namespace, group: dist.ProcessGroup) -> dict[str, Any]:
    """Train with PyTorch's FSDP2. Collective."""
    task = Task(comm.rank, options.shrink, options.device, DeviceMesh.from_group(group, options.device))
    return timed(task, task.model, options.device, steps_of_sharded(options), comm.barrier)


def by_pytorch(
    results: Results, name: str, backends: Sequence[str], train: Callable[[dist.ProcessGroup], dict[str, Any]]
) -> None:
    """Train over the first of these backends that can do it. Collective."""
    for backend in backends:
        try:
            results[name] = {**train(dist.new_group(backend=backend)), "backend": backend}
            return
        except RuntimeError as exc:  # on both ranks alike: NCCL refuses GPUs that are shared
            results[f"{name} over {backend}"] = {"left_out": f"{type(exc).__name__}: {exc}"}


def main() -> None:
    """Train by every algorithm, and compare the losses."""
    parser = part_parser(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    with joined("nccl" if options.device == "cuda" else "none") as comm:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // comm.size))
        results = Results.of(options, rank=comm.rank)
        results["parameters"] = sum(p.numel() for p in Task(0, options.shrink, "cpu").model.parameters())
        backends = ["nccl", "gloo"] if options.device == "cuda" else ["gloo"]
        for name in ALGORITHMS:
            results[name] = ours(comm, from_name(name), options)
        by_pytorch(results, "torch", backends, partial(theirs, comm, options))
        group = dist.new_group(backend="gloo")  # attach makes communicators of its ranks; it is not used itself
        for name, reduce in SHARDED.items():
            with results.going_on(name):
                results[name] = ours_sharded(comm, reduce, group, options)
        by_pytorch(results, "sharded torch", backends, partial(theirs_sharded, comm, options))
        reference = np.array(results["torch"]["losses"])
        for name in (*ALGORITHMS, *SHARDED):
            losses = np.array(results[name].get("losses", []))
            if losses.size:
                difference = np.abs(losses / reference[: losses.size] - 1)
                results[f"{name} losses differ by"] = float(difference.max())
        results.end()


if __name__ == "__main__":
    main()
