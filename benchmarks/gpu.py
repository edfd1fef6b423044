"""All checks and measurements that need a GPU, in one command of less than eight minutes, into one JSON record.

On a machine with one NVIDIA GPU, in a clone of this repository:

    pip install '.[cuda13,torch,test]' && python benchmarks/gpu.py --out benchmarks/results/gpu.json

(`cuda12` for a driver of that generation; `pip install nvidia-cuda-sanitizer-api` brings compute-sanitizer.)
Where nothing can be installed, but CuPy, PyTorch, pytest and pytest-timeout are there:

    PYTHONPATH=. python benchmarks/gpu.py --out benchmarks/results/gpu.json

Sections, each in processes of its own, within its own limit of time:

    device      what there is
    tests       pytest -m gpu tests/gpu
    codecs      codecs and element-wise steps beside a copy and plain operations (gpu_codecs.py)
    costs       kernels, collectives, host time and graph replay of quantized_allreduce, 2 ranks (gpu_ranks.py)
    threads     averages between ranks that are threads
    ranks       averages between 2 and 4 ranks over NCCL, and 2 over host memory, beside NCCL's own
    training    a model on 2 ranks, beside PyTorch's DistributedDataParallel (gpu_training.py)
    sanitizer   compute-sanitizer over tests of the kernels

A section that fails, or takes too long, is recorded with its error and with what it had found, and the next one
begins. The record is written anew after each. `targets` lists what was aimed at beside what was measured,
`checks` which of all results were right, `left_out` what was not done and why (gpu_report.py).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common import begin_record, write_json
from gpu_report import TARGETS, Results, checks, left_out, summary
from gpu_world import HERE, launch, run_limited

TOTAL_S = 465.0
"""For everything together."""

QUICK = {"shrink": 16, "iterations": 5}
OUTPUT_CHARACTERS = 4000
"""How much of what a failed section has printed is kept."""


class SectionError(Exception):
    """A section did not come to its end; `results` is how far it came."""

    def __init__(self, reason: str, results: Results | None = None) -> None:
        super().__init__(reason)
        self.results = results


class LeftOutError(Exception):
    """A section cannot run here."""


@dataclass
class Run:
    """What sections know of the command, and what they have in common."""

    options: argparse.Namespace
    folder: Path
    """For files of this run."""
    limit_s: float = 0.0
    """How long the section may take."""
    began: float = field(default_factory=time.monotonic)
    """When it began."""

    @property
    def left_s(self) -> float:
        """What is left of that."""
        return max(1.0, self.limit_s - (time.monotonic() - self.began))

    def part(
        self, script: str, *arguments: object, ranks: int = 1, mpi: bool = True, share: float = 1.0
    ) -> Results:
        """Run a part of this benchmark on some ranks, for a share of the time left; returns what it wrote."""
        out = self.folder / f"{len(list(self.folder.iterdir()))}.json"
        options = ["--out", out, "--shrink", self.options.shrink, "--iterations", self.options.iterations]
        command = [HERE / script, *arguments, *options]
        limit_s = self.left_s * share
        if ranks == 1:
            done = run_limited([sys.executable, *command], timeout_s=limit_s)
        else:
            done = launch(ranks, command, timeout_s=limit_s, mpi=mpi)
        results = json.loads(out.read_text()) if out.exists() else {}
        if done.returncode:
            raise SectionError(ending(done, limit_s), results)
        return results


def ending(done: subprocess.CompletedProcess[str], limit_s: float) -> str:
    """Why a process did not end well, and the last that it printed."""
    why = f"not done after {limit_s:.0f} s" if done.returncode == 124 else f"exit code {done.returncode}"
    return f"{why}: {done.stdout.strip()[-OUTPUT_CHARACTERS:]}"


# ---------------------------------------------------------------------------------------------------
# Sections
# ---------------------------------------------------------------------------------------------------


def device(run: Run) -> Results:
    """What there is."""
    return run.part("gpu_world.py")


GPU_TESTS = HERE.parent / "tests" / "gpu"


def gpu_tests(run: Run) -> Results:
    """The gpu tests."""
    report = run.folder / "tests.xml"
    command = ["-m", "pytest", "-m", "gpu", GPU_TESTS, "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    limit_s = run.left_s
    done = run_limited([sys.executable, *command], timeout_s=limit_s)
    if not report.exists():
        raise SectionError(ending(done, limit_s))
    results = counted(ElementTree.parse(report).getroot())
    if done.returncode:
        raise SectionError(f"{len(results['failures'])} tests failed", results)
    return results


def counted(report: ElementTree.Element) -> Results:
    """How many tests passed, and the names and messages of those that did not."""
    failures, skipped, count = [], 0, 0
    for case in report.iter("testcase"):
        count += 1
        skipped += case.find("skipped") is not None
        for problem in (*case.iter("failure"), *case.iter("error")):
            name = f"{case.get('classname')}::{case.get('name')}"
            failures.append({"test": name, "message": (problem.get("message") or "")[:OUTPUT_CHARACTERS]})
    return {"passed": count - skipped - len(failures), "skipped": skipped, "failures": failures}


def codecs(run: Run) -> Results:
    """Kernels, one by one."""
    return run.part("gpu_codecs.py", "--dtypes", *run.options.dtypes)


def costs(run: Run) -> Results:
    """What one call enqueues."""
    return run.part("gpu_ranks.py", "costs", ranks=2)


def threads(run: Run) -> Results:
    """Averages between threads."""
    return run.part("gpu_ranks.py", "threads")


def ranks(run: Run) -> Results:
    """Averages between processes."""
    found: Results = {}
    worlds = [(t, count) for t in run.options.transports for count in ((2, 4) if t == "nccl" else (2,))]
    for number, (transport, count) in enumerate(worlds):
        name, share = f"{transport}, {count} ranks", 1 / (len(worlds) - number)
        try:
            found[name] = run.part("gpu_ranks.py", "allreduce", "--gpu", transport, ranks=count, share=share)
        except SectionError as exc:
            found[name] = {"failed": str(exc), **(exc.results or {})}
    return without_failures(found)


def without_failures(found: Results) -> Results:
    """The results of several runs, if none of them has failed."""
    failed = [f"{name}: {each['failed']}" for name, each in found.items() if "failed" in each]
    if failed:
        raise SectionError("\n".join(failed), found)
    return found


def training(run: Run) -> Results:
    """Steps of a model."""
    if importlib.util.find_spec("torch") is None:
        raise LeftOutError("PyTorch is not installed")
    return run.part("gpu_training.py", "--device", run.options.device, ranks=2, mpi=False)


TOOLS = ("memcheck", "racecheck", "initcheck")


def sanitizer(run: Run) -> Results:
    """compute-sanitizer over some tests of the kernels; without CuPy's pool, whose arrays lie close together."""
    program = find_sanitizer(os.environ)
    if program is None:
        raise LeftOutError("compute-sanitizer is not installed")
    chosen = GPU_TESTS / "test_gpu_kernels.py"
    found: Results = {}
    for number, tool in enumerate(TOOLS):
        limit_s = run.left_s / (len(TOOLS) - number)
        pytest = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "gpu",
            chosen,
            "-k",
            "forward",
            "-q",
            "-p",
            "no:cacheprovider",
        ]
        command = [program, "--tool", tool, "--error-exitcode", "86", "--print-limit", "20", *pytest]
        done = run_limited(command, timeout_s=limit_s)
        summaries = re.findall(r"^=+ (.*SUMMARY: .*)$", done.stdout, re.MULTILINE)
        found[tool] = {"program": program, "exit_code": done.returncode, "summary": summaries}
        if done.returncode:
            found[tool]["failed"] = ending(done, limit_s)
    return without_failures(found)


