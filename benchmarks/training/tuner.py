"""The settings that the tuner finds, compared with all that it could have found.

    python -m bagua_comm run -n 2 -m benchmarks.training.tuner --image-size 32 --algorithm bytegrad
    python -m bagua_comm run -n 4 -m benchmarks.training.tuner --model resnet50 --averages exact,float16,bytegrad

One model is trained on random data, in the same processes and without a break: first by the tuner, then with each
of its choices, in several rounds of random order, then with the tuner's choice and with the fastest of the grid
in turn. A step's time is that of the slowest rank; medians are compared. The figures and a report go to `--out`,
with the endings .json and .md.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import bagua_comm
import bagua_torch
from bagua_comm import Communicator, GradientAllReduce, QAdam, Tuner
from bagua_comm.planning.tuner import BLOCKS, BUCKET_BYTES, Settings

from ..bench import RESULTS
from ..bench.arguments import add_out_argument, at_least, comma_list, format_size, one_of, parse_size
from ..bench.named import COMPARED
from ..bench.record import begin_record, header_lines, write_json
from ..bench.report import markdown_table, write_report
from ..bench.timing import Spread
from .models import MODELS, Sizes

LEARNING_RATE = 1e-6

ALGORITHMS = {name: algorithm for name, algorithm in COMPARED.items() if not isinstance(algorithm, QAdam)}
"""Algorithms that train with any optimizer."""

AVERAGES = {name: each.average for name, each in COMPARED.items() if isinstance(each, GradientAllReduce)}
"""The averages of gradients, by the names of their algorithms."""

# ---------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """A model, and the batch that it is trained on in each step."""

    comm: Communicator
    ddp: bagua_torch.DistributedDataParallel
    optimizer: torch.optim.Optimizer
    batch: tuple[torch.Tensor, torch.Tensor]

    def step(self) -> None:
        """Make one training step. Collective."""
        inputs, targets = self.batch
        self.optimizer.zero_grad()
        functional.cross_entropy(self.ddp(inputs), targets).backward()
        self.optimizer.step()

    def seconds(self, settings: Settings, steps: int) -> list[float]:
        """Seconds of steps with these settings, the slowest rank's, after one step that is not timed.

        Collective.
        """
        self.ddp.replan(bucket_bytes=settings.bucket_bytes, algorithm=settings.algorithm)
        self.step()
        self.comm.barrier()
        mine = np.empty(steps)
        for i in range(steps):
            start = time.perf_counter()
            self.step()
            mine[i] = time.perf_counter() - start
        return [float(slowest) for slowest in self.comm.allreduce(mine, op="max")]


@dataclass
class Samples:
    """The times of steps with some settings."""

    settings: Settings
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of a step, in seconds."""
        return float(np.median(self.seconds))

    def row(self) -> dict[str, Any]:
        """The settings, the median and the quartiles, for the record."""
        spread = Spread.of(np.array(self.seconds))
        return {**self.settings.plain(), "median_s": spread.median, "q1_s": spread.q1, "q3_s": spread.q3}


def make_training(comm: Communicator, options: argparse.Namespace, tuner: Tuner) -> Training:
    """The model of these options, about to be tuned. Collective."""
    described = MODELS[options.model]
    torch.manual_seed(0)
    module = described.make()
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    algorithm = ALGORITHMS[options.algorithm]
    ddp = bagua_torch.DistributedDataParallel(module, optimizer, algorithm, comm=comm, tuner=tuner)
    sizes = Sizes(options.batch, options.image_size, options.sequence)
    return Training(comm, ddp, optimizer, described.make_batch(sizes, seed=comm.rank))


def measure_in_turn(training: Training, choices: Sequence[Settings], *, rounds: int, steps: int) -> list[Samples]:
    """Measure all choices, in another order in every round.

    Collective.
    """
    samples = [Samples(settings) for settings in choices]
    order = random.Random(0)
    for _ in range(rounds):
        for each in order.sample(samples, len(samples)):
            each.seconds += training.seconds(each.settings, steps)
    return samples


