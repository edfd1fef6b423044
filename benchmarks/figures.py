"""Measures every figure about slow networks, shared memory and the host's codecs again, one after another.

    python benchmarks/figures.py                       # all, about three quarters of an hour on two cores
    python benchmarks/figures.py --only network shared

Each job is one command, printed before it runs, and writes to benchmarks/results what it measured, with the
machine and the versions: JSON, and where there is a report, Markdown and a plot. Emulated hosts need root; see
netlab.py.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


def hosts(rate: str, *script: object) -> list[object]:
    """A script on four emulated hosts."""
    return [HERE / "netlab.py", "run", "--hosts", 4, "--rate", rate, *script]


def ranks(count: int, *script: object) -> list[object]:
    """A script on ranks of this machine."""
    return ["-m", "bagua_comm", "run", "-n", count, *script]


def network(rate: str) -> list[object]:
    """Every collective, between 512 KiB and 32 MiB."""
    sweep = ("-b", "512K", "-e", "32M", "-f", 4, "-n", 7, "-w", 2)
    return hosts(rate, HERE / "network.py", *sweep, "--label", rate, "--json", RESULTS / f"network-{rate}.json")


def training(model: str, rate_mbit: int, algorithms: str = "", **options: object) -> list[object]:
    """Training steps of a model at a rate; of all algorithms, unless some are named."""
    label = f"hosts=4,rate_mbit={rate_mbit},ranks_per_host=1"
    stem = f"training-{model}-{rate_mbit}"
    command = [HERE / "training.py", "--model", model, "--label", label, "--trace-overlap"]
    command += [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    command += ["--algorithms", algorithms] if algorithms else []
    return hosts(f"{rate_mbit}mbit", *command, "--json", RESULTS / f"{stem}.json")


def shared_memory(count: int) -> list[object]:
    """Exact allreduce on this machine, beside MPI's and gloo's."""
    sweep = ("-b", "1M", "-e", "32M", "-f", 2, "-n", 25)
    script = (HERE / "collectives.py", "allreduce", "--gloo", *sweep, "--json", RESULTS / "shared.json")
    return ranks(count, *script)


def tuner(model: str, bucket_bytes: str) -> list[object]:
    """Every bucket size of the grid, and the tuner's search among them."""
    search = ("--trials", 4, "--steps", 2, "--rounds", 1, "--rematches", 2)
    script = (HERE / "tuner.py", "--model", model, "--algorithm", "exact", "--bucket-bytes", bucket_bytes)
    return hosts("1gbit", *script, *search, "--output", RESULTS / "tuner")


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

JOBS: dict[str, list[list[object]]] = {
    "training": [
        training("vgg16", 1000, MAIN, rounds=2, steps=3, warmup=1),
        training("vgg16", 500, MAIN, rounds=1, steps=3, warmup=1),
        training("vgg16", 10000, MAIN, rounds=1, steps=3, warmup=1),
        training("resnet50", 1000, rounds=1, steps=3, warmup=2),
        training("bert-large", 1000, "alone,ddp,exact,bytegrad", rounds=1, steps=2, warmup=1, sequence=32),
        [HERE / "training.py", "report", *MEASURED, "--out", RESULTS / "training"],
        [HERE / "costmodel.py", *MEASURED, "--out", RESULTS],
    ],
    "network": [
        network("1gbit"),
        network("10gbit"),
        [HERE / "network_report.py", RESULTS, "--out", RESULTS / "network"],
    ],
    "shared": [shared_memory(2)],
    "codecs": [[HERE / "codecs.py", "--json", RESULTS / "codecs.json"]],
    "tuner": [tuner("resnet50", "1M,4M,16M,64M")],
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[*JOBS], default=[*JOBS], metavar="JOB")
    options = parser.parse_args(argv)
    for name in options.only:
        for job in JOBS[name]:
            command = [sys.executable, *map(str, job)]
            print(f"# {' '.join(command)}", flush=True)
            start = time.monotonic()
            code = subprocess.run(command, cwd=HERE.parent).returncode
            print(f"# {time.monotonic() - start:.0f} s", flush=True)
            if code:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
