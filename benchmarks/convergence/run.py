"""Results of every algorithm on two real tasks, beside PyTorch's DistributedDataParallel, and the bytes sent.

    python -m bagua_comm run -n 4 -m benchmarks.convergence --task all
    python -m bagua_comm run -n 4 -m benchmarks.convergence --task digits --algorithms torch,bytegrad --seeds 0
    python -m bagua_comm run -n 4 -m benchmarks.convergence --resume
    python -m bagua_comm run -n 4 -m benchmarks.convergence --task text,text-sgd --algorithms torch,diloco-100
    python -m bagua_comm run -n 4 -m benchmarks.convergence --task gpt --out benchmarks/results/few_bits
    python -m bagua_comm run -n 4 -m benchmarks.convergence --task text \
        --algorithms torch,exact,diloco-30,streaming-30,streaming-30-int4 --out benchmarks/results/streaming
    python -m benchmarks.netlab run --rate 50mbit --latency 50ms -m benchmarks.convergence --task text \
        --algorithms torch,exact,diloco-30,streaming-30,streaming-30-int4 --steps 90 --seeds 0 \
        --device-time 400ms --out benchmarks/results/streaming-50mbit
    python -m bagua_comm run -n 4 -m benchmarks.convergence --task digits --algorithms torch,sparseloco-10
    python -m benchmarks.convergence --report

Tasks: a CNN on scikit-learn's digits, and a character-level transformer on the text of Python's standard
library; digits-adam and text-sgd are the same with another optimizer, and gpt is a smaller transformer with more
steps, for gradients of few bits. For one seed, all algorithms begin with the same weights and see the same
batches in the same order, with the same optimizer and learning rates. All run in turn in the same processes; so
does PyTorch's, on gloo.

Ranks share the cores of this machine, so that the time of a step depends on its load. With `--device-time` each
step also sleeps so long before its forward pass, as if a device of the rank's own computed: communication may
go on meanwhile, as beside a GPU, and the load matters less.

The record goes to `--out` with the ending .json, the report with .md, and its figure with .png. The record is
written after every run; `--resume` makes the missing runs, and `--report` only writes the report, without MPI.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import bagua_comm
import bagua_torch
from bagua_comm import Communicator
from bagua_comm.algorithms.base import exchanges_weights
from bagua_comm.commands.quantities import seconds

from ..bench import RESULTS
from ..bench.arguments import add_out_argument, at_least, comma_list, one_of
from ..bench.record import NETWORK_VARIABLE, begin_record, header_lines, write_json
from ..bench.report import write_report
from ..bench.table import Column, Table, number
from ..bench.timing import allreduce_factor
from ..bench.torch_world import gloo
from .methods import METHODS, Method
from .report import NODES, draw, markdown, summarize, verdicts, waiting
from .tasks import ALL, MOMENTUM, TASKS, Batch, Task

BUCKET_BYTES = 256 * 1024
CURVE_POINTS = 40
"""The training loss of a run is kept as this many means."""

# ---------------------------------------------------------------------------------------------------
# One run
# ---------------------------------------------------------------------------------------------------


def make_optimizers(kind: str, model: nn.Module, lr: float, algorithm: Any) -> list[Any]:
    """The optimizers of this name, with their defaults; none decays the weights.

    Muon is for the matrices of hidden layers, which are those of blocks; the rest has AdamW. Its steps are as
    large as those of AdamW, so that both have the same learning rate. Where gradients are averaged, the ranks
    share its matrices.
    """
    if kind == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM)]
    if kind == "adam":
        return [torch.optim.Adam(model.parameters(), lr=lr)]
    if kind == "muon":
        return [
            bagua_torch.Muon(model.named_parameters(), lr, 0.0, adjust_lr_fn="match_rms_adamw", adam=in_no_block)
        ]
    return [bagua_torch.QAdamOptimizer(model.parameters(), lr=lr, warmup_steps=algorithm.warmup_steps)]


def in_no_block(name: str, parameter: Tensor) -> dict[str, object] | None:
    """The settings of AdamW for all parameters but matrices of blocks."""
    return None if name.startswith("blocks.") and parameter.ndim == 2 else {}


SCHEDULE = "linear warm-up over the first 10 % of the steps, then cosine to 0"


def learning_rate(step: int, steps: int) -> float:
    """The learning rate of a step, as a share of the largest.

    >>> [round(learning_rate(step, 20), 2) for step in (0, 1, 2, 10, 19)]
    [0.5, 0.99, 0.98, 0.5, 0.01]
    """
    return min(1.0, (step + 1) / max(1, steps // 10)) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))


def run_once(
    comm: Communicator, task: Task, method: Method, seed: int, steps: int, device_s: float = 0.0
) -> dict[str, Any]:
    """Train one model from one seed; returns its metric, its bytes and its losses.

    Collective.
    """
    algorithm, data = method.make(steps), task.load()
    torch.manual_seed(seed)
    model = task.make_model()
    optimizers = make_optimizers(task.optimizer_of(method), model, task.lr_of(method), algorithm)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, partial(learning_rate, steps=steps)) for each in optimizers
    ]
    if algorithm is None:
        wrapped: Any = nn.parallel.DistributedDataParallel(model)
    else:
        wrapped = bagua_torch.DistributedDataParallel(
            model, optimizers, algorithm, comm=comm, bucket_bytes=BUCKET_BYTES
        )

    shared = [
        each for each in optimizers if isinstance(each, bagua_torch.Muon) and not exchanges_weights(algorithm)
    ]
    for optimizer in shared:
        optimizer.distribute(comm)
    batches = data.batches(seed, comm.size * task.batch_size)
    losses, ended = np.empty(steps), np.zeros(steps + 1)
    comm.barrier()
    start = time.perf_counter()
    for step in range(steps):
        time.sleep(device_s)
        x, y = (part.chunk(comm.size)[comm.rank] for part in next(batches))
        loss = functional.cross_entropy(wrapped(x).flatten(0, -2), y.flatten())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        losses[step] = loss.item()
        ended[step + 1] = 0 if algorithm is None else wrapped.engine.counter.wire_bytes
    elapsed_s = time.perf_counter() - start
    waited_s = 0.0 if algorithm is None else wrapped.counters.wait.seconds

    if algorithm is None:
        sent = torch_sends(comm, model)
    else:
        wrapped.stop()
        counter = wrapped.engine.counter
        sent = {
            "payload_bytes": counter.payload_bytes / steps,
            "wire_bytes": counter.wire_bytes / steps,
            "exchanges": counter.calls / steps,
            "waited_ms": waited_s / steps * 1e3,
            "most_wire_bytes": float(np.diff(ended).max()),
        }
    if algorithm is not None and not method.exact:
        wrapped.average_weights()  # where gradients are averaged, weights are the same without it
    for parameter in model.parameters():
        comm.check_consistency(bagua_torch.as_array(parameter))
    metric = evaluate(comm, task, model, data.held_out)
    curve = comm.allreduce(losses, op="avg")
    for optimizer in shared:
        optimizer.close()
    if algorithm is not None:
        wrapped.close()
    return {
        "object": method.object_name(steps),
        "steps": steps,
        "metric": metric,
        "per_step": {**sent, "ms": elapsed_s / steps * 1e3},
        "train_loss": [round(float(part.mean()), 4) for part in np.array_split(curve, min(steps, CURVE_POINTS))],
    }


def torch_sends(comm: Communicator, model: nn.Module) -> dict[str, float | None]:
    """Bytes that a ring allreduce of the gradients sends: computed, not measured."""
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    wire = allreduce_factor(comm.size) * nbytes
    return {
        "payload_bytes": nbytes,
        "wire_bytes": wire,
        "exchanges": None,
        "waited_ms": None,
        "most_wire_bytes": wire,
    }


@torch.no_grad()
def evaluate(comm: Communicator, task: Task, model: nn.Module, held_out: Batch) -> float:
    """The metric of the weights, which are the same on all ranks: each rank judges a part of the held-out data.

    Collective.
    """
    model.eval()
    x, y = (part[comm.rank :: comm.size] for part in held_out)
    scores = task.score(model(x), y).double()
    total, count = comm.allreduce(np.array([scores.sum().item(), scores.numel()]))
    return float(total / count)


# ---------------------------------------------------------------------------------------------------
# The record
# ---------------------------------------------------------------------------------------------------


def describe(task: Task, steps: int | None, device_s: float = 0.0) -> dict[str, Any]:
    """A task in the record: everything that two runs must have in common to be compared."""
    return {
        "data": task.data,
        "digest": task.load().digest,
        "model": task.model,
        "parameters": sum(parameter.numel() for parameter in task.make_model().parameters()),
        "metric": task.metric,
        "optimizer": task.optimizer,
        "lr": task.lr,
        "schedule": SCHEDULE,
        "steps": steps or task.steps,
        "batch_size": task.batch_size,
        "bucket_bytes": BUCKET_BYTES,
        **({"device_ms": 1e3 * device_s} if device_s else {}),
    }


def resume(record: dict[str, Any], former: dict[str, Any]) -> dict[str, Any]:
    """The former record, with the tasks of the new one added.

    Raises:
        ValueError: Its ranks, versions or settings were others.
    """
    for key, were, are in (("versions", "were", "are"), ("ranks", "were", "are"), ("network", "was", "is")):
        if record.get(key) != former.get(key):
            raise ValueError(f"{key} {were} {former.get(key)}, and now {are} {record.get(key)}")
    for name, task in record["tasks"].items():
        was = former["tasks"].setdefault(name, task)
        changed = [key for key in task if task[key] != was.get(key)]
        if changed:
            raise ValueError(f"{name}: {changed[0]} was {was.get(changed[0])}, and now is {task[changed[0]]}")
    for result in former["results"]:
        name = result["algorithm"]
        now = METHODS[name].object_name(result["steps"]) if name in METHODS else "gone"
        if now != result["object"]:
            raise ValueError(f"{name} was {result['object']}, and now is {now}")
    return former


def missing(record: dict[str, Any], options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Task, algorithm and seed of the requested runs that the record lacks."""
    there = {(result["task"], result["algorithm"], result["seed"]) for result in record["results"]}
    wanted = [
        (task, name, seed)
        for task in options.tasks
        for seed in options.seeds
        for name in TASKS[task].methods()
        if name in (options.algorithms or TASKS[task].compared)
    ]
    return [run for run in wanted if run not in there]


