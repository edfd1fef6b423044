"""Measures every figure about slow networks, shared memory and the host's codecs again, one after another.

    python -m benchmarks.figures                       # all, some hours on two cores
    python -m benchmarks.figures --only network shared

Each job is one command, which is printed before it runs. It writes its figures to benchmarks/results, with the
machine and the versions: JSON, and where there is a report, Markdown and a plot. Emulated hosts need root; see
netlab/.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bagua_comm.kernels import compile_now

from .bench import RESULTS, ROOT
from .convergence.methods import RATES

Command = list[object]
"""Arguments of Python."""


def hosts(rate: str, *arguments: object, count: int = 4, ranks_per_host: int = 1) -> Command:
    """A module on emulated hosts."""
    where = ("--hosts", count, "--ranks-per-host", ranks_per_host, "--rate", rate)
    return ["-m", "benchmarks.netlab", "run", *where, "-m", *arguments]


def ranks(count: int, *arguments: object) -> Command:
    """A module on ranks of this machine."""
    return ["-m", "bagua_comm", "run", "-n", count, "-m", *arguments]


def network(rate: str) -> Command:
    """Collectives between 512 KiB and 64 MiB beside gloo's, in five rounds."""
    operations = ("allreduce", "quantized_allreduce", "reduce_scatter", "allgather", "alltoall")
    beside = ("--beside", "gloo", "--forms", "out-of-place")
    sweep = ("-b", "512K", "-e", "64M", "-f", 2, "-n", 3, "-w", 1, "--rounds", 5)
    record = ("--label", rate, "--json", RESULTS / f"network-{rate}.json")
    return hosts(rate, "benchmarks.collectives", *operations, *beside, *sweep, *record)


