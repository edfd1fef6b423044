"""Each program starts, measures its smallest case, finds nothing wrong and writes its record."""

import doctest
import importlib
import json
import subprocess
import sys
from typing import NamedTuple

import pytest
from support.launch import TIME_FACTOR, run_python, torchrun, with_packages

from bagua_comm.launch.mpirun import find_mpirun
from benchmarks.bench import ROOT


class Case(NamedTuple):
    """Arguments of a program; the last one is followed by the path of its record."""

    arguments: str
    ranks: int = 0
    """Under `bagua run`; without it if 0."""
    needs: str = ""


TINY = "--model tiny --image-size 16 --steps 1 --rounds 1"
CASES = {
    "backend": Case("--sizes 64 --iters 1 --width 8 --json", 2, "torch"),
    "checkpoint": Case("--megabytes 0.2 -n 1 --ranks 2 --json", 0, "torch"),
    "codec_quality": Case("--codec Float16() Int4() --elements 4096 --steps 1 --out", 0, "torch sklearn"),
    "codecs": Case("-b 64K -e 64K -n 1 -w 1 --json"),
    "collectives": Case("-b 8 -e 8 -n 1 -w 0 --json"),
    "collectives beside others": Case(
        "allreduce quantized_allreduce --beside mpi4py,gloo,ring -b 400 -e 400 -n 1 -o avg --json", 2, "torch"
    ),
    "collectives overhead": Case("overhead --batches 2 --calls 2 -w 1 --json", 2),
    "data": Case(
        "--samples 128 --batch-size 2 --rounds 1 --ranks 2 --images 8 --workers 0 --repeats 1 --json",
        0,
        "torch lmdb msgpack redis xxhash",
    ),
    "first_run": Case("-n 1 --rounds 1 --epochs 1 --kinds without --json", 0, "torch numba sklearn"),
    "fsdp": Case("--width 64 --layers 2 -n 1 -w 1 --json", 2, "torch"),
    "fsdp.loss": Case("--width 64 --layers 1 --steps 2 --batch-size 1 --windows 8 --seeds 0 --json", 0, "torch"),
    "fsdp.sites": Case(
        "--width 64 --layers 1 --steps 2 --batch-size 1 --windows 8 --seeds 0 --sites 1 --json", 0, "torch"
    ),
    "fused": Case("-t 20 -e 5 -n 3 -w 1 --optimizer adam --json", 0, "torch"),
    "hooks": Case("-t 6 -e 3 -n 1 -s 2 -w 1 --json", 2, "torch"),
    "functions": Case("--warmup 3 --repetitions 3 --json", 2),
    "halos": Case("-s 4 -n 2 --json", 2),
    "health": Case("quiet --steps 100 --json"),
    "latency": Case("-s 4 -n 2 --json", 2),
    "net_check": Case("--messages 800 --builds short --json"),
    "programs": Case("ppo --launchers bagua --json", 0, "torch"),
    "reproducible": Case("-b 64K -e 64K -n 1 -w 1 --json"),
    "training": Case(f"{TINY} --algorithms ddp,exact,bytegrad --bucket-bytes 64K --json", 2, "torch"),
    "training.scaling": Case("--model-bytes 64K --rounds 1 --rate-mbit 100 --json", 2),
    "training.tuner": Case(f"{TINY} --bucket-bytes 1K,64K --rematches 1 --out", 2, "torch"),
}
BY_DEFAULT = {"collectives"}
ELSEWHERE = {
    "convergence": "test_convergence.py",
    "faults": "tests/test_faults.py",
    "figures": "test_figures.py",
    "gpu": "test_gpu.py",
    "many": "test_many.py",
    "net": "hosts of netlab",
    "netlab": "test_netlab.py",
    "slurm": "tests/clusters/test_slurm.py",
    "soak": "a minute at least; test_soak.py",
    "timelines": "hosts of netlab",
}


def marks(name):
    packages = CASES[name].needs.split()
    needs = [pytest.mark.needs(*packages)] if packages else []
    return needs if name in BY_DEFAULT else [*needs, pytest.mark.slow, pytest.mark.timeout(330)]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CASES])
def test_the_smallest_case_is_measured_and_recorded(tmp_path, name):
    program, case, path = name.split()[0], CASES[name], tmp_path / "record.json"
    stem = case.arguments.endswith("--out")
    arguments = ["-m", f"benchmarks.{program}", *case.arguments.split(), path.with_suffix("") if stem else path]
    if program == "fsdp":
        done = torchrun(case.ranks, *arguments)
    elif case.ranks:
        if find_mpirun() is None:
            pytest.skip("there is no mpirun")
        done = run_python(case.ranks, *arguments, timeout_s=300)
    else:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT,
            env={**with_packages(), "NUMBA_OPT": "0"},
            capture_output=True,
            text=True,
            timeout=TIME_FACTOR * 300,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    record = json.loads(path.read_text())
    assert record.keys() >= {"machine", "versions", "arguments"}
    assert record.get("ranks", 1) == max(1, case.ranks)
    measured = [record[key] for key in ("results", "samplers", "cache", "errors") if key in record]
    assert measured
    assert all(measured)
    assert list(wrong(measured)) == []
    assert not stem or path.with_suffix(".md").read_text()


def wrong(found, at=""):
    """What a record says to be wrong, wherever it is."""
    if isinstance(found, dict):
        for key, value in found.items():
            if key in ("wrong", "faults", "problems"):
                if value:
                    yield f"{at}/{key}: {value}"
            elif key == "result" and value not in ("equal", None):
                yield f"{at}/{key}: {value}"
            else:
                yield from wrong(value, f"{at}/{key}")
    elif isinstance(found, list):
        for number, value in enumerate(found):
            yield from wrong(value, f"{at}/{number}")


def test_wrong_results_are_found():
    assert list(wrong([{"forms": {"a": {"wrong": 0}, "b": {"wrong": 2}}}, {"faults": []}])) == [
        "/0/forms/b/wrong: 2"
    ]


def test_every_program_has_a_case():
    folder = ROOT / "benchmarks"
    programs = {path.stem for path in folder.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    programs |= {path.parent.name for path in folder.glob("*/__main__.py")}
    assert programs == {name.split()[0].split(".")[0] for name in CASES} | ELSEWHERE.keys()


EXAMPLES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if "    >>> " in path.read_text()
)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_in_docstrings(name):
    module = importlib.import_module(name.removesuffix(".__init__"))
    assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0