def json_file(options: argparse.Namespace) -> Path:
    """Path of the record."""
    out: Path = options.out
    return out.with_name(f"{out.name}.json")


# ---------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------

TABLE = Table(
    (
        Column("task", width=8),
        Column("algorithm", width=24),
        Column("seed", width=5),
        Column("metric", width=9),
        Column("payload", "(B/step)", 10),
        Column("wire", "(B/step)", 10),
        Column("most", "(B/step)", 10),
        Column("time", "(ms/step)", 9),
        Column("waiting", "(%)", 8),
    )
)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; `tasks`, `algorithms` and `seeds` are lists."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--task",
        type=comma_list(one_of([*TASKS, "all"], "task")),
        default=["all"],
        metavar="A,B",
        help=f"some of {','.join(TASKS)}; all, the default, is {','.join(ALL)}",
    )
    parser.add_argument(
        "--algorithms",
        type=comma_list(one_of(METHODS, "algorithm")),
        default=None,
        metavar="A,B",
        help=f"some of {','.join(METHODS)}; by default those that the task compares",
    )
    parser.add_argument("--seeds", type=comma_list(at_least(0)), default=[0, 1, 2], metavar="NUMBERS")
    parser.add_argument("--steps", type=at_least(1), help="steps of every run; by default the task's")
    parser.add_argument("--device-time", type=seconds, default=0.0, metavar="TIME", help="400ms; none by default")
    add_out_argument(parser, RESULTS / "algorithms", "json", "md", "png")
    parser.add_argument("--resume", action="store_true", help="make only the runs that the record lacks")
    parser.add_argument("--report", action="store_true", help="only make the report of the record")
    options = parser.parse_args(argv)
    options.tasks = [*ALL] if "all" in options.task else options.task
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parse_arguments(argv)
    if options.report:
        if not json_file(options).exists():
            print(
                f"--report: there is no record {json_file(options)}; run without --report first", file=sys.stderr
            )
            return 2
        return report(json.loads(json_file(options).read_text()), options)
    torch.set_num_threads(1)
    # PyTorch warns about its own buckets for convolutions of one channel.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    with bagua_comm.connect() as world:
        node = world.rank * NODES // world.size
    with bagua_comm.connect(node=node) as comm, gloo(comm):
        return run_missing(comm, options)