def training(model: str, rate_mbit: int, algorithms: str = "", **options: object) -> Command:
    """Training steps of a model at a rate, with all algorithms unless some are named."""
    label = f"hosts=4,rate_mbit={rate_mbit},ranks_per_host=1"
    command: Command = ["benchmarks.training", "--model", model, "--label", label, "--trace-overlap"]
    command += [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    command += ["--algorithms", algorithms] if algorithms else []
    return hosts(f"{rate_mbit}mbit", *command, "--json", RESULTS / f"training-{model}-{rate_mbit}.json")


def beside_ddp(model: str, rate_mbit: int, *, ranks_per_host: int = 1) -> Command:
    """Training steps of four ranks beside PyTorch's DistributedDataParallel at its best, in five rounds."""
    count = 4 // ranks_per_host
    ours = "exact,bytegrad" if ranks_per_host == 1 else "hierarchical,hierarchical-bytes"
    label = f"hosts={count},rate_mbit={rate_mbit},ranks_per_host={ranks_per_host}"
    command: Command = ["benchmarks.training", "--model", model, "--label", label, "--trace-overlap"]
    command += ["--algorithms", f"alone,ddp,ddp-view,{ours}", "--sequence", 32]
    command += ["--rounds", 5, "--steps", 1, "--warmup", 1]
    command += ["--json", ddp_record(model, rate_mbit, ranks_per_host)]
    return hosts(f"{rate_mbit}mbit", *command, count=count, ranks_per_host=ranks_per_host)


def ddp_record(model: str, rate_mbit: int, ranks_per_host: int) -> Path:
    """Folder of the figures of `beside_ddp`."""
    return RESULTS / f"ddp-{model}-{rate_mbit}{'' if ranks_per_host == 1 else '-2x2'}.json"


def few_bits_allreduce(rate: str) -> Command:
    """The allreduce in eight and in four bits beside gloo's, in three rounds."""
    sweep = ("--beside", "gloo", "--forms", "out-of-place", "-b", "8M", "-e", "32M", "-f", 4, "-n", 3, "-w", 1)
    operation = ("quantized_allreduce", "--codec", "minmax", "int4", *sweep, "--rounds", 3, "--label", rate)
    return hosts(rate, "benchmarks.collectives", *operation, "--json", RESULTS / f"few_bits-network-{rate}.json")


def few_bits_training(model: str, rate_mbit: int) -> Command:
    """One training step in eight and in four bits beside PyTorch's, in 32 and in 16 bits."""
    label = f"hosts=4,rate_mbit={rate_mbit},ranks_per_host=1"
    command: Command = ["benchmarks.training", "--model", model, "--label", label]
    command += ["--algorithms", "ddp,ddp-fp16,bytegrad,int4", "--sequence", 32]
    command += ["--rounds", 1, "--steps", 1, "--warmup", 1]
    return hosts(f"{rate_mbit}mbit", *command, "--json", RESULTS / f"few_bits-training-{model}-{rate_mbit}.json")


BETWEEN_SITES = "torch,diloco-30,streaming-30-at-once,streaming-30,streaming-30-int4,sparseloco-30"


def between_sites(task: str, rate: str) -> Command:
    """Steps of DiLoCo and its kin on links with latency; the steps sleep, as if devices computed."""
    command = ("benchmarks.convergence", "--task", task, "--algorithms", BETWEEN_SITES)
    command += ("--steps", 91, "--device-time", "400ms")
    command += ("--out", RESULTS / f"streaming-{task}-{rate}")
    return ["-m", "benchmarks.netlab", "run", "--hosts", 4, "--rate", rate, "--latency", "50ms", "-m", *command]


def sparse(algorithms: str, name: str, *more: object) -> Command:
    """SparseLoCo and its kin with other settings, and for longer, without slow links."""
    command = ("benchmarks.convergence", "--task", "text", "--algorithms", algorithms, *more)
    return ranks(4, *command, "--out", RESULTS / name)


AT_EQUAL_BYTES = (
    "torch,diloco-30,streaming-30-int4,diloco-100-int4,diloco-200-int4,sparseloco-30,sparseloco-30-tensors,"
    "sparseloco-30-senders,sparseloco-30-both,sparseloco-30-192,sparseloco-15-96,sparseloco-10,sparseloco-10-both"
)
FOR_LONGER = (
    "diloco-30,sparseloco-30,sparseloco-30-tensors,sparseloco-30-senders,sparseloco-30-both,sparseloco-10-both"
)
FOR_LONGEST = "diloco-30,sparseloco-30-both,sparseloco-10-both"
WITH_MUON = "exact-adam-0.004,diloco-30-muon-0.016,sparseloco-30-both-muon-0.016,sparseloco-10-both-muon-0.016"

RATES_CHOSEN = [("adam", 0.004), ("muon", 0.016)]
RATES_TRIED = [(optimizer, rate) for optimizer, rates in RATES.items() for rate in rates]


def muloco(rates: Sequence[tuple[str, float]], name: str, *more: object) -> Command:
    """Exact averages and DiLoCo with these inner optimizers and learning rates."""
    names = ",".join(f"{kind}-{optimizer}-{rate}" for kind in ("exact", "diloco-30") for optimizer, rate in rates)
    command = ("benchmarks.convergence", "--task", "text", "--algorithms", names, *more)
    return ranks(4, *command, "--out", RESULTS / f"muloco{name}")


def shared_memory(count: int) -> Command:
    """Exact allreduce on this machine, beside MPI's and gloo's."""
    sweep = ("-b", "1M", "-e", "32M", "-f", 2, "-n", 25)
    command = ("benchmarks.collectives", "allreduce", "--beside", "mpi4py,gloo", *sweep)
    return ranks(count, *command, "--json", RESULTS / "shared.json")


def tuner(model: str, bucket_bytes: str) -> Command:
    """Every bucket size of the grid, and the tuner's search among them."""
    search = ("--trials", 4, "--steps", 2, "--rounds", 1, "--rematches", 2)
    grid = ("--model", model, "--algorithm", "exact", "--bucket-bytes", bucket_bytes)
    return hosts("1gbit", "benchmarks.training.tuner", *grid, *search, "--out", RESULTS / "tuner")


def scaling(count: int, ranks_per_host: int) -> Command:
    """Steps of an engine whose computation is a sleep, on emulated hosts."""
    command = ("benchmarks.training.scaling", "--rate-mbit", 100, "--rounds", 5, "--model-bytes", "16M")
    record = ("--json", RESULTS / f"scaling-100-{count}x{ranks_per_host}.json")
    return hosts("100mbit", *command, *record, count=count, ranks_per_host=ranks_per_host)


MEASURED = [
    RESULTS / f"training-{name}.json"
    for name in (
        "vgg16-1000",
        "vgg16-500",
        "vgg16-10000",
        "resnet50-1000",
        "bert-large-1000",
    )
]
MAIN = "alone,ddp,ddp-fp16,exact,float16,bytegrad"

BESIDE_DDP = [
    (model, rate_mbit, ranks_per_host)
    for ranks_per_host in (1, 2)
    for model in ("vgg16", "resnet50", "bert-large")
    for rate_mbit in (500, 1000, 10000)
]
"""Models, rates of links, and ranks on each host."""

JOBS: dict[str, list[Command]] = {
    "training": [
        training("vgg16", 1000, MAIN, rounds=2, steps=3, warmup=1),
        training("vgg16", 500, MAIN, rounds=1, steps=3, warmup=1),
        training("vgg16", 10000, MAIN, rounds=1, steps=3, warmup=1),
        training("resnet50", 1000, rounds=1, steps=3, warmup=2),
        training("bert-large", 1000, "alone,ddp,exact,bytegrad", rounds=1, steps=2, warmup=1, sequence=32),
        ["-m", "benchmarks.training.report", *MEASURED, "--out", RESULTS / "training"],
        ["-m", "benchmarks.training.costmodel", *MEASURED, "--out", RESULTS / "costmodel"],
    ],
    "ddp": [
        *(beside_ddp(model, rate_mbit, ranks_per_host=count) for model, rate_mbit, count in BESIDE_DDP),
        [
            "-m",
            "benchmarks.training.report",
            RESULTS / "ddp-*.json",
            "--title",
            "Training beside PyTorch's DistributedDataParallel",
            "--out",
            RESULTS / "ddp",
        ],
    ],
    "scaling": [
        *(scaling(count, each) for count, each in ((2, 1), (4, 1), (8, 1), (2, 2), (4, 2))),
        [
            "-m",
            "benchmarks.training.simulator",
            *(RESULTS / f"{name}-*.json" for name in ("scaling", "training", "ddp", "few_bits-training")),
            "--out",
            RESULTS / "simulator",
        ],
    ],
    "links": [["-m", "benchmarks.training.links", "--out", RESULTS / "links"]],
    "network": [
        network("1gbit"),
        network("10gbit"),
        [
            "-m",
            "benchmarks.collectives.report",
            *(RESULTS / f"network-{rate}.json" for rate in ("1gbit", "10gbit")),
            "--out",
            RESULTS / "network",
        ],
    ],
    "few_bits": [
        *(few_bits_allreduce(rate) for rate in ("100mbit", "500mbit", "1gbit", "10gbit")),
        *(few_bits_training(model, rate) for model in ("vgg16", "bert-large") for rate in (100, 500)),
    ],
    "streaming": [
        ranks(
            4,
            *("benchmarks.convergence", "--task", "text,digits", "--algorithms", BETWEEN_SITES),
            *("--out", RESULTS / "streaming"),
        ),
        sparse("torch,sparseloco-30-256", "streaming-256"),
        sparse("diloco-30,sparseloco-30,sparseloco-30-256", "streaming-1600", "--steps", 1600, "--seeds", 0),
        *(between_sites(task, rate) for task in ("text", "digits") for rate in ("50mbit", "200mbit")),
    ],
    "sparse": [
        sparse(AT_EQUAL_BYTES, "sparse-text"),
        sparse(FOR_LONGER, "sparse-text-1600", "--steps", 1600),
        sparse(FOR_LONGEST, "sparse-text-10000", "--steps", 10_000, "--seeds", 0),
        sparse(WITH_MUON, "sparse-text-muon"),
    ],
    "muloco": [muloco(RATES_TRIED, "-rates", "--steps", 120, "--seeds", 0), muloco(RATES_CHOSEN, "")],
    "shared": [shared_memory(2)],
    "latency": [
        *(ranks(count, "benchmarks.latency", "--json", RESULTS / f"latency-{count}.json") for count in (1, 2)),
        ["-m", "benchmarks.latency", "--report", *(RESULTS / f"latency-{count}.json" for count in (1, 2))],
    ],
    "halos": [
        *(ranks(count, "benchmarks.halos", "--json", RESULTS / f"halos-{count}.json") for count in (2, 4)),
        ["-m", "benchmarks.halos", "--report", *(RESULTS / f"halos-{count}.json" for count in (2, 4))],
    ],
    "hooks": [ranks(count, "benchmarks.hooks", "--json", RESULTS / f"hooks-{count}.json") for count in (1, 2)],
    "codecs": [
        ["-m", "benchmarks.codecs", "-b", "8M", "-e", "32M", "-n", 7, "-w", 2, "--json", RESULTS / "codecs.json"]
    ],
    "first_run": [
        ["-m", "benchmarks.first_run", "-n", ranks, "--json", RESULTS / f"first_run-{ranks}.json"]
        for ranks in (1, 2)
    ],
    "tuner": [tuner("resnet50", "1M,4M,16M,64M")],
}


def expanded(part: object) -> list[str]:
    """A part of a command, as arguments; the files that a pattern fits."""
    if isinstance(part, Path) and "*" in part.name:
        return [str(path) for path in sorted(part.parent.glob(part.name))]
    return [str(part)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs; the exit code of the first command that fails, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[*JOBS], default=[*JOBS], metavar="JOB")
    options = parser.parse_args(argv)
    with contextlib.suppress(ImportError):
        compile_now()
    for name in options.only:
        for job in JOBS[name]:
            command = [sys.executable, *(argument for part in job for argument in expanded(part))]
            print(f"# {' '.join(command)}", flush=True)
            start = time.monotonic()
            code = subprocess.run(command, cwd=ROOT).returncode
            print(f"# {time.monotonic() - start:.0f} s", flush=True)
            if code:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
