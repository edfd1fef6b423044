"""Where every algorithm ends on two real tasks, beside PyTorch's own DistributedDataParallel, and what it sends.

    python -m bagua_comm run -n 4 benchmarks/algorithms.py --task all
    python -m bagua_comm run -n 4 benchmarks/algorithms.py --task digits --algorithms torch,bytegrad --seeds 0
    python -m bagua_comm run -n 4 benchmarks/algorithms.py --resume
    python benchmarks/algorithms.py --report

Tasks: a CNN on scikit-learn's digits, and a character-level transformer on the text of Python's standard
library. For one seed, all algorithms begin with the same weights and see the same batches in the same order,
with the same optimizer and learning rates. All run in turn in the same processes; so does PyTorch's, on gloo.

Afterwards algorithms.md (tables), algorithms.png (the same as a figure) and algorithms.json (all of it) are in
`--output-dir`. The JSON file is written after every run; `--resume` goes on with what is missing there, and
`--report` makes the other two of it, without MPI.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import convergence_report
import numpy as np
import torch
from common import (
    Column,
    Table,
    allreduce_factor,
    at_least,
    collect_machine,
    collect_versions,
    number,
    write_json,
)
from convergence import METHODS, MOMENTUM, NODES, TASKS, Batch, Method, Task
from torch import nn
from torch.nn import functional
from torch_world import gloo

import bagua_comm
import bagua_torch
from bagua_comm import Communicator

RESULTS = Path(__file__).parent / "results"
BUCKET_BYTES = 256 * 1024
CURVE_POINTS = 40
"""How many means of the training loss are kept of a run."""

# ---------------------------------------------------------------------------------------------------
# One run
# ---------------------------------------------------------------------------------------------------


def make_optimizer(kind: str, parameters: Iterator[nn.Parameter], lr: float, algorithm: Any) -> Any:
    """The optimizer of this name, with its defaults."""
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM)
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=lr)
    return bagua_torch.QAdamOptimizer(parameters, lr=lr, warmup_steps=algorithm.warmup_steps)


SCHEDULE = "linear warm-up over the first 10 % of the steps, then cosine to 0"


def learning_rate(step: int, steps: int) -> float:
    """The part of the learning rate that a step has.

    >>> [round(learning_rate(step, 20), 2) for step in (0, 1, 2, 10, 19)]
    [0.5, 0.99, 0.98, 0.5, 0.01]
    """
    return min(1.0, (step + 1) / max(1, steps // 10)) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))


def run_once(comm: Communicator, task: Task, method: Method, seed: int, steps: int) -> dict[str, Any]:
    """Train one model from one seed; what came of it.

    Collective.
    """
    algorithm, data = method.make(steps), task.load()
    torch.manual_seed(seed)
    model = task.make_model()
    kind = task.optimizer_of(method)
    optimizer = make_optimizer(kind, model.parameters(), task.lr[kind], algorithm)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(learning_rate, steps=steps))
    if algorithm is None:
        wrapped: Any = nn.parallel.DistributedDataParallel(model)
    else:
        wrapped = bagua_torch.DistributedDataParallel(
            model, [optimizer], algorithm, comm=comm, bucket_bytes=BUCKET_BYTES
        )

    batches = data.batches(seed, comm.size * task.batch_size)
    losses = np.empty(steps)
    comm.barrier()
    start = time.perf_counter()
    for step in range(steps):
        x, y = (part.chunk(comm.size)[comm.rank] for part in next(batches))
        loss = functional.cross_entropy(wrapped(x).flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses[step] = loss.item()
    seconds = time.perf_counter() - start

    if algorithm is None:
        sent = torch_sends(comm, model)
    else:
        wrapped.stop()
        counter = wrapped.engine.counter
        sent = {
            "payload_bytes": counter.payload_bytes / steps,
            "wire_bytes": counter.wire_bytes / steps,
            "exchanges": counter.calls / steps,
        }
    if algorithm is not None and not method.exact:
        wrapped.average_weights()  # those that average gradients must have the same weights without it
    for parameter in model.parameters():
        comm.check_consistency(bagua_torch.as_array(parameter))
    metric = evaluate(comm, task, model, data.held_out)
    curve = comm.allreduce(losses, op="avg")
    if algorithm is not None:
        wrapped.close()
    return {
        "object": method.object_name(steps),
        "steps": steps,
        "metric": metric,
        "per_step": {**sent, "ms": seconds / steps * 1e3},
        "train_loss": [round(float(part.mean()), 4) for part in np.array_split(curve, min(steps, CURVE_POINTS))],
    }


def torch_sends(comm: Communicator, model: nn.Module) -> dict[str, float | None]:
    """Computed, not measured: what a ring allreduce of the gradients takes."""
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {"payload_bytes": nbytes, "wire_bytes": allreduce_factor(comm.size) * nbytes, "exchanges": None}


@torch.no_grad()
def evaluate(comm: Communicator, task: Task, model: nn.Module, held_out: Batch) -> float:
    """The metric of the weights, which are the same on all ranks: each judges a part.

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


def begin_record(comm: Communicator) -> dict[str, Any]:
    """What the JSON file says beside its results."""
    mpi = None
    if comm.transports[0].name == "mpi":
        from mpi4py import MPI as mpi  # noqa: N811
    others = {name: importlib.metadata.version(name) for name in ("torch", "scikit-learn")}
    return {
        "benchmark": "algorithms",
        "machine": collect_machine(),
        "versions": {**collect_versions(mpi), **others},
        "ranks": comm.size,
        "tasks": {},
        "results": [],
    }


