"""The cost of the hooks of DistributedDataParallel: many small parameters, by ours and PyTorch's own in turn.

    python -m benchmarks.hooks
    python -m bagua_comm run -n 2 -m benchmarks.hooks --json hooks.json

A forward and a backward pass over small linear layers is timed, with new gradients in each step, as `zero_grad`
leaves it. All ways take turns of some steps, each behind a barrier; one rank stays on one core. A step has taken
as long as on the slowest rank, and the first of a turn, whose memory is cold, does not count. The figures are the
time above that of the bare module in the same round, divided by the number of parameters while all are in one
bucket; the part of it in the forward pass; and what each further bucket adds, when each parameter has a bucket of
its own. `#wrong` counts elements of gradients that differ from the mean over all ranks by more than a hundredth
of the largest.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

import bagua_comm
import bagua_torch
from bagua_comm import ByteGrad, Communicator, GradientAllReduce
from bagua_comm.arrays import Array

from .bench.arguments import add_json_argument, at_least
from .bench.record import begin_record, header_lines, write_json
from .bench.table import Column, Table, number
from .bench.timing import in_us
from .bench.torch_world import gloo

TORCH: dict[str, dict[str, Any]] = {"ddp": {}, "ddp-view": {"gradient_as_bucket_view": True}}
OURS = {"exact": GradientAllReduce(), "bytegrad": ByteGrad()}
LARGE_BYTES, SMALL_BYTES = 2**30, 1
"""Bucket sizes: one for all parameters, and one for each."""

TABLE = Table(
    (
        Column("way", width=10),
        Column("parameter", "(us)", 10),
        Column("q1", "(us)", 8),
        Column("q3", "(us)", 8),
        Column("forward", "(us)", 8),
        Column("bucket", "(us)", 8),
        Column("q1", "(us)", 8),
        Column("q3", "(us)", 8),
        Column("#wrong", width=6),
    )
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parse_arguments(argv)
    torch.set_num_threads(1)
    with bagua_comm.connect() as comm:
        if (
            hasattr(os, "sched_setaffinity") and comm.size == 1
        ):  # a process that moves between cores is slower at times
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        return run(comm, options)


def run(comm: Communicator, options: argparse.Namespace) -> int:
    """Measure, and print the results. Collective."""
    with gloo(comm):
        record = begin_record("hooks", options, comm=comm, packages=["torch"])
        record["results"] = measured(comm, options)
        if comm.rank == 0:
            print(
                *header_lines(record), *TABLE.header(), *map(TABLE.row, map(cells, record["results"])), sep="\n"
            )
            if options.json:
                write_json(options.json, record)
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-t", "--tensors", type=at_least(2), default=200, help="how many parameters")
    parser.add_argument("-e", "--elements", type=at_least(1), default=8, help="inputs and outputs of a layer")
    parser.add_argument("-n", "--iters", type=at_least(1), default=40, help="rounds")
    parser.add_argument("-s", "--steps", type=at_least(1), default=4, help="steps in each turn that count")
    parser.add_argument("-w", "--warmup_iters", type=at_least(1), default=5, help="rounds before")
    add_json_argument(parser)
    return parser.parse_args(argv)


class Runner:
    """One way to train the layers.

    Collective.

    Args:
        wrap: Makes the wrapper of the layers.
        comm: The ranks.
        options: The arguments.
    """

    def __init__(self, wrap: Callable[[nn.Module], Any], comm: Communicator, options: argparse.Namespace) -> None:
        generator = torch.Generator().manual_seed(comm.rank)
        width = options.elements
        self._comm, self._x = comm, torch.randn(4, width, generator=generator)
        layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(options.tensors)))
        for number_of_layer, parameter in enumerate(layers.parameters()):
            nn.init.orthogonal_(parameter, generator=torch.Generator().manual_seed(number_of_layer))
        self._layers, self.model = layers, wrap(layers)
        self._steps = options.steps
        self.seconds: list[list[tuple[float, float]]] = []
        """Of each round and step: the forward pass, and both passes."""

    def turn(self) -> None:
        """Time the steps of one round. Collective."""
        self.seconds.append([self._step() for _ in range(1 + self._steps)][1:])

    def _step(self) -> tuple[float, float]:
        self._layers.zero_grad()
        self._comm.barrier()
        began = time.perf_counter()
        loss = self.model(self._x).square().sum()
        forward = time.perf_counter() - began
        loss.backward()
        return forward, time.perf_counter() - began

    def gradients(self) -> Array:
        """All gradients, concatenated."""
        return np.concatenate([np.ravel(parameter.grad.numpy()) for parameter in self._layers.parameters()])


def ways() -> dict[str, Callable[[nn.Module, Communicator, int], Any]]:
    """How each wrapper is made of the layers, for the ranks and a bucket size."""

    def pytorchs(settings: dict[str, Any]) -> Callable[..., Any]:
        return lambda layers, comm, nbytes: nn.parallel.DistributedDataParallel(
            layers, bucket_cap_mb=nbytes / 2**20, **settings
        )

    def ours(algorithm: Any) -> Callable[..., Any]:
        return lambda layers, comm, nbytes: bagua_torch.DistributedDataParallel(
            layers, algorithm=algorithm, comm=comm, bucket_bytes=nbytes
        )

    return {
        **{name: pytorchs(settings) for name, settings in TORCH.items()},
        **{name: ours(algorithm) for name, algorithm in OURS.items()},
    }


def measured(comm: Communicator, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The results of all ways, by the slowest rank's times. Collective."""
    sizes = (LARGE_BYTES, SMALL_BYTES)
    bare = Runner(lambda layers: layers, comm, options)
    runners = {
        (name, nbytes): Runner(lambda layers, make=make, nbytes=nbytes: make(layers, comm, nbytes), comm, options)  # type: ignore[misc]
        for name, make in ways().items()
        for nbytes in sizes
    }
    for _ in range(options.warmup_iters + options.iters):
        for runner in (bare, *runners.values()):
            runner.turn()
    mean = comm.allreduce(bare.gradients(), op="avg")
    alone = slowest(comm, bare, options)
    results = []
    for name in ways():
        one, many = (slowest(comm, runners[name, nbytes], options) for nbytes in sizes)
        wrong = np.abs(runners[name, LARGE_BYTES].gradients() - mean) > 0.01 * np.abs(mean).max()
        results.append(
            {
                "way": name,
                "tensors": options.tensors,
                "parameter_us": in_us((one - alone)[:, 1] / options.tensors),
                "forward_us": in_us((one - alone)[:, 0] / options.tensors),
                "bucket_us": in_us((many - one)[:, 1] / (options.tensors - 1)),
                "wrong": int(comm.allreduce(np.array(wrong.sum(), np.int64))),
            }
        )
    for (name, _), runner in runners.items():
        if name in OURS:
            runner.model.close()
    return results


def slowest(comm: Communicator, runner: Runner, options: argparse.Namespace) -> Array:
    """(rounds, 2): medians over the steps of a round of the slowest rank's times. Collective."""
    return np.median(comm.allgather(np.array(runner.seconds[options.warmup_iters :])).max(axis=0), axis=1)


def cells(result: dict[str, Any]) -> list[str]:
    """One row of the table."""
    parameter, bucket = result["parameter_us"], result["bucket_us"]
    return [
        result["way"],
        *(number(parameter[key]) for key in ("median", "q1", "q3")),
        number(result["forward_us"]["median"]),
        *(number(bucket[key]) for key in ("median", "q1", "q3")),
        str(result["wrong"]),
    ]


if __name__ == "__main__":
    sys.exit(main())
