"""How fast an optimizer steps many small tensors: fused by us, beside PyTorch's three ways in the same process.

    python -m benchmarks.fused -t 1000 -n 40 --optimizer sgd adam adamw

One step and the `zero_grad` after it are timed. "stay" keeps the gradients' memory, as DistributedDataParallel
does; "new" has a new tensor for each gradient in each step, as a plain backward pass makes them. All ways take
turns, and a ratio is the median, over the rounds, of PyTorch's time divided by ours in the same round: above 1
ours is faster. `#wrong` counts elements that differ, in any bit, from those of `foreach=False`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bagua_torch import fuse

from .bench.record import begin_record, header_lines, write_json
from .bench.table import Column, Table, number
from .bench.timing import Spread

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params, **how: torch.optim.SGD(params, lr=0.01, momentum=0.9, **how),
    "adam": lambda params, **how: torch.optim.Adam(params, lr=0.001, **how),
    "adamw": lambda params, **how: torch.optim.AdamW(params, lr=0.001, **how),
    "rmsprop": lambda params, **how: torch.optim.RMSprop(params, lr=0.001, **how),
    "adagrad": lambda params, **how: torch.optim.Adagrad(params, lr=0.001, **how),
}
WAYS: dict[str, dict[str, bool]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
"""PyTorch's implementations, by the arguments of the class."""
WITHOUT_FUSED = ("rmsprop",)

TABLE = Table(
    (
        Column("optimizer", width=10),
        Column("gradients", width=9),
        Column("ours", "(ms)", 8),
        *(Column(name, "(ms)", 8) for name in WAYS),
        *(Column(f"{name}/ours", "", 12) for name in WAYS),
        Column("#wrong", width=6),
    )
)


def main() -> None:
    """Run the benchmark."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    if hasattr(os, "sched_setaffinity") and options.threads == 1:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    record = begin_record("fused", options, packages=["torch"])
    print(*header_lines(record), *TABLE.header(), sep="\n")
    record["results"] = []
    for name in options.optimizer:
        for kind in ("stay", "new"):
            result = measured(name, kind, options)
            record["results"].append(result)
            print(TABLE.row(cells(result)), flush=True)
    if options.json:
        write_json(options.json, record)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-t", "--tensors", type=int, default=1000, help="how many parameters")
    parser.add_argument("-e", "--elements", type=int, default=64, help="elements of the largest one")
    parser.add_argument("-n", "--iters", type=int, default=40, help="rounds")
    parser.add_argument("-w", "--warmup_iters", type=int, default=5, help="rounds before")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch")
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=["sgd", "adam", "adamw"])
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser.parse_args(argv)


class Runner:
    """One way to step the parameters.

    Args:
        optimizer: Makes the optimizer of some parameters.
        options: The arguments.
    """

    def __init__(self, optimizer: Callable[[list[nn.Parameter]], Any], options: argparse.Namespace) -> None:
        generator = torch.Generator().manual_seed(0)
        sizes = torch.randint(1, options.elements + 1, (options.tensors,), generator=generator).tolist()
        self.parameters = [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
        self.optimizer = optimizer(self.parameters)
        self.seconds: list[float] = []

    def round(self, step: int, kind: str, *, last: bool) -> None:
        """Give all parameters gradients, then time a step and `zero_grad`; not the latter in the last round."""
        generator = torch.Generator().manual_seed(step)
        for p in self.parameters:
            g = torch.randn(p.shape, generator=generator)
            if p.grad is None or kind == "new":
                p.grad = g
            else:
                p.grad.copy_(g)
        began = time.perf_counter()
        self.optimizer.step()
        if not last:
            self.optimizer.zero_grad(set_to_none=kind == "new")
        self.seconds.append(time.perf_counter() - began)

    def values(self) -> torch.Tensor:
        """All parameters, concatenated."""
        return torch.cat([p.detach() for p in self.parameters])


def measured(name: str, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time all ways to make the steps of one optimizer."""
    make = OPTIMIZERS[name]
    runners = {"ours": Runner(lambda ps: fuse(make(ps, foreach=False)), options)}
    for way, how in WAYS.items():
        if way != "fused" or name not in WITHOUT_FUSED:
            runners[way] = Runner(lambda ps, how=how: make(ps, **how), options)  # type: ignore[misc]
    rounds = options.warmup_iters + options.iters
    for step in range(rounds):
        for runner in runners.values():
            runner.round(step, kind, last=step == rounds - 1)
    seconds = {way: np.array(runner.seconds[options.warmup_iters : -1]) for way, runner in runners.items()}
    wrong = (runners["ours"].values().view(torch.int32) != runners["plain"].values().view(torch.int32)).sum()
    return {
        "optimizer": name,
        "gradients": kind,
        "ms": {way: asdict(Spread.of(values * 1e3)) for way, values in seconds.items()},
        "ratio": {way: asdict(Spread.of(seconds[way] / seconds["ours"])) for way in seconds if way != "ours"},
        "wrong": int(wrong),
    }


def cells(result: dict[str, Any]) -> list[str]:
    """One row of the table."""
    ms, ratio = result["ms"], result["ratio"]
    return [
        result["optimizer"],
        result["gradients"],
        *(number(ms[way]["median"]) if way in ms else "-" for way in ("ours", *WAYS)),
        *(number(ratio[way]["median"]) if way in ratio else "-" for way in WAYS),
        str(result["wrong"]),
    ]


if __name__ == "__main__":
    main()
