"""Training speed of models of published shapes by each algorithm, beside PyTorch's DistributedDataParallel.

    python -m bagua_comm run -n 2 -m benchmarks.training --model vgg16 --algorithms exact,bytegrad,ddp
    python -m benchmarks.netlab run --rate 1gbit -m benchmarks.training --label rate_mbit=1000 --json vgg16.json
    python -m benchmarks.training.report vgg16.json bert.json --out results/training

All algorithms train the same module on the same random data in the same processes, in turn, for several rounds:
each wraps the module, warms up, is timed for `--steps` steps, and unwraps it; then the next has its turn.
PyTorch's communicates over gloo, in a group of the same ranks. `alone` communicates nothing. Algorithms that
communicate in one of n steps are timed for a multiple of n. The learning rate is so small that weights hardly
change.

The JSON file has one of `results` for each algorithm:

    seconds            of each step, the slowest rank's; the last includes work that an algorithm leaves under way
    samples_per_s      of all ranks, by the time in which the slowest rank made the steps of a round: mean over
                       the rounds; samples_per_s_std is their standard deviation
    wire_bytes         that a rank sends in a step, mean over ranks and rounds; null where they are not counted
    overlap            with --trace-overlap, where gradients are exchanged: the time of exchanges within the
                       backward pass, divided by the shorter of the two, so that 1 is all that can be hidden. A
                       backward pass lasts from its first gradient to its last. Mean over ranks and rounds
    busy               the share of the time of the steps in which the processors of rank 0's host worked, for
                       whatever process; mean over rounds, null without Linux's /proc
    compute            of `alone`: medians of the forward pass, the backward pass, and the optimizer

A wrapper copies rank 0's weights to all ranks only where the turn before may have left different ones.
At the end of a turn the weights must be finite and, where gradients are averaged, the same on all ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn import functional

import bagua_comm
import bagua_torch
from bagua_comm import Algorithm, ArrayError, Communicator, QAdam
from bagua_comm.algorithms import from_name
from bagua_comm.arrays import Array
from bagua_comm.bucket import DEFAULT_BUCKET_BYTES
from bagua_comm.planning.tuner.grid import period_of
from bagua_comm.trace import Recorder

from ..bench.arguments import add_json_argument, at_least, comma_list, one_of, parse_size
from ..bench.named import COMPARED
from ..bench.record import begin_record, header_lines, write_json
from ..bench.report import or_dash
from ..bench.table import Column, Table, number
from ..bench.timing import Overlap, Processors, Spread
from ..bench.torch_world import gloo
from .models import MODELS, Batch, Sizes, count_parameters

LEARNING_RATE = 1e-6

ALONE = "alone"
TORCH: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp-view": {"gradient_as_bucket_view": True},
    "ddp-fp16": {},
}
"""PyTorch's DistributedDataParallel: its arguments; `ddp-fp16` has its hook that sends float16."""

ALGORITHMS: dict[str, Algorithm] = {
    **{name: algorithm for name, algorithm in COMPARED.items() if not name.startswith("diloco")},
    "bfloat16": from_name("bfloat16"),
    "qadam": from_name("qadam", warmup_steps=1),
    "diloco-8": from_name("diloco", local_steps=8),
    "diloco-8-bytes": from_name("diloco", local_steps=8, average="quantized"),
}
"""Algorithms of the library, by name, with periods and warm-ups short enough to be timed in a few steps."""

NAMES = [ALONE, *TORCH, *ALGORITHMS]