def run_missing(comm: Communicator, options: argparse.Namespace) -> int:
    """Make the runs that are asked for, and write the report. Collective."""
    record, refusal = None, None
    if comm.rank == 0:
        record = begin_record("algorithms", options, comm=comm, packages=["torch", "scikit-learn"])
        del record["arguments"]
        record["results"] = []
        record["tasks"] = {
            name: describe(TASKS[name], options.steps, options.device_time) for name in options.tasks
        }
        if NETWORK_VARIABLE in os.environ:
            record["network"] = json.loads(os.environ[NETWORK_VARIABLE])
        former = json_file(options)
        if options.resume and former.exists():
            try:
                record = resume(record, json.loads(former.read_text()))
            except ValueError as exc:
                refusal = f"--resume: {former.name} cannot continue: {exc}"
    refusal, runs = comm.broadcast_object((refusal, record and missing(record, options)), root=0)
    if refusal:
        if comm.rank == 0:
            print(refusal, file=sys.stderr)
        return 2
    if comm.rank == 0:
        print(*header_lines(record), f"# nodes     : {NODES}, emulated", f"# runs      : {len(runs)}", sep="\n")
        print(*TABLE.header(), sep="\n", flush=True)
    for task, name, seed in runs:
        steps = options.steps or TASKS[task].steps
        result = run_once(comm, TASKS[task], METHODS[name], seed, steps, options.device_time)
        if comm.rank == 0:
            result = {"task": task, "algorithm": name, "seed": seed, **result}
            record["results"].append(result)
            write_json(json_file(options), {**record, "summary": summarize(record)})
            print(TABLE.row(_cells(result)), flush=True)
    return report(record, options) if comm.rank == 0 else 0


def _cells(result: dict[str, Any]) -> list[str]:
    per_step = result["per_step"]
    return [
        result["task"],
        result["algorithm"],
        str(result["seed"]),
        f"{result['metric']:.{TASKS[result['task']].decimals}f}",
        *(f"{per_step[key]:.0f}" for key in ("payload_bytes", "wire_bytes", "most_wire_bytes")),
        number(per_step["ms"]),
        waiting(per_step),
    ]


def report(record: dict[str, Any], options: argparse.Namespace) -> int:
    """Write the Markdown file and the figure, and print what ended where it should."""
    record["summary"] = summarize(record)
    write_report(options.out, partial(markdown, record), partial(draw, record))
    for name in record["tasks"]:
        for line in verdicts(record, name):
            print(f"# {name}: {line}")
    return 0
