"""All checks and measurements that need a GPU, in one command of about eleven minutes, into one JSON record.

On a machine with one NVIDIA GPU, in a clone of this repository:

    pip install '.[cuda13,torch,test]' && python -m benchmarks.gpu --out benchmarks/results/gpu.json

(`cuda12` for a driver of that generation; `pip install nvidia-cuda-sanitizer-api` brings compute-sanitizer.)
Where nothing can be installed, but CuPy, PyTorch, pytest and pytest-timeout are there, run the second command
alone, in the root of the repository. Sections, each in processes of its own, the most important first:

    device          the GPU and the versions above it (device.py)
    kernel-tests    pytest -m gpu tests/gpu/test_gpu_kernels.py
    occupancy       CTAs, registers and memory of the codec's kernels (occupancy.py)
    codecs          codecs and element-wise steps beside a copy and plain operations (codecs.py)
    costs           kernels, collectives, host time of quantized_allreduce, 2 ranks (ranks.py); graphs of it
    rank-tests      pytest -m gpu tests/gpu/test_gpu_ranks.py
    torch-tests     pytest -m gpu tests/gpu/test_gpu_torch.py
    training-tests  pytest -m gpu tests/gpu/test_gpu_training.py
    ranks           averages between 2 and 4 ranks over NCCL, and 2 over host memory, beside NCCL's own
    sanitizer       compute-sanitizer over tests of the kernels
    training        a model on 2 ranks, beside PyTorch's DistributedDataParallel and FSDP2 (training.py)
    threads         averages between ranks that are threads

Each section has its own limit of time, and the time that earlier ones have left over. Its outcome is "passed",
"failed", "out of time" or "left out", with the reason. Whatever the outcome, the next section begins when all
processes of this one are gone.

With `--out FILE.json`, every result is appended to FILE.jsonl as soon as it is known, and everything that is
printed to FILE.log. After each section the record, FILE.json, is made of these lines. If this command itself is
killed,

    python -m benchmarks.gpu --report --out FILE.json

makes it of the lines that are there. In the record, `steps` lists each codec's share of a copy's speed, the
share that arithmetic expects, and the share aimed at (report.py); `targets` lists the other targets; `checks`
says which results were wrong; `not_done` says what was not done, or not to its end, and why.

`--shrink`, and with it `--quick`, shows that the program works, but not how fast it is: small arrays fit into the
cache, and launches take longer than the work. `of_copy` means nothing then, and no step meets or misses a target.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..bench import RESULTS, ROOT
from ..bench.record import begin_record, write_json
from . import report as reports
from .keeper import leave
from .lines import append, read
from .report import Results
from .sections import SECTIONS, TOOLS, Run, Section, SectionError

TOTAL_S = 670.0
"""The limit of everything together, and the sum of the sections' limits."""

LEAST_S = 1.0
"""With less time than this a section is left out."""

QUICK = {"shrink": 16, "iterations": 5}


def recorded(section: Section, run: Run) -> Results:
    """Run a section, and catch its errors; returns its entry, which is in the lines, too."""
    place, began = ["sections", section.name], time.monotonic()
    limit_s = round(run.left_s, 1)
    entry: Results = {"outcome": "left out", "reason": "no time was left for it"}
    if limit_s >= LEAST_S:
        # The record says this if this process is killed.
        begun = {"outcome": "out of time", "reason": "the command was ended meanwhile", "limit_s": limit_s}
        append(run.lines, place, {**begun, "date": now(), "commit": run.options.commit})
        entry = {"outcome": "passed", "reason": None}
        try:
            section.run(run)
        except SectionError as exc:
            entry = {"outcome": exc.outcome, "reason": str(exc)}
        except Exception as exc:
            entry = {"outcome": "failed", "reason": f"{type(exc).__name__}: {exc}"}
    entry["seconds"] = round(time.monotonic() - began, 1)
    for name, value in entry.items():
        append(run.lines, [*place, name], value)
    return entry