# ---------------------------------------------------------------------------------------------------
# One algorithm
# ---------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """A module that is being trained by one algorithm; see `build`."""

    model: Any
    optimizer: torch.optim.Optimizer
    settings: str
    period: int = 1
    """Steps after which communication repeats."""

    def step(self, batch: Batch) -> tuple[float, float, float]:
        """Make one training step; the seconds of its forward pass, its backward pass, and the optimizer.

        Collective.
        """
        inputs, targets = batch
        start = time.perf_counter()
        loss = functional.cross_entropy(self.model(inputs), targets)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return forward - start, backward - forward, time.perf_counter() - backward

    @property
    def engine(self) -> bagua_comm.Engine | None:
        """The engine that communicates; None without bagua_comm."""
        return self.model.engine if isinstance(self.model, bagua_torch.DistributedDataParallel) else None

    @property
    def averages_gradients(self) -> bool:
        """Whether all ranks must have the same weights."""
        if self.engine is None:
            return isinstance(self.model, nn.parallel.DistributedDataParallel)
        return self.engine.payload == "grad"

    def finish(self) -> None:
        """Wait for the exchanges of the last step, except for rounds that no step waits for. Collective."""
        if self.engine is not None:
            self.engine.settle()

    def close(self) -> None:
        """Leave the bare module. Collective."""
        if self.engine is not None:
            self.model.close()
        self.optimizer.zero_grad()
        self.model = None
        gc.collect()  # PyTorch's wrapper holds its buckets, and is in a cycle


def build(
    method: str | Algorithm,
    module: nn.Module,
    comm: Communicator,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    init_sync: bool = True,
) -> Training:
    """Have a module trained by an algorithm, or by the entry of `NAMES` with this name.

    Collective. PyTorch's own needs a default process group (`torch_world.gloo`) of the same ranks. Without
    `init_sync` the ranks have the same weights already.
    """
    algorithm = ALGORITHMS.get(method) if isinstance(method, str) else method
    if isinstance(algorithm, QAdam):
        optimizer: Any = bagua_torch.QAdamOptimizer(
            module.parameters(), lr=LEARNING_RATE, warmup_steps=algorithm.warmup_steps
        )
    else:
        # without communication no weight changes, so that equal weights stay equal for the next turn
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0 if method == ALONE else LEARNING_RATE)
    if algorithm is not None:
        model = bagua_torch.DistributedDataParallel(
            module, [optimizer], algorithm, comm=comm, bucket_bytes=bucket_bytes, init_sync=init_sync
        )
        return Training(model, optimizer, repr(algorithm), period_of(algorithm))
    if method == ALONE:
        return Training(module, optimizer, "no communication")
    arguments = TORCH[str(method)]
    ddp = nn.parallel.DistributedDataParallel(module, init_sync=init_sync, **arguments)
    settings = ", ".join(["module", *(f"{key}={value}" for key, value in arguments.items())])
    settings = f"torch.nn.parallel.DistributedDataParallel({settings})"
    if method == "ddp-fp16":
        ddp.register_comm_hook(None, fp16_compress_hook)
        settings += " with fp16_compress_hook"
    return Training(ddp, optimizer, settings)


# ---------------------------------------------------------------------------------------------------
# Timing
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """The measurements of one algorithm in one round."""

    seconds: Array
    """(p, steps, 3): for each rank and step, the forward pass, the backward pass, and the optimizer."""
    wire_bytes: float | None
    """Bytes that a rank sends in a step."""
    overlap: float | None
    busy: float | None
    """The share of the time in which the processors of rank 0's host worked."""


def time_block(comm: Communicator, training: Training, batch: Batch, *, warmup: int, steps: int) -> Block:
    """Warm up, then time `steps` steps. All ranks begin together; after that they wait only for exchanges.

    Collective.
    """
    for _ in range(warmup):
        training.step(batch)
    training.finish()
    sent = training.engine.counter.wire_bytes if training.engine else 0
    comm.barrier()
    before = Processors.now()
    seconds = np.array([training.step(batch) for _ in range(steps)])
    start = time.perf_counter()
    training.finish()
    seconds[-1, 2] += time.perf_counter() - start
    after = Processors.now()
    busy = after.busy_since(before) if before is not None and after is not None else None

    wire_bytes, overlap = np.nan, np.nan
    if training.engine is not None:
        wire_bytes = (training.engine.counter.wire_bytes - sent) / steps
        if training.averages_gradients and isinstance(comm.tracer, Recorder):
            overlap = Overlap.of(comm.tracer.spans(), steps).fraction
    table = comm.allgather(np.array([wire_bytes, overlap])).mean(axis=0)
    known = [None if math.isnan(value) else float(value) for value in table]
    return Block(comm.allgather(seconds), *known, comm.broadcast_object(busy, root=0))


