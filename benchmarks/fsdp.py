"""A training step of a sharded model (FSDP2): by PyTorch's communication, and by this library's.

    torchrun --nproc-per-node 4 -m benchmarks.fsdp
    python -m benchmarks.netlab run --hosts 4 --rate 200mbit --launcher torchrun -m benchmarks.fsdp

The same model is trained three times, in turn in each step: by PyTorch's all-gather and reduce-scatter over gloo,
by ours exactly, and by ours in eight bits. A step is a forward and a backward pass on a small batch, so that
communication takes most of it. The ratio to PyTorch's median is the figure to compare. `wire` is what a rank
sends in a step; PyTorch does not count its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import bagua_torch
import bagua_torch.fsdp
from bagua_comm import Communicator, Exact, Quantized

from .bench.arguments import add_json_argument, at_least
from .bench.record import begin_record, header_lines, write_json
from .bench.table import Column, Table, number
from .bench.timing import Call, measure

METHODS = {
    "PyTorch": None,
    "exact": (Exact(), Exact()),
    "eight bits": (Quantized(min_bytes=0), Quantized(min_bytes=0)),
}
"""How gradients are reduced, and parameters gathered; None for PyTorch's own."""

TABLE = Table(
    (Column("method", width=10), Column("step", "(ms)", 9), Column("ratio", width=6), Column("wire", "(B)", 11))
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the record. Collective."""
    options = parse_arguments(argv)
    torch.set_num_threads(1)
    with bagua_torch.connect(process_group=True) as comm:
        record = begin_record("FSDP2", options, comm=comm, packages=("torch",))
        record["results"] = steps(comm, options)
        if comm.rank == 0:
            print(*header_lines(record), *TABLE.header(), sep="\n")
            for result in record["results"]:
                wire = "-" if result["wire_bytes"] is None else str(result["wire_bytes"])
                print(
                    TABLE.row([result["method"], number(1e3 * result["median_s"]), number(result["ratio"]), wire])
                )
            if options.json is not None:
                write_json(options.json, record)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    positive = at_least(1)
    parser.add_argument("--width", type=positive, default=1024, help="inputs and outputs of a layer")
    parser.add_argument("--layers", type=positive, default=4, help="layers, each sharded by a call of its own")
    parser.add_argument("--batch-size", type=positive, default=4, help="samples of a rank in a step")
    parser.add_argument("-n", "--iters", type=positive, default=12, help="timed steps of each method")
    parser.add_argument("-w", "--warmup_iters", type=at_least(0), default=2, help="untimed steps before them")
    add_json_argument(parser)
    return parser.parse_args(argv)


def steps(comm: Communicator, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The median time of a step by each method, and the bytes that a rank sends in it. Collective."""
    models = {name: sharded(options) for name in METHODS}
    handles = {
        name: bagua_torch.fsdp.attach(models[name], *methods, comm=comm)
        for name, methods in METHODS.items()
        if methods is not None
    }
    x = torch.randn(options.batch_size, options.width, generator=torch.Generator().manual_seed(comm.rank))
    calls = [
        Call(run=partial(step, model, x), prepare=model.zero_grad, expected=None) for model in models.values()
    ]
    found = measure(comm, calls, barrier=comm.barrier, warmup=options.warmup_iters, iterations=options.iters)
    medians = [float(np.median(each.seconds)) for each in found]
    made = options.iters + options.warmup_iters
    sent = {name: handle.counters.total().wire_bytes // made for name, handle in handles.items()}
    for handle in handles.values():
        handle.close()
    return [
        {"method": name, "median_s": median, "ratio": median / medians[0], "wire_bytes": sent.get(name)}
        for name, median in zip(models, medians, strict=True)
    ]


def sharded(options: argparse.Namespace) -> nn.Module:
    """A stack of linear layers, each sharded."""
    layers = [nn.Sequential(nn.Linear(options.width, options.width), nn.ReLU()) for _ in range(options.layers)]
    model = nn.Sequential(*layers)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


def step(model: nn.Module, x: torch.Tensor) -> None:
    """A forward and a backward pass. Collective."""
    model(x).square().mean().backward()


if __name__ == "__main__":
    main()