def find_sanitizer(environment: Mapping[str, str]) -> str | None:
    """compute-sanitizer on the PATH, in the CUDA toolkit, or in an installed wheel."""
    homes = [environment.get("CUDA_HOME"), environment.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [str(Path(home) / "bin") for home in homes if home]
    path = os.pathsep.join([environment.get("PATH", ""), *folders])
    found = shutil.which("compute-sanitizer", path=path)
    if found:
        return found
    for name in ("nvidia-cuda-sanitizer-api", "nvidia-cuda-sanitizer-api-cu12"):
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == "compute-sanitizer" and os.access(file.locate(), os.X_OK):
                return str(file.locate())
    return None


@dataclass(frozen=True)
class Section:
    """A part of the record, and the most time that it may take."""

    name: str
    run: Callable[[Run], Results]
    limit_s: float


SECTIONS = [
    Section("device", device, 60),
    Section("tests", gpu_tests, 150),
    Section("codecs", codecs, 90),
    Section("costs", costs, 50),
    Section("ranks", ranks, 90),
    Section("training", training, 60),
    Section("threads", threads, 40),
    Section("sanitizer", sanitizer, 90),
]


def recorded(section: Section, run: Run, left_s: float) -> Results:
    """Run a section, whatever comes of it."""
    if left_s < 5:
        return {"outcome": "left out", "reason": "no time was left for it"}
    run.limit_s, run.began = min(section.limit_s, left_s), time.monotonic()
    entry: Results = {"outcome": "ok"}
    try:
        entry["results"] = section.run(run)
    except LeftOutError as exc:
        entry = {"outcome": "left out", "reason": str(exc)}
    except SectionError as exc:
        entry = {"outcome": "failed", "error": str(exc), "results": exc.results}
    except Exception as exc:
        entry = {"outcome": "failed", "error": f"{type(exc).__name__}: {exc}"}
    return {**entry, "seconds": round(time.monotonic() - run.began, 1)}


# ---------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; `--quick` sets two of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [section.name for section in SECTIONS]
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu.json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="smaller arrays, fewer calls")
    parser.add_argument(
        "--sections", nargs="+", choices=names, default=names, metavar="SECTION", help="only these"
    )
    parser.add_argument("--shrink", type=int, metavar="N", help="make all arrays N times smaller")
    parser.add_argument("--iterations", type=int, metavar="N", help="timed calls of each")
    dtypes, transports = ["float32", "float16", "bfloat16"], ["nccl", "staged"]
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes, help="of codecs")
    parser.add_argument("--transports", nargs="+", choices=transports, default=transports, help="of ranks")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="of training")
    options = parser.parse_args(argv)
    defaults = QUICK if options.quick else {"shrink": 1, "iterations": 20}
    options.shrink = options.shrink or defaults["shrink"]
    options.iterations = options.iterations or defaults["iterations"]
    return options


