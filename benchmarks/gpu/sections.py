"""The sections of the GPU benchmark: what each runs, and how its processes end."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..bench import ROOT
from . import report as reports
from .lines import append, read
from .world import SECTION_ENDS, launch, run_limited

OUTPUT_CHARACTERS = 4000
"""The output of a failed section is kept in the record up to this length, from its end."""


class SectionError(Exception):
    """A section has failed."""

    outcome = "failed"


class OutOfTimeError(SectionError):
    """A section was ended because its time was up."""

    outcome = "out of time"


class LeftOutError(SectionError):
    """A section cannot run here."""

    outcome = "left out"


@dataclass(frozen=True)
class Run:
    """The command as a section sees it.

    Args:
        options: The arguments of the command.
        section: The section's name.
        end: When it has to be done, by `time.monotonic()`.
    """

    options: argparse.Namespace
    section: str
    end: float

    @property
    def left_s(self) -> float:
        """Seconds that are left to it."""
        return max(0.0, self.end - time.monotonic())

    @property
    def lines(self) -> Path:
        """The file of lines; see lines.py."""
        return self.options.out.with_suffix(".jsonl")

    @property
    def log(self) -> Path:
        """The file of everything that is printed."""
        return self.options.out.with_suffix(".log")

    def path(self, *under: str) -> list[str]:
        """The path of a result of this section in the record."""
        return ["sections", self.section, "results", *under]

    def part(
        self,
        *arguments: object,
        ranks: int = 1,
        mpi: bool = True,
        share: float = 1.0,
        under: Sequence[str] = (),
    ) -> None:
        """Run a part of this benchmark, `python *arguments`, on some ranks, for a share of the time left."""
        options = ["--shrink", self.options.shrink, "--iterations", self.options.iterations]
        out = ["--out", self.lines.absolute(), "--under", *self.path(*under)]
        command, limit_s = [*arguments, *options, *out], self.left_s * share
        if ranks == 1:
            done = run_limited([sys.executable, *command], timeout_s=limit_s, log=self.log)
        else:
            done = launch(ranks, command, timeout_s=limit_s, mpi=mpi, log=self.log)
        raise_unless_well(done, limit_s)

    def pytest(
        self,
        *arguments: object,
        through: Sequence[str] = (),
        share: float = 1.0,
        under: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        """Run tests on the GPU, perhaps through another program, for a share of the time left."""
        names = [argument for name in self.path(*under) for argument in ("--under", name)]
        plugins = ["-p", "benchmarks.gpu.pytest_lines", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=30"]
        options = ["-m", "gpu", "-q", *plugins, "--lines", self.lines.absolute(), *names]
        limit_s = self.left_s * share
        return run_limited(
            [*through, sys.executable, "-m", "pytest", *arguments, *options],
            timeout_s=limit_s,
            env={**os.environ, SECTION_ENDS: str(time.time() + limit_s)},
            log=self.log,
        )


def raise_unless_well(done: subprocess.CompletedProcess[str], limit_s: float) -> None:
    """Raise unless a process has ended well; the error has the reason, and the end of its output."""
    if not done.returncode:
        return
    printed = f": {done.stdout.strip()[-OUTPUT_CHARACTERS:]}".rstrip(": ")
    if done.returncode == 124:
        raise OutOfTimeError(f"not done after {limit_s:.0f} s{printed}")
    by = f"exit code {done.returncode}"
    if done.returncode - 128 in set(signal.Signals):
        by = f"ended by {signal.Signals(done.returncode - 128).name}"
    raise SectionError(f"{by}{printed}")


# ---------------------------------------------------------------------------------------------------
# Sections
# ---------------------------------------------------------------------------------------------------

GPU_TESTS = ROOT / "tests" / "gpu"
TESTS_FAILED = 1
"""pytest's exit code."""

NAMED = 5
"""Up to this many failed tests are named in the reason; the results have all of them."""


def device(run: Run) -> None:
    """The GPU and the versions above it."""
    run.part("-m", "benchmarks.gpu.device")


def kernel_tests(run: Run) -> None:
    """Tests of the kernels."""
    gpu_tests(run, "test_gpu_kernels.py")


def rank_tests(run: Run) -> None:
    """Tests of ranks: as threads, and over NCCL."""
    gpu_tests(run, "test_gpu_ranks.py")


def torch_tests(run: Run) -> None:
    """Tests of tensors, and of training on one rank."""
    of_torch(run, "test_gpu_torch.py")


def training_tests(run: Run) -> None:
    """Tests of training on two ranks, and of the backend of torch.distributed."""
    of_torch(run, "test_gpu_training.py")


def of_torch(run: Run, file: str) -> None:
    """Some of the gpu tests that need PyTorch."""
    if importlib.util.find_spec("torch") is None:
        raise LeftOutError("PyTorch is not installed")
    gpu_tests(run, file)


