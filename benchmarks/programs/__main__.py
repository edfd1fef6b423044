"""Programs as others write them, trained with PyTorch's parts and with ours.

    python -m benchmarks.programs                       # all of them, on 2 ranks
    python -m benchmarks.programs nanogpt dino --ranks 3 --launchers torchrun

`loops/` has small programs in the style of public ones. Each runs as it is, and then with the smallest changes
that the documentation promises (`changes.py`), started by torchrun, `bagua run` and mpirun. The weights of each
rank are compared after every step of an optimizer, and at the end the line that rank 0 printed. Nothing is
fetched. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..bench import ROOT
from ..bench.arguments import at_least
from ..bench.record import begin_record, header_lines, write_json
from ..bench.table import Column, Table
from .changes import CHANGES, LAUNCHERS, LOOPS, Change, chosen

LIMIT_S = 300.0

TABLE = Table(
    (
        Column("program", width=18),
        Column("change", width=16),
        Column("launcher", width=9),
        Column("steps", "", 6),
        Column("equal", "", 6),
        Column("largest", "difference", 11),
        Column("result", width=10),
    )
)


@dataclass(frozen=True)
class Run:
    """What a run of a program left.

    Attributes:
        steps: By rank, then by step: the weights after it.
        result: The line that rank 0 printed.
        error: The end of its output, if it failed.
    """

    steps: dict[int, list[list[torch.Tensor]]]
    result: str
    error: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the programs; the number of differences, at most 1."""
    options = parse_arguments(argv)
    record = begin_record("programs", options, packages=("torch", "accelerate", "transformers"))
    print(*header_lines(record), *TABLE.header(), sep="\n")

    @functools.cache
    def reference(program: str, ranks: int) -> Run:
        return run((LOOPS / f"{program}.py").read_text(), "torchrun", ranks)

    record["results"] = []
    for program, change, launcher in chosen(options.programs, options.launchers):
        theirs = reference(program, 1 if change.alone else options.ranks)
        ours = run(change.apply((LOOPS / f"{program}.py").read_text()), launcher, options.ranks)
        row = {"program": program, "change": change.name, "launcher": launcher, **compare(theirs, ours, change)}
        record["results"].append(row)
        print(TABLE.row([*map(str, row.values())][: len(TABLE.columns)]), flush=True)
        for error in filter(None, (theirs.error, ours.error)):
            print(error)
    if options.json:
        write_json(options.json, record)
    return int(any(row["result"] != "equal" for row in record["results"]))


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("programs", nargs="*", help=f"of {', '.join(CHANGES)}; all by default")
    parser.add_argument("-n", "--ranks", type=at_least(1), default=2)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--json", type=Path, help="write a record to this file")
    options = parser.parse_args(argv)
    options.programs = options.programs or list(CHANGES)
    unknown = [name for name in options.programs if name not in CHANGES]
    if unknown:
        parser.error(f"there is no program {unknown[0]!r}, expected some of {', '.join(CHANGES)}")
    return options


def run(text: str, launcher: str, ranks: int) -> Run:
    """Run a program and read what it left."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program.py").write_text(text)
        (folder / "records").mkdir()
        command = [*command_of(launcher, ranks), "-m", "benchmarks.programs.recorded"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": name}
        try:
            ended = subprocess.run(
                [*command, str(folder / "records"), str(folder / "program.py")],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired as exc:
            return Run({}, "", f"it had not ended after {LIMIT_S:.0f} s: {str(exc.stdout)[-2000:]}")
        if ended.returncode:
            return Run({}, "", f"exit status {ended.returncode}: {ended.stdout[-3000:]}")
        records = [torch.load(path) for path in (folder / "records").iterdir()]
        found = re.findall(r"result: (.*)", ended.stdout)
    steps = {rank: kept["steps"] for kept in records for rank in kept["ranks"]}
    if sorted(steps) != list(range(ranks)) or len(found) != 1:
        return Run(steps, "", f"{len(records)} processes recorded ranks {sorted(steps)} and printed {found}")
    return Run(steps, found[0])


def command_of(launcher: str, ranks: int) -> list[str]:
    """The command that starts `ranks` processes on this machine."""
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    if launcher == "bagua":
        return [sys.executable, "-m", "bagua_comm", "run", "-n", str(ranks)]
    return ["mpirun", "-n", str(ranks), "--oversubscribe", sys.executable]


def compare(theirs: Run, ours: Run, change: Change) -> dict[str, Any]:
    """Steps, how many of them have equal bits on all ranks, the largest relative difference, and the verdict."""
    if theirs.error or ours.error:
        return {"steps": 0, "equal": 0, "largest": float("nan"), "result": "failed"}
    expected = {rank: theirs.steps[0 if change.alone else rank] for rank in ours.steps}
    lengths = {len(steps) for kept in (ours.steps, expected) for steps in kept.values()}
    n = min(lengths)
    pairs = [[(steps[i], expected[rank][i]) for rank, steps in ours.steps.items()] for i in range(n)]
    same = [all(torch.equal(a, b) for step in row for a, b in zip(*step, strict=True)) for row in pairs]
    largest = max(_difference(a, b) for row in pairs for step in row for a, b in zip(*step, strict=True))
    exact = all(same) and ours.result == theirs.result
    fits = len(lengths) == 1 and (exact or 0 < largest <= change.tolerance)
    return {
        "steps": n,
        "equal": sum(same),
        "largest": f"{largest:.1e}",
        "result": "equal" if fits else "different",
    }


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, relative to the largest element."""
    if not theirs.numel():
        return 0.0
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12))


if __name__ == "__main__":
    raise SystemExit(main())