@dataclass
class Samples:
    """All blocks of one algorithm."""

    settings: str
    blocks: list[Block] = field(default_factory=list)

    def row(self, batch: int) -> dict[str, Any]:
        """Their row in the JSON file."""
        by_step = np.concatenate([block.seconds for block in self.blocks], axis=1)  # (p, all steps, 3)
        seconds = by_step.sum(axis=2).max(axis=0)
        rates = [
            batch * len(block.seconds) * block.seconds.shape[1] / block.seconds.sum(axis=(1, 2)).max()
            for block in self.blocks
        ]
        spread = Spread.of(seconds)
        return {
            "settings": self.settings,
            "seconds": seconds.tolist(),
            "median_s": spread.median,
            "q1_s": spread.q1,
            "q3_s": spread.q3,
            "samples_per_s": float(np.mean(rates)),
            "samples_per_s_std": float(np.std(rates, ddof=1)) if len(rates) > 1 else 0.0,
            "wire_bytes": _mean([block.wire_bytes for block in self.blocks]),
            "overlap": _mean([block.overlap for block in self.blocks]),
            "busy": _mean([block.busy for block in self.blocks]),
        }

    def compute(self) -> dict[str, float]:
        """Medians of the parts of a step, the slowest rank's."""
        slowest = np.concatenate([block.seconds.max(axis=0) for block in self.blocks])
        return dict(
            zip(("forward_s", "backward_s", "optimizer_s"), np.median(slowest, axis=0).tolist(), strict=True)
        )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def check(comm: Communicator, name: str, module: nn.Module, *, same: bool) -> None:
    """Raise unless the weights are finite, and the same on all ranks if they should be.

    Collective.
    """
    for parameter in module.parameters():
        if same:
            comm.check_consistency(bagua_torch.as_array(parameter))
        if not comm.allreduce(np.array(parameter.isfinite().all().item(), np.uint8), op="min"):
            raise FloatingPointError(f"{name}: a weight became infinite or NaN on at least one rank")


# ---------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------

TABLE = Table(
    (
        Column("algorithm", width=22),
        Column("samples/s", "(mean)", 9),
        Column("", "(std)", 7),
        Column("step", "(s)", 8),
        Column("wire", "(B/step)", 12),
        Column("overlap", width=7),
        Column("busy", width=5),
    )
)


def parse_label(text: str) -> dict[str, Any]:
    """Names and values; values that look like integers become integers.

    >>> parse_label("hosts=4,rate_mbit=1000,link=veth")
    {'hosts': 4, 'rate_mbit': 1000, 'link': 'veth'}
    """
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and equals for name, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not a label; expected for example hosts=4,rate_mbit=1000")
    return {name: int(value) if value.isdecimal() else value for name, _, value in pairs}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; `algorithms` is a list, or None for all that the ranks allow."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=[*MODELS], default="vgg16")
    parser.add_argument(
        "--algorithms",
        type=comma_list(one_of(NAMES, "algorithm")),
        metavar="A,B",
        help=f"some of {','.join(NAMES)}; by default all that this number of ranks allows",
    )
    parser.add_argument("--steps", type=at_least(1), default=3, help="steps that are timed in each round")
    parser.add_argument("--warmup", type=at_least(1), default=2, help="untimed steps before them")
    parser.add_argument("--rounds", type=at_least(1), default=2)
    parser.add_argument("--batch", type=at_least(1), default=1, help="samples of a rank in a step")
    parser.add_argument("--image-size", type=at_least(1), default=224, metavar="PIXELS")
    parser.add_argument("--sequence", type=at_least(1), default=128, metavar="TOKENS")
    parser.add_argument("--bucket-bytes", type=parse_size, default=DEFAULT_BUCKET_BYTES, metavar="SIZE")
    parser.add_argument(
        "--label", type=parse_label, default={}, metavar="NAME=VALUE,...", help="copied into each row"
    )
    parser.add_argument(
        "--trace-overlap", action="store_true", help="trace, and say how much of the exchanges is hidden"
    )
    add_json_argument(parser)
    options = parser.parse_args(argv)
    if "qadam" in (options.algorithms or NAMES) and options.warmup <= 1:
        parser.error("--warmup must be more than 1 for qadam, whose own first step is not like the others")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parse_arguments(argv)
    torch.set_num_threads(1)
    # PyTorch's own, about convolutions of kernel size 1.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    with bagua_comm.connect(trace=options.trace_overlap) as comm, gloo(comm):
        return run(comm, options)