def commit() -> str:
    """The commit of this clone, and whether files differ from it; "unknown" without git."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=HERE,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections; 0 if none has failed, and all results are right."""
    options = parse_arguments(argv)
    began = time.monotonic()
    arguments = argparse.Namespace(**{key: str(value) for key, value in vars(options).items()})
    record = begin_record("gpu", arguments, ranks=1)
    del record["ranks"]
    record["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    record["commit"], record["stand_in"], sections = commit(), None, dict[str, Results]()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(options, Path(folder))
        for section in SECTIONS:
            if section.name not in {"device", *options.sections}:
                continue
            entry = recorded(section, run, TOTAL_S - (time.monotonic() - began))
            sections[section.name] = entry
            print(f"{section.name:<12}{entry['outcome']:<10}{entry.get('seconds', 0):>7} s", flush=True)
            if entry["outcome"] == "failed":
                print(entry["error"], file=sys.stderr)
            if section.name == "device":
                facts = entry.get("results") or {}
                record["stand_in"] = facts.get("stand_in")
                if entry["outcome"] == "failed":
                    print("There is no GPU here that CuPy can use; nothing was measured.", file=sys.stderr)
                    return 2
                if record["stand_in"] and options.out.resolve().parent == HERE / "results":
                    print("Figures of a stand-in for CuPy are no results; give --out.", file=sys.stderr)
                    return 2
            record.update(
                targets=[target.row(sections) for target in TARGETS],
                checks=checks(sections),
                left_out=left_out(sections),
                sections=sections,
            )
            write_json(options.out, record)
    print(*summary(record), sep="\n")
    failed = [name for name, entry in sections.items() if entry["outcome"] == "failed"]
    return 1 if failed or record["checks"]["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
