"""The cost of a first run: examples/train.py without Numba, and with it where nothing has been compiled yet.

    python -m benchmarks.first_run --ranks 2 --rounds 3 --epochs 15
    python -m benchmarks.first_run --kinds without first

Three kinds of runs take turns: without Numba; a first one, whose home is empty, so that kernels are compiled in
the background; and a later one, which finds them on disk. Compare images a second within one run of this
benchmark; seconds are from the start of the processes to their end, imports and all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from .bench import ROOT
from .bench.arguments import at_least
from .bench.record import begin_record, header_lines, write_json
from .bench.table import Column, Table, number
from .bench.timing import Spread

KINDS = ("without", "first", "later")

TABLE = Table(
    (
        Column("run", width=9),
        Column("images", "(1/s)", 9),
        Column("q1", "", 9),
        Column("q3", "", 9),
        Column("images", "/without", 8),
        Column("all", "(s)", 7),
    )
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark, or one rank of a training."""
    options = parse_arguments(argv)
    if options.rank_of is not None:
        _train(options.rank_of == "without", options.epochs)
        return
    record = begin_record("first_run", options, packages=("numba", "llvmlite", "torch"))
    print(*header_lines(record), sep="\n")
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in options.kinds}
    with tempfile.TemporaryDirectory() as kept:
        if "later" in options.kinds:
            code = "from bagua_comm import kernels; kernels.compile_now()"
            subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=_at_home(kept), check=True)
        for _ in range(options.rounds):
            for kind in options.kinds:
                with tempfile.TemporaryDirectory() as empty:
                    found[kind].append(_run(kind, kept if kind == "later" else empty, options))
    record["results"] = [_summary(kind, found) for kind in options.kinds]
    print(*TABLE.header(), sep="\n")
    for result in record["results"]:
        print(TABLE.row(_cells(result)))
    if options.json:
        write_json(options.json, record)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-n", "--ranks", type=at_least(1), default=2)
    parser.add_argument("--rounds", type=at_least(1), default=3, help="runs of each kind")
    parser.add_argument("--epochs", type=at_least(1), default=15, help="of each training")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of runs; all by default")
    parser.add_argument("--json", type=Path, help="write a record to this file")
    parser.add_argument("--rank-of", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _train(without: bool, epochs: int) -> None:
    """Take part in a training."""
    if without:
        sys.modules["numba"] = None  # type: ignore[assignment]  # as if it were not installed
    sys.argv = ["train.py", "--epochs", str(epochs)]
    runpy.run_path(str(ROOT / "examples" / "train.py"), run_name="__main__")


def _at_home(home: str) -> dict[str, str]:
    return {**os.environ, "HOME": home}


def _run(kind: str, home: str, options: argparse.Namespace) -> dict[str, float]:
    """Images a second of a training, and the seconds that all took."""
    command = [sys.executable, "-m", "bagua_comm", "run", "-n", str(options.ranks), "-m", "benchmarks.first_run"]
    command += ["--rank-of", kind, "--epochs", str(options.epochs)]
    start = time.perf_counter()
    said = subprocess.run(command, cwd=ROOT, env=_at_home(home), stdout=subprocess.PIPE, text=True, check=True)
    seconds = time.perf_counter() - start
    line = re.search(r"result: (.*)", said.stdout)
    if line is None:
        raise RuntimeError(f"examples/train.py printed no result:\n{said.stdout}")
    return {"images_per_s": json.loads(line[1])["images_per_s"], "seconds": seconds}


def _summary(kind: str, found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    rates = {name: np.array([run["images_per_s"] for run in runs]) for name, runs in found.items()}
    return {
        "run": kind,
        "images_per_s": asdict(Spread.of(rates[kind])),
        "of_without": float(np.median(rates[kind]) / np.median(rates[next(iter(rates))])),
        "seconds": asdict(Spread.of(np.array([run["seconds"] for run in found[kind]]))),
    }


def _cells(result: dict[str, Any]) -> list[str]:
    rate = result["images_per_s"]
    return [
        result["run"],
        *(number(rate[name]) for name in ("median", "q1", "q3")),
        number(result["of_without"]),
        number(result["seconds"]["median"]),
    ]


if __name__ == "__main__":
    main()