def run(comm: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Search, measure the grid, and compare; returns all figures.

    Collective.
    """
    tuner = Tuner(
        bucket_bytes=options.bucket_bytes,
        averages=[AVERAGES[name] for name in options.averages],
        blocks=options.blocks,
        trials=options.trials,
        steps_per_trial=options.steps,
    )
    training = make_training(comm, options, tuner)
    model_bytes = sum(parameter.nbytes for parameter in training.ddp.parameters())
    begun, steps = time.perf_counter(), 0
    while tuner.searching:
        training.step()
        steps += 1
    search_s = time.perf_counter() - begun
    if comm.rank == 0:
        print(f"# searched  : {steps} steps, {search_s:.0f} s; now all {len(tuner.choices)} choices", flush=True)

    grid = measure_in_turn(training, tuner.choices, rounds=options.rounds, steps=options.steps)
    fastest = min(grid, key=lambda each: each.median)
    rivals = list(dict.fromkeys([tuner.best, fastest.settings]))
    again = measure_in_turn(training, rivals, rounds=options.rematches, steps=options.steps)
    training.ddp.close()
    medians = {each.settings: each.median for each in again}
    return {
        "model_bytes": model_bytes,
        "history": [{**trial.settings.plain(), "seconds": trial.seconds} for trial in tuner.history],
        "search": {"steps": steps, "seconds": search_s},
        "grid": [each.row() for each in grid],
        "fastest": fastest.settings.plain(),
        "tuned": tuner.best.plain(),
        "again": [each.row() for each in again],
        "tuned_by_fastest": medians[tuner.best] / medians[fastest.settings],
    }


# ---------------------------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------------------------


def markdown(record: dict[str, Any]) -> str:
    """The report of a record."""
    results, arguments = record["results"], record["arguments"]
    search, tuned, fastest = results["search"], _label(results["tuned"]), _label(results["fastest"])
    again = {_label(row): row["median_s"] for row in results["again"]}
    lines = [
        "# What the tuner finds",
        "",
        f"{arguments['model']}, {results['model_bytes'] / 2**20:.0f} MiB, {record['ranks']} ranks on "
        f"{record['machine']['cpu']} ({record['machine']['cores']} cores). Made by "
        "`python -m benchmarks.training.tuner`; all figures are in the JSON file beside this. Times are medians "
        "of steps; a step takes as long as its slowest rank.",
        "",
        f"* The tuner chose **{tuned}**, in {search['steps']} steps of training, {search['seconds']:.0f} s.",
        f"* The fastest of all {len(results['grid'])} choices is **{fastest}**.",
        f"* Measured again, in turn: {again[tuned]:.4f} s and {again[fastest]:.4f} s a step, "
        f"a ratio of {results['tuned_by_fastest']:.3f}.",
        "",
        "## All choices",
        "",
        *markdown_table(
            ["buckets", "algorithm", "median (s)", "quartiles (s)"],
            [
                [
                    format_size(row["bucket_bytes"]),
                    f"`{row['algorithm']}`",
                    f"{row['median_s']:.4f}",
                    f"{row['q1_s']:.4f} - {row['q3_s']:.4f}",
                ]
                for row in results["grid"]
            ],
        ),
        "",
        "## What the tuner tried, in order",
        "",
        *markdown_table(
            ["trial", "buckets", "algorithm", "step (s)"],
            [
                [str(number), format_size(row["bucket_bytes"]), f"`{row['algorithm']}`", f"{row['seconds']:.4f}"]
                for number, row in enumerate(results["history"], 1)
            ],
        ),
    ]
    return "\n".join(lines) + "\n"


def _label(row: dict[str, Any]) -> str:
    return f"{format_size(row['bucket_bytes'])}, {row['algorithm']}"


# ---------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; `averages`, `bucket_bytes` and `blocks` are lists."""
    positive = at_least(1)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=[*MODELS], default="vgg16")
    parser.add_argument("--algorithm", choices=[*ALGORITHMS], default="exact", metavar="NAME")
    parser.add_argument(
        "--averages",
        type=comma_list(one_of(AVERAGES, "average")),
        default=[],
        metavar="A,B",
        help=f"averages to choose from, some of {','.join(AVERAGES)}; by default the algorithm's own",
    )
    parser.add_argument(
        "--bucket-bytes",
        type=comma_list(parse_size),
        default=[*BUCKET_BYTES],
        metavar="SIZES",
        help="bucket sizes to choose from",
    )
    parser.add_argument(
        "--blocks",
        type=comma_list(positive),
        metavar="SIZES",
        help=f"block sizes of codecs to choose from; by default {','.join(map(str, BLOCKS))}",
    )
    parser.add_argument("--trials", type=positive, default=15, help="settings that the tuner may try")
    parser.add_argument("--steps", type=positive, default=3, help="timed steps of a trial, and of a round")
    parser.add_argument("--rounds", type=positive, default=2, help="rounds in which all choices are measured")
    parser.add_argument(
        "--rematches", type=positive, default=5, help="rounds in which the tuner's choice meets the fastest"
    )
    parser.add_argument("--batch", type=positive, default=1, help="samples of a rank in a step")
    parser.add_argument("--image-size", type=positive, default=224, metavar="PIXELS")
    parser.add_argument("--sequence", type=positive, default=128, metavar="TOKENS")
    add_out_argument(parser, RESULTS / "tuner", "json", "md")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parse_arguments(argv)
    torch.set_num_threads(1)
    with bagua_comm.connect() as comm:
        record = begin_record("tuner", options, comm=comm, packages=["torch"])
        if comm.rank == 0:
            print(*header_lines(record), sep="\n", flush=True)
        record["results"] = run(comm, options)
        if comm.rank == 0:
            write_json(options.out.with_name(f"{options.out.name}.json"), record)
            print(write_report(options.out, lambda picture: markdown(record)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
