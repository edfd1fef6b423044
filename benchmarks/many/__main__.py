"""Train the smallest model on 64 or 128 processes of this machine: start, steps, memory of a rank, failures.

    python -m benchmarks.many --ranks 64 --out benchmarks/results/many
    python -m benchmarks.many --ranks 8 --algorithms exact --elastic 0

Each algorithm trains for 20 steps, one after the other in one job. The weights must be equal on all ranks at the
end, the loss must fall, and those of exact averages must be, up to rounding, those of a single rank on the same
images. Then 32 processes train under `elastic.run`, and two of them are killed. Times are those of ranks that
share few cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import bagua_comm
from bagua_comm.testing import run_ranks

from ..bench import ROOT
from ..bench.arguments import add_out_argument, at_least, comma_list, one_of
from ..bench.record import Record, begin_record, header_lines, write_json
from ..bench.report import write_report
from ..faults.__main__ import line_of, tried, write_digits
from ..faults.model import Data
from ..faults.numpy_model import NumpyModel
from ..faults.plans import Blow, Case, Trial
from . import report
from .training import ALGORITHMS

STEPS = 20

TOLERANCE = 1e-4
"""The largest difference between exact weights and those of a single rank."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs; 0 if none fails."""
    options = parse_arguments(argv)
    record = begin_record("many", options, packages=["mpi4py"]) | {"ranks": options.ranks}
    print(*header_lines(record), sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        data = write_digits(Path(folder, "digits.npz"))
        record |= trained(options.algorithms, options.ranks, data, options.limit)
        print(*report.lines(record), sep="\n", flush=True)
        _write(options.out, record)
        if options.elastic:
            record["elastic"] = elastic(options.elastic, data, options.limit)
            print(line_of(record["elastic"]), flush=True)
            _write(options.out, record)
    failed = record["problems"] or any(row["problems"] for row in record["results"])
    return 1 if failed or record.get("elastic", {}).get("outcome") in ("failed", "missed") else 0


def trained(names: Sequence[str], ranks: int, data: Path, limit_s: float) -> dict[str, Any]:
    """Train with these algorithms; the part of the record about that."""
    with tempfile.TemporaryDirectory() as folder:
        out, began = Path(folder, "out.json"), time.monotonic()
        command = [sys.executable, "-m", "bagua_comm", "run", "-n", str(ranks), "-m", "benchmarks.many.training"]
        command += ["--data", str(data), "--out", str(out), "--algorithms", ",".join(names)]
        command += ["--steps", str(STEPS), "--timeout-s", str(limit_s), "--began", str(began)]
        code, output = _run(command, limit_s)
        problems = [f"it did not end in {limit_s:.0f} s"] if code is None else []
        problems += [f"exit code {code}"] if code else []
        found = json.loads(out.read_text()) if out.exists() else {"start": [], "trained": {}}
        problems += [f"{name} did not end" for name in names if name not in found["trained"]]
        rows = []
        for name, measured in found["trained"].items():
            wrong = list(_wrong(name, ranks, measured, data, out.with_name(f"{name}.npz")))
            rows.append({"name": name, **report.summary(measured), "problems": wrong})
        facts = {"seconds": round(time.monotonic() - began, 1), "start": report.start_of(found["start"])}
        said = output.splitlines()[-40:] if problems else []
        return {**facts, "results": rows, "problems": problems, "output": said}


def _run(command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Run a command; its exit code, None if it did not end in time, and its output."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
        )
        with suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)
        code = process.returncode
        if code is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
        output.seek(0)
        return code, output.read().decode(errors="replace")


def _wrong(name: str, ranks: int, measured: list[dict[str, Any]], data: Path, weights: Path) -> Iterator[str]:
    """What is wrong with the outcome of a training."""
    if len(measured) != ranks:
        yield f"{len(measured)} ranks measured, expected {ranks}"
    before, after = measured[0]["loss"]
    if not after < before:
        yield f"the loss went from {before:.3f} to {after:.3f}"
    if name in ("exact", "hierarchical"):
        with np.load(weights) as found:
            pairs = zip(found.values(), alone(ranks, data), strict=True)
            error = max(float(np.abs(got - expected).max()) for got, expected in pairs)
        if not error <= TOLERANCE:
            yield f"the weights are {error:.2g} from those of a single rank"


def alone(ranks: int, data: Path) -> list[np.ndarray]:
    """The weights of a single rank that trains on the images of so many."""

    def train(comm: Any) -> list[np.ndarray]:
        model = NumpyModel(Data(data, microbatches=ranks), bagua_comm.GradientAllReduce(), alike=True)
        steps = model.connect(comm)
        for step in range(STEPS):
            steps.take(step)
        steps.close()
        return model.weights()

    (weights,) = run_ranks(1, train)
    return weights


def elastic(ranks: int, data: Path, limit_s: float) -> dict[str, Any]:
    """Train under `elastic.run`, and kill two ranks; the row of the trial, as those of `benchmarks.faults`."""
    case = Case("GradientAllReduce()")
    blows = (Blow("step", 5, 0.0, choices=(0.3,)), Blow("step", 12, 0.0, choices=(0.8,)))
    trial = Trial(
        f"elastic-{ranks}",
        "fewer",
        case,
        spares=0,
        min_ranks=ranks - 2,
        steps=STEPS,
        commit_every=1,
        blows=blows,
        timeout_s=limit_s / 4,
        ranks=ranks,
        microbatches=2 * ranks,
        limit_s=limit_s,
    )
    return tried(trial, data, {"undisturbed": {}})


def _write(stem: Path, record: Record) -> None:
    write_json(stem.with_suffix(".json"), record)
    write_report(stem, lambda _: report.markdown(record))


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    known = comma_list(one_of(ALGORITHMS, "algorithm"))
    parser.add_argument("--ranks", type=at_least(2), default=64, help="processes of the job (64)")
    parser.add_argument(
        "--algorithms", type=known, default=list(ALGORITHMS), metavar="LIST", help="by default all"
    )
    parser.add_argument(
        "--elastic", type=at_least(0), default=32, help="processes of the elastic job, 3 or more (32); 0: none"
    )
    parser.add_argument("--limit", type=at_least(1), default=600, help="seconds that a job may take (600)")
    add_out_argument(parser, ROOT / "benchmarks" / "results" / "many", "json", "md")
    options = parser.parse_args(argv)
    if options.elastic in (1, 2):
        parser.error(f"--elastic: {options.elastic} processes cannot lose two; give 3 or more, or 0 for none")
    return options


if __name__ == "__main__":
    sys.exit(main())
