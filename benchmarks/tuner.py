"""What the tuner finds, beside all that it could have found.

    python -m bagua_comm run -n 2 benchmarks/tuner.py --model vgg16 --image-size 32 --algorithm bytegrad
    python -m bagua_comm run -n 4 benchmarks/tuner.py --model resnet50 --averages exact,float16,bytes

One model is trained on random data, in the same processes and without a break: first by the tuner, then with each
of its choices, in several rounds of random order, then with what the tuner chose and with the fastest of the grid
in turn. A step's time is that of the slowest rank; what is compared are medians. All of it is written to
`--output`, with the endings .json and .md.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Spread, at_least, begin_record, header_lines, parse_size, write_json
from torch.nn import functional

import bagua_comm
import bagua_torch
from bagua_comm import (
    ByteGrad,
    Communicator,
    Decentralized,
    Exact,
    Float16,
    GradientAllReduce,
    LowPrecisionDecentralized,
    Quantized,
    Tuner,
)
from bagua_comm.planning.tuner import BLOCKS, BUCKET_BYTES, Settings

RESULTS = Path(__file__).parent / "results"
LEARNING_RATE = 1e-6

ALGORITHMS = {
    "exact": GradientAllReduce(),
    "bytegrad": ByteGrad(),
    "decentralized": Decentralized(),
    "low-precision": LowPrecisionDecentralized(),
}
AVERAGES = {"exact": Exact(), "float16": Quantized(Float16()), "bytes": Quantized()}

# ---------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """A model, and one batch that it is trained on."""

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
        """What steps with these settings take the slowest rank, after one that is not timed.

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
    """What was measured of some settings."""

    settings: Settings
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Of a step, in seconds."""
        return float(np.median(self.seconds))

    def row(self) -> dict[str, Any]:
        """The same for the record."""
        spread = Spread.of(np.array(self.seconds))
        return {**self.settings.plain(), "median_s": spread.median, "q1_s": spread.q1, "q3_s": spread.q3}


def make_training(comm: Communicator, options: argparse.Namespace, tuner: Tuner) -> Training:
    """Collective."""
    from models import MODELS, Sizes

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
    """Search, measure the grid, and compare; all figures.

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
    """The record for people."""
    results, arguments = record["results"], record["arguments"]
    search, tuned, fastest = results["search"], _label(results["tuned"]), _label(results["fastest"])
    again = {_label(row): row["median_s"] for row in results["again"]}
    lines = [
        "# What the tuner finds",
        "",
        f"{arguments['model']}, {results['model_bytes'] / 2**20:.0f} MiB, {record['ranks']} ranks on "
        f"{record['machine']['cpu']} ({record['machine']['cores']} cores). Made by `benchmarks/tuner.py`; all "
        "figures are in the JSON file beside this. Times are medians of what steps took the slowest rank.",
        "",
        f"* The tuner chose **{tuned}**, in {search['steps']} steps of training, {search['seconds']:.0f} s.",
        f"* The fastest of all {len(results['grid'])} choices is **{fastest}**.",
        f"* Measured again, in turn: {again[tuned]:.4f} s and {again[fastest]:.4f} s a step, "
        f"a ratio of {results['tuned_by_fastest']:.3f}.",
        "",
        "## All choices",
        "",
        *_table(
            ["buckets", "algorithm", "median (s)", "quartiles (s)"],
            [
                [
                    _size(row["bucket_bytes"]),
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
        *_table(
            ["trial", "buckets", "algorithm", "step (s)"],
            [
                [str(number), _size(row["bucket_bytes"]), f"`{row['algorithm']}`", f"{row['seconds']:.4f}"]
                for number, row in enumerate(results["history"], 1)
            ],
        ),
    ]
    return "\n".join(lines) + "\n"


def _label(row: dict[str, Any]) -> str:
    return f"{_size(row['bucket_bytes'])}, {row['algorithm']}"


def _size(nbytes: int) -> str:
    """A number of bytes, as `--bucket-bytes` takes it.

    >>> _size(10 * 2**20), _size(1536)
    ('10M', '1536')
    """
    units = ((unit, suffix) for unit, suffix in ((2**30, "G"), (2**20, "M"), (2**10, "K")) if nbytes % unit == 0)
    return next((f"{nbytes // unit}{suffix}" for unit, suffix in units), str(nbytes))


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows)]


# ---------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------


def _names_in(known: dict[str, Any]) -> Any:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"there is no {name!r}; expected any of {', '.join(known)}")
        return names

    return parse


def _list_of(parse: Any) -> Any:
    return lambda text: [parse(part) for part in text.split(",") if part]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    positive = at_least(1)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="vgg16", help="one of benchmarks/models.py")
    parser.add_argument("--algorithm", choices=[*ALGORITHMS], default="exact")
    parser.add_argument(
        "--averages", type=_names_in(AVERAGES), default=[], metavar="NAMES", help="to choose from"
    )
    parser.add_argument("--bucket-bytes", type=_list_of(parse_size), default=[*BUCKET_BYTES], metavar="SIZES")
    parser.add_argument("--blocks", type=_list_of(positive), metavar="SIZES", help=f"by default {BLOCKS}")
    parser.add_argument("--trials", type=positive, default=15)
    parser.add_argument(
        "--steps", type=positive, default=3, help="timed of each trial, and each round of the grid"
    )
    parser.add_argument("--rounds", type=positive, default=2, help="of the grid")
    parser.add_argument("--rematches", type=positive, default=5, help="rounds of the tuner's and the grid's best")
    parser.add_argument("--batch", type=positive, default=1, help="samples of a rank")
    parser.add_argument("--image-size", type=positive, default=224, metavar="PIXELS")
    parser.add_argument("--sequence", type=positive, default=128, metavar="TOKENS")
    parser.add_argument("--output", type=Path, default=RESULTS / "tuner", metavar="STEM")
    return parser.parse_args(argv)


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    with bagua_comm.connect() as comm:
        mpi = None
        if comm.transports[0].name == "mpi":
            from mpi4py import MPI as mpi  # noqa: N811
        record = begin_record("tuner", options, ranks=comm.size, mpi=mpi)
        record["versions"]["torch"] = torch.__version__
        if comm.rank == 0:
            print(*header_lines(record), sep="\n", flush=True)
        record["results"] = run(comm, options)
        if comm.rank == 0:
            write_json(options.output.with_suffix(".json"), record)
            options.output.with_suffix(".md").write_text(markdown(record))
            print(markdown(record))


if __name__ == "__main__":
    sys.exit(main())
