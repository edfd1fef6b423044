"""The loss of a sharded transformer after equal steps, by each method, beside PyTorch's communication over gloo.

    torchrun --nproc-per-node 4 -m benchmarks.fsdp.loss --json benchmarks/results/fsdp-loss.json
    torchrun --nproc-per-node 4 -m benchmarks.fsdp.loss --seeds 0 --steps 20

The text is that of Python's standard library, by characters; every tenth module is held out (see
`benchmarks.convergence`). For one seed, all methods begin with the same weights and see the same batches in the
same order, with Adam and the same learning rates. The figure is the loss on what is held out, in nats per
character, and its difference to PyTorch's for the same seed. The record is written after every run.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import bagua_torch
from bagua_comm import Communicator

from ..bench.arguments import add_json_argument, at_least, comma_list
from ..bench.record import begin_record, header_lines, write_json
from ..bench.table import Column, Table
from ..convergence.run import learning_rate, make_optimizers
from ..convergence.tasks import CHARACTERS, Data, Transformer, load_text
from .methods import TRAINED, Method
from .use import sent_bytes

HEAD = 64
"""The width of an attention head."""

TABLE = Table(
    (
        Column("method", width=32),
        Column("loss", "(mean)", 9),
        Column("least", width=9),
        Column("most", width=9),
        Column("to PyTorch", "(%)", 11),
    )
)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, print the table, and write the record. Collective."""
    options = parser_of(__doc__).parse_args(argv)
    torch.set_num_threads(1)
    with bagua_torch.connect(process_group=True) as comm:
        results = run_all(comm, "FSDP2 loss", options, TRAINED, partial(run_once, comm, options))
        if comm.rank == 0:
            print(*TABLE.header(), *map(TABLE.row, summarize(results)), sep="\n")


def run_all(
    comm: Communicator,
    title: str,
    options: argparse.Namespace,
    methods: Mapping[str, Method],
    run: Callable[[Data, Method, int], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Train by each method from each seed, and write the record after every run; returns its results. Collective.

    Args:
        comm: All ranks.
        title: What the record is of.
        options: The arguments of the program; see `parser_of`.
        methods: By name.
        run: Trains one model by a method from a seed, and returns what was measured.
    """
    record = begin_record(title, options, comm=comm, packages=("torch",))
    data = load_text()
    record["text"] = data.digest
    results: list[dict[str, Any]] = []
    record["results"] = results
    for seed in options.seeds:
        for name, method in methods.items():
            start = time.perf_counter()
            found = run(data, method, seed)
            results.append({"method": name, "seed": seed, **found, "seconds": time.perf_counter() - start})
            if comm.rank == 0 and options.json is not None:
                write_json(options.json, record)
    if comm.rank == 0:
        print(*header_lines(record), sep="\n")
    return results


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """The arguments of a training, for a program with this docstring."""
    parser = argparse.ArgumentParser(description=(text or "").split("\n")[0])
    positive = at_least(1)
    parser.add_argument("--width", type=positive, default=256)
    parser.add_argument("--layers", type=positive, default=4, help="blocks, each sharded by a call of its own")
    parser.add_argument("--steps", type=positive, default=400)
    parser.add_argument("--batch-size", type=positive, default=4, help="windows of a rank in a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--muon-lr", type=float, default=4e-3, help="that of methods with Muon")
    parser.add_argument("--seeds", type=comma_list(at_least(0)), default=[0, 1, 2])
    parser.add_argument("--windows", type=positive, default=256, help="windows of the held-out text")
    add_json_argument(parser)
    return parser


def run_once(
    comm: Communicator,
    options: argparse.Namespace,
    data: Data,
    method: Method,
    seed: int,
    *,
    mesh: DeviceMesh | None = None,
    adam: type[torch.optim.Adam] = torch.optim.Adam,
) -> dict[str, Any]:
    """Train one model from one seed; returns its losses, and what its steps took. Collective."""
    torch.manual_seed(seed)
    symbols = len(CHARACTERS) + 1
    model = Transformer(symbols, width=options.width, layers=options.layers, heads=options.width // HEAD)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if method.muon:
        (optimizer,) = make_optimizers("muon", model, options.muon_lr, None)
    else:
        optimizer = adam(model.parameters(), lr=options.lr)
    handle = method.attach(model, comm, optimizer)
    if isinstance(optimizer, bagua_torch.Muon):
        optimizer.distribute(comm)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(learning_rate, steps=options.steps))
    batches = data.batches(seed, comm.size * options.batch_size)
    losses, sent, began = np.zeros(options.steps), sent_bytes(), time.perf_counter()
    for step in range(options.steps):
        x, y = (part.chunk(comm.size)[comm.rank] for part in next(batches))
        optimizer.zero_grad()
        with warnings.catch_warnings():  # of in-place operations on the logits, which are a view: there is none
            warnings.filterwarnings("ignore", "FSDP2-wrapped module")
            logits = model(x)
        loss = cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        losses[step] = loss.item()
    used = {"step_s": (time.perf_counter() - began) / options.steps, "waited_s": 0.0, "exchanged_bytes": 0}
    if handle is not None:
        used["waited_s"] = handle.exchanges.wait.time_ns * 1e-9 / options.steps
        used["exchanged_bytes"] = handle.exchanges.exchange.wire_bytes / options.steps
    comm.barrier()
    used["link_bytes"] = None if sent is None else ((sent_bytes() or 0) - sent) / options.steps
    with torch.no_grad():  # each rank its part of the windows
        x, y = (part[: options.windows].chunk(comm.size)[comm.rank] for part in data.held_out)
        held_out = cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
    trained = float(losses[-min(20, options.steps) :].mean())
    both = comm.allreduce(np.array([held_out, trained]), op="avg")
    if isinstance(optimizer, bagua_torch.Muon):
        optimizer.close()
    if handle is not None:
        handle.close()
    return {"held_out": float(both[0]), "training": float(both[1]), **used}


def summarize(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row for each method: mean, least and most of all seeds, and the mean difference to PyTorch."""
    by_method: dict[str, dict[int, float]] = {}
    for each in results:
        by_method.setdefault(each["method"], {})[each["seed"]] = each["held_out"]
    base = by_method["PyTorch"]
    rows = []
    for name, losses in by_method.items():
        values = list(losses.values())
        to_base = np.mean([100 * (loss / base[seed] - 1) for seed, loss in losses.items()])
        figures = (np.mean(values), min(values), max(values))
        rows.append([name, *(f"{each:.4f}" for each in figures), f"{to_base:+.2f}"])
    return rows


if __name__ == "__main__":
    main()