# ---------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; `--quick` sets two of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [section.name for section in SECTIONS]
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json", metavar="FILE.json")
    parser.add_argument(
        "--report", action="store_true", help="only make the record, of the lines of an earlier run"
    )
    parser.add_argument(
        "--quick", action="store_true", help="smaller arrays, fewer calls: says nothing about speed"
    )
    parser.add_argument(
        "--sections", nargs="+", choices=names, default=names, metavar="SECTION", help="only these"
    )
    parser.add_argument(
        "--limit-s", type=float, default=TOTAL_S, metavar="S", help="seconds for everything; sections share them"
    )
    parser.add_argument(
        "--shrink", type=int, metavar="N", help="make all arrays N times smaller: says nothing about speed"
    )
    parser.add_argument("--iterations", type=int, metavar="N", help="how often each call is timed")
    dtypes, transports = ["float32", "float16", "bfloat16"], ["nccl", "staged"]
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes, help="dtypes of codecs")
    parser.add_argument(
        "--transports", nargs="+", choices=transports, default=transports, help="transports of ranks"
    )
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS[:1], help="tools of compute-sanitizer")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="where training runs")
    parser.add_argument("--commit", metavar="HASH", help="the commit of these files, where git is missing")
    options = parser.parse_args(argv)
    if options.out.suffix != ".json":
        parser.error(f"--out {options.out}: expected a name that ends in .json")
    defaults = QUICK if options.quick else {"shrink": 1, "iterations": 20}
    options.shrink = options.shrink or defaults["shrink"]
    options.iterations = options.iterations or defaults["iterations"]
    return options


def commit() -> str:
    """The commit of this clone, and whether files differ from it; "unknown" without git."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def now() -> str:
    """The time, with its zone."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def before(file: Path) -> Path:
    """Path to which the file of the last run moves until this run has found a GPU."""
    return file.with_name(f"{file.name}.before")


def begin_lines(lines: Path, options: argparse.Namespace, chosen: Sequence[Section]) -> None:
    """Begin the file of lines with what is known before any section runs."""
    lines.parent.mkdir(parents=True, exist_ok=True)
    options.commit = options.commit or commit()
    for file in (lines, lines.with_suffix(".log")):
        if file.exists():
            file.replace(before(file))
        file.write_text("")
    arguments = argparse.Namespace(
        **{key: value if isinstance(value, int) else str(value) for key, value in vars(options).items()}
    )
    record: dict[str, Any] = begin_record("gpu", arguments)
    del record["ranks"]
    record["date"] = now()
    record["commit"] = options.commit
    waiting = {"outcome": "left out", "reason": "the command was ended before"}
    record["sections"] = {section.name: waiting for section in chosen}
    for name, value in record.items():
        append(lines, [name], value)


def report(options: argparse.Namespace) -> Results:
    """Make the record of the lines that there are."""
    record = reports.report(read(options.out.with_suffix(".jsonl")))
    write_json(options.out, record)
    return record


def run_sections(options: argparse.Namespace) -> str | None:
    """Run the chosen sections one after the other; if nothing can be measured, returns the reason."""
    began = time.monotonic()
    chosen = [section for section in SECTIONS if section.name in {"device", *options.sections}]
    stretch = options.limit_s / sum(section.limit_s for section in chosen)
    begin_lines(options.out.with_suffix(".jsonl"), options, chosen)
    end = began
    for section in chosen:
        end += section.limit_s * stretch
        run = Run(options, section.name, end)
        entry = recorded(section, run)
        print(f"{section.name:<14}{entry['outcome']:<13}{entry['seconds']:>6} s", flush=True)
        if entry["outcome"] != "passed":
            print(entry["reason"], file=sys.stderr, flush=True)
        if section.name == "device":
            if entry["outcome"] != "passed":
                return "There is no GPU here that CuPy can use; nothing was measured."
            stand_in = read(run.lines)["sections"]["device"].get("results", {}).get("stand_in")
            if stand_in and options.out.resolve().parent == RESULTS:
                return "Figures of a stand-in for CuPy are not results; give --out, to put them elsewhere."
        report(options)
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections; 0 if all have passed or were left out, and all results are right."""
    options = parse_arguments(argv)
    lines = options.out.with_suffix(".jsonl")
    if options.report and not lines.exists():
        print(f"there is no file of lines {lines}; run without --report first", file=sys.stderr)
        return 2
    if not options.report:
        try:
            obstacle = run_sections(options)
        except BaseException:
            if lines.exists():
                report(options)
            raise
        for file in (lines, lines.with_suffix(".log")):
            if obstacle and before(file).exists():
                before(file).replace(file)
            elif obstacle:
                file.unlink(missing_ok=True)
            before(file).unlink(missing_ok=True)
        if obstacle:
            print(obstacle, file=sys.stderr)
            return 2
    record = report(options)
    print(*reports.summary(record), sep="\n")
    outcomes = {entry["outcome"] for entry in record["sections"].values()}
    return 1 if outcomes & {"failed", "out of time"} or record["checks"]["wrong"] else 0


def command() -> NoReturn:
    """The command: SIGTERM ends its sections, and then itself."""
    signal.signal(signal.SIGTERM, leave)
    sys.exit(main())