def run(comm: Communicator, options: argparse.Namespace) -> int:
    """Train by all algorithms in turn; print the times, and write them after every round.

    Collective.
    """
    left_out = {} if options.algorithms else unsuitable(comm.size)
    names = options.algorithms or [name for name in NAMES if name not in left_out]
    described = MODELS[options.model]
    torch.manual_seed(0)
    module = described.make()
    batch = described.make_batch(Sizes(options.batch, options.image_size, options.sequence), seed=comm.rank)
    record = begin_record("training", options, comm=comm, packages=["torch"])
    about = {
        "model": options.model,
        "samples": described.samples,
        "parameters": count_parameters(module),
        "model_bytes": sum(parameter.nbytes for parameter in module.parameters()),
        "hosts": comm.size // comm.local_size,
        "ranks_per_host": comm.local_size,
        "rate_mbit": None,
        "batch": options.batch,
        **options.label,
    }
    say = print if comm.rank == 0 else _say_nothing
    say(*header_lines(record), *(f"# left out  : {name}: {why}" for name, why in left_out.items()), sep="\n")
    samples: dict[str, Samples] = {}
    alike = False
    for number_of_round in range(options.rounds):
        say(f"# round {number_of_round + 1}", *TABLE.header(), sep="\n", flush=True)
        for name in names:
            block, settings, alike = one_turn(comm, name, module, batch, options, alike=alike)
            mine = samples.setdefault(name, Samples(settings))
            mine.blocks.append(block)
            say(TABLE.row(_cells(name, mine.row(options.batch))), flush=True)
        compute = samples[ALONE].compute() if ALONE in samples else None
        record["results"] = [
            {"algorithm": name, **about, **mine.row(options.batch), "compute": compute if name == ALONE else None}
            for name, mine in samples.items()
        ]
        if options.json and comm.rank == 0:
            write_json(options.json, record)
    return 0


def one_turn(
    comm: Communicator,
    name: str,
    module: nn.Module,
    batch: Batch,
    options: argparse.Namespace,
    *,
    alike: bool,
) -> tuple[Block, str, bool]:
    """Wrap the module, time a block, and unwrap it; the block, the settings, and whether weights are alike.

    Collective. `alike` says whether all ranks have the same weights before.
    """
    training = build(name, module, comm, bucket_bytes=options.bucket_bytes, init_sync=not alike)
    with contextlib.closing(training):
        steps = math.ceil(options.steps / training.period) * training.period
        block = time_block(comm, training, batch, warmup=options.warmup, steps=steps)
        check(comm, name, module, same=training.averages_gradients)
        alike = alike if name == ALONE else training.averages_gradients
    return block, training.settings, alike


def unsuitable(size: int) -> dict[str, str]:
    """The algorithms that do not support this number of ranks, each with the reason."""
    reasons = {}
    for name, algorithm in ALGORITHMS.items():
        try:
            algorithm.check_size(size)
        except ArrayError as exc:
            reasons[name] = str(exc)
    return reasons


def _say_nothing(*_: object, **__: object) -> None:
    pass


def _cells(name: str, row: dict[str, Any]) -> list[str]:
    return [
        name,
        number(row["samples_per_s"]),
        number(row["samples_per_s_std"]),
        f"{row['median_s']:.4f}",
        or_dash(row["wire_bytes"], "{:.0f}"),
        or_dash(row["overlap"], "{:.2f}"),
        or_dash(row["busy"], "{:.2f}"),
    ]