def gpu_tests(run: Run, file: str) -> None:
    """Some of the gpu tests."""
    limit_s = run.left_s
    done = run.pytest(GPU_TESTS / file)
    if done.returncode == TESTS_FAILED:
        found = reports.counted(read(run.lines)["sections"][run.section]["results"])
        names = [failure["test"] for failure in found["failures"]]
        raise SectionError(
            f"{len(names)} tests failed: {', '.join(names[:NAMED])}{', ...' * (len(names) > NAMED)}"
        )
    raise_unless_well(done, limit_s)


def occupancy(run: Run) -> None:
    """CTAs of the codec's kernels on a multiprocessor."""
    run.part("-m", "benchmarks.gpu.occupancy")


def codecs(run: Run) -> None:
    """Kernels, one by one."""
    run.part("-m", "benchmarks.gpu.codecs", "--dtypes", *run.options.dtypes)


def costs(run: Run) -> None:
    """Kernels and host time of one call, and launches of its graph, also without NCCL's events."""
    program, without = ("-m", "benchmarks.gpu.ranks"), "without NCCL_GRAPH_MIXING_SUPPORT"
    each_of(
        {
            "costs": partial(run.part, *program, "costs", ranks=2, share=0.7),
            without: partial(run.part, *program, "graphs", "--no-mixing", ranks=2, under=[without]),
        }
    )


def threads(run: Run) -> None:
    """Averages between threads."""
    run.part("-m", "benchmarks.gpu.ranks", "threads")


WORLDS = [("nccl", 2, 0.4), ("nccl", 4, 0.6), ("staged", 2, 1.0)]
"""Transports of device arrays, numbers of ranks, and their shares of the time left."""


def ranks(run: Run) -> None:
    """Averages between processes."""

    def compare(transport: str, count: int, share: float) -> None:
        under = [f"{transport}, {count} ranks"]
        program = ("-m", "benchmarks.gpu.ranks")
        run.part(*program, "allreduce", "--gpu", transport, ranks=count, share=share, under=under)

    each_of(
        {
            f"{transport}, {count} ranks": partial(compare, transport, count, share)
            for transport, count, share in WORLDS
            if transport in run.options.transports
        }
    )


def each_of(calls: Mapping[str, Callable[[], object]]) -> None:
    """Make all calls, and then raise their errors together."""
    found: dict[str, SectionError] = {}
    for name, call in calls.items():
        try:
            call()
        except SectionError as exc:
            found[name] = exc
    if found:
        kinds = {type(exc) for exc in found.values()}
        kind = OutOfTimeError if kinds == {OutOfTimeError} else SectionError
        raise kind("\n".join(f"{name}: {exc}" for name, exc in found.items()))


def training(run: Run) -> None:
    """Steps of a model."""
    if importlib.util.find_spec("torch") is None:
        raise LeftOutError("PyTorch is not installed")
    run.part("-m", "benchmarks.gpu.training", "--device", run.options.device, ranks=2, mpi=False)


TOOLS = ("memcheck", "racecheck", "initcheck")


def sanitizer(run: Run) -> None:
    """compute-sanitizer over some tests of the kernels; without CuPy's pool, whose arrays lie close together."""
    program = find_sanitizer(os.environ)
    if program is None:
        raise LeftOutError("compute-sanitizer is not installed")
    tools = run.options.tools

    def examine(tool: str, share: float) -> None:
        limit_s = run.left_s * share
        done = run.pytest(
            GPU_TESTS / "test_gpu_kernels.py",
            "-k",
            "forward or ((test_int4 or test_top_k) and float32)",
            through=[program, "--tool", tool, "--error-exitcode", "86", "--print-limit", "20"],
            share=share,
            under=[tool],
        )
        summaries = re.findall(r"^=+ (.*SUMMARY: .*)$", done.stdout, re.MULTILINE)
        for name, value in (("program", program), ("exit_code", done.returncode), ("summary", summaries)):
            append(run.lines, run.path(tool, name), value)
        raise_unless_well(done, limit_s)

    each_of({tool: partial(examine, tool, 1 / (len(tools) - i)) for i, tool in enumerate(tools)})


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
    """A part of the record, and the seconds that it may take in any case."""

    name: str
    run: Callable[[Run], None]
    limit_s: float


SECTIONS = [
    Section("device", device, 35),
    Section("kernel-tests", kernel_tests, 60),
    Section("occupancy", occupancy, 15),
    Section("codecs", codecs, 55),
    Section("costs", costs, 45),
    Section("rank-tests", rank_tests, 125),
    Section("torch-tests", torch_tests, 45),
    Section("training-tests", training_tests, 140),
    Section("ranks", ranks, 70),
    Section("sanitizer", sanitizer, 35),
    Section("training", training, 30),
    Section("threads", threads, 15),
]