def describe(task: Task, steps: int | None) -> dict[str, Any]:
    """A task in the JSON file: all that must be the same for two runs to be compared."""
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
    }


def resume(record: dict[str, Any], former: dict[str, Any]) -> dict[str, Any]:
    """The former record, with the tasks of the new one.

    Raises:
        ValueError: It was made by other ranks, versions or settings.
    """
    for key in ("versions", "ranks"):
        if record[key] != former[key]:
            raise ValueError(f"{key} were {former[key]}, and now are {record[key]}")
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
    """Task, algorithm and seed of all runs that are asked for and not there yet."""
    there = {(result["task"], result["algorithm"], result["seed"]) for result in record["results"]}
    wanted = [
        (task, name, seed)
        for task in options.tasks
        for seed in options.seeds
        for name in TASKS[task].methods()
        if name in options.algorithms
    ]
    return [run for run in wanted if run not in there]


def save(record: dict[str, Any], folder: Path) -> None:
    """Write the JSON file in one go, so that an interrupted run leaves the former one."""
    record["summary"] = convergence_report.summarize(record)
    path = folder / "algorithms.json"
    write_json(path.with_suffix(".json.new"), record)
    os.replace(path.with_suffix(".json.new"), path)


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
        Column("time", "(ms/step)", 9),
    )
)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; `tasks`, `algorithms` and `seeds` are lists."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", choices=[*TASKS, "all"], default="all")
    parser.add_argument("--algorithms", metavar="NAMES", help=f"some of {','.join(METHODS)}; by default all")
    parser.add_argument("--seeds", default="0,1,2", metavar="NUMBERS")
    parser.add_argument("--steps", type=at_least(1), help="of every run; by default the task's")
    parser.add_argument("--output-dir", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--resume", action="store_true", help="run what is missing in the JSON file")
    parser.add_argument("--report", action="store_true", help="only make the report of the JSON file")
    options = parser.parse_args(argv)

    options.tasks = [*TASKS] if options.task == "all" else [options.task]
    options.algorithms = [*METHODS] if options.algorithms is None else options.algorithms.split(",")
    for name in options.algorithms:
        if name not in METHODS:
            parser.error(f"there is no algorithm {name!r}; expected any of {', '.join(METHODS)}")
    if not all(seed.isdecimal() for seed in options.seeds.split(",")):
        parser.error(f"--seeds is {options.seeds!r}, expected for example 0,1,2")
    options.seeds = [int(seed) for seed in options.seeds.split(",")]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parse_arguments(argv)
    if options.report:
        return report(json.loads((options.output_dir / "algorithms.json").read_text()), options.output_dir)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    # PyTorch's own, about convolutions of one channel.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    with bagua_comm.connect() as world:
        node = world.rank * NODES // world.size
        with bagua_comm.connect(node=node) as comm, gloo(world):
            return run_missing(comm, options)


def run_missing(comm: Communicator, options: argparse.Namespace) -> int:
    """Run all that is asked for, and write the report. Collective."""
    record, refusal = None, None
    if comm.rank == 0:
        record = begin_record(comm)
        record["tasks"] = {name: describe(TASKS[name], options.steps) for name in options.tasks}
        former = options.output_dir / "algorithms.json"
        if options.resume and former.exists():
            try:
                record = resume(record, json.loads(former.read_text()))
            except ValueError as exc:
                refusal = f"--resume: {former.name} cannot go on: {exc}"
    refusal, runs = comm.broadcast_object((refusal, record and missing(record, options)), root=0)
    if refusal:
        if comm.rank == 0:
            print(refusal, file=sys.stderr)
        return 2
    if comm.rank == 0:
        print(*progress_lines(record, len(runs)), *TABLE.header(), sep="\n", flush=True)
    for task, name, seed in runs:
        result = run_once(comm, TASKS[task], METHODS[name], seed, options.steps or TASKS[task].steps)
        if comm.rank == 0:
            result = {"task": task, "algorithm": name, "seed": seed, **result}
            record["results"].append(result)
            save(record, options.output_dir)
            print(TABLE.row(_cells(result)), flush=True)
    return report(record, options.output_dir) if comm.rank == 0 else 0


def progress_lines(record: dict[str, Any], runs: int) -> list[str]:
    """What is about to run, above the rows."""
    machine = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return [
        "# algorithms",
        f"# machine   : {machine['cpu']}, {machine['cores']} cores",
        f"# versions  : {versions}",
        f"# ranks     : {record['ranks']}, as {NODES} emulated nodes",
        f"# runs      : {runs}",
    ]


def _cells(result: dict[str, Any]) -> list[str]:
    per_step = result["per_step"]
    return [
        result["task"],
        result["algorithm"],
        str(result["seed"]),
        f"{result['metric']:.{TASKS[result['task']].decimals}f}",
        *(f"{per_step[key]:.0f}" for key in ("payload_bytes", "wire_bytes")),
        number(per_step["ms"]),
    ]


def report(record: dict[str, Any], folder: Path) -> int:
    """Write the Markdown file and the figure, and print what ended where it should."""
    record["summary"] = convergence_report.summarize(record)
    (folder / "algorithms.md").write_text(convergence_report.markdown(record))
    for name in record["tasks"]:
        for line in convergence_report.verdicts(record, name):
            print(f"# {name}: {line}")
    try:
        convergence_report.plot(record, folder / "algorithms.png")
    except ImportError as exc:
        print(f"# no figure: {exc}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
