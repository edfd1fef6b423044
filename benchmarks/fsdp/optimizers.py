r"""A training step of a sharded model (FSDP2) with Muon, whose matrices the ranks share, and with AdamW.

    torchrun --nproc-per-node 4 -m benchmarks.fsdp.optimizers --width 256 --layers 2
    python -m benchmarks.netlab run --rate 1gbit --launcher torchrun -m benchmarks.fsdp.optimizers --model gpt \
        --layers 4 --batch-size 32

A step is a forward and a backward pass on a small batch, and the step of the optimizer. All models are gathered
and reduced exactly, by this library, and trained in turn in each step. The ratio to the median with AdamW is the
figure to compare. `wire` is what rank 0 sends in a step for the optimizer: the rows of momenta and of updates, in
two bytes an element, or in four "in float32"; "four bits back" sends updates so. The computing of Muon does not
depend on the number of samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bagua_torch
import bagua_torch.fsdp
from bagua_comm import Communicator, Exact, Int4

from ..bench.record import begin_record, header_lines, write_json
from ..bench.table import Column, Table, number
from ..bench.timing import Call, measure
from .__main__ import parse_arguments
from .models import MODELS, sharded

TABLE = Table(
    (
        Column("optimizer", width=20),
        Column("step", "(ms)", 9),
        Column("optimizer", "(ms)", 9),
        Column("ratio", width=6),
        Column("wire", "(B)", 11),
    )
)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer to which others are compared."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def muon(model: nn.Module, dtype: str = "bfloat16") -> torch.optim.Optimizer:
    """Muon of the matrices of layers; AdamW steps the rest."""

    def adam(name: str, parameter: Tensor) -> dict[str, object] | None:
        return None if name.startswith("layers.") and parameter.ndim == 2 else {}

    return bagua_torch.Muon(model.named_parameters(), adjust_lr_fn="match_rms_adamw", dtype=dtype, adam=adam)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "Muon": muon,
    "Muon, in float32": partial(muon, dtype="float32"),
    "Muon, four bits back": muon,
}

CODECS = {"Muon, four bits back": Int4()}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the record. Collective."""
    options = parse_arguments(argv)
    torch.set_num_threads(1)
    with bagua_torch.connect(process_group=True) as comm:
        record = begin_record("FSDP2 optimizers", options, comm=comm, packages=("torch",))
        record["results"] = results = steps(comm, options)
        if comm.rank == 0:
            print(*header_lines(record), *TABLE.header(), sep="\n")
            for each in results:
                times = [number(1e3 * each[key]) for key in ("median_s", "optimizer_s")]
                print(TABLE.row([each["optimizer"], *times, number(each["ratio"]), str(each["wire_bytes"])]))
            if options.json is not None:
                write_json(options.json, record)


def steps(comm: Communicator, options: Any) -> list[dict[str, Any]]:
    """The median time of a step with each optimizer, and of its part of it. Collective."""
    loss = MODELS[options.model].batch(comm.rank, options)
    handles, optimizers, calls = [], list[torch.optim.Optimizer](), []
    seconds: dict[str, list[float]] = {name: [] for name in OPTIMIZERS}
    for name, make in OPTIMIZERS.items():
        model = sharded(options, None)
        handles.append(bagua_torch.fsdp.attach(model, Exact(), Exact(), comm))
        optimizers.append(optimizer := make(model))
        if isinstance(optimizer, bagua_torch.Muon):
            optimizer.distribute(comm, codec=CODECS.get(name))
        run = partial(step, model, loss, optimizer, seconds[name])
        calls.append(Call(run=run, prepare=optimizer.zero_grad, expected=None))
    found = measure(comm, calls, barrier=comm.barrier, warmup=options.warmup_iters, iterations=options.iters)
    medians = [float(np.median(each.seconds)) for each in found]
    made = options.iters + options.warmup_iters
    sent = dict.fromkeys(OPTIMIZERS, 0)
    for name, optimizer in zip(OPTIMIZERS, optimizers, strict=True):
        if isinstance(optimizer, bagua_torch.Muon):
            sent[name] = optimizer.counters.total().wire_bytes // made
            optimizer.close()
    for handle in handles:
        handle.close()
    return [
        {
            "optimizer": name,
            "median_s": median,
            "optimizer_s": float(np.median(seconds[name][options.warmup_iters :])),
            "ratio": median / medians[0],
            "wire_bytes": sent[name],
        }
        for name, median in zip(OPTIMIZERS, medians, strict=True)
    ]


def step(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], optimizer: torch.optim.Optimizer, seconds: list[float]
) -> None:
    """A forward and a backward pass, and the optimizer's step, whose time is noted. Collective."""
    loss(model).backward()
    start = time.perf_counter()
    optimizer.step()
    seconds.append(time.perf_counter() - start)


if __name__ == "__main__":
    main()
