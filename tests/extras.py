"""Test the extras of pyproject.toml with the oldest and the newest versions that they allow.

    python tests/extras.py                        # all of them; needs uv, and a connection to a package index
    python tests/extras.py fast data --bounds oldest --python 3.10
    python tests/extras.py torch --here           # with what is installed beside this Python
    python tests/extras.py --report               # write the table of the results again

Each extra gets a virtual environment of its own, in which tests that concern it run; what needs other packages is
left out (tests/support/needs.py). Results: benchmarks/results/extras.json and, as a table, extras.md. "Oldest"
is the oldest release of each package that pyproject.toml names, with the newest that these need.

A row may have a "note", written by hand, which says what is to be known of it. A row without counts was not
measured; its note says why.

Where packages come from is up to uv's and pip's own settings: UV_FIND_LINKS, for one, names a folder of wheels.
`--with 'torch==2.13.0'` adds requirements; `--without-dependencies torch==2.15.0` takes wheels alone. On a busy
machine, `--patience 5` gives programs five times their limits.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "extras.json"
TOOLS = ["hypothesis", "pytest", "pytest-mpi", "pytest-timeout", "pytest-xdist", "safetensors"]
BOUNDS = {"oldest": "lowest-direct", "newest": "highest"}

TESTS = {
    "none": ["tests/comm/test_communicator.py", "tests/codecs/test_golden.py"],
    "fast": ["tests/kernels/test_compiled.py", "tests/codecs/test_golden.py"],
    "mpi": ["tests/test_mpirun.py"],
    "torch": [
        f"tests/bagua_torch/test_{part}.py" for part in ("ddp", "functional", "process_group", "torch_arrays")
    ],
    "data": ["tests/data"],
    "lightning": ["tests/bagua_torch/test_lightning.py"],
    "top": ["tests/commands/test_top.py"],
    "cuda12": ["tests/kernels/test_nvrtc.py", "tests/transports/test_nccl.py"],
    "cuda13": ["tests/kernels/test_nvrtc.py", "tests/transports/test_nccl.py"],
    "examples": ["tests/examples/test_examples.py", "-m", "slow", "-k", "experts"],  # these use all of it
}
"""The arguments of pytest for each extra; "none" is the package alone."""

BESIDE = {"examples": ["mpi"]}
"""Other extras that the tests of an extra need."""

SHOWN = {
    "none": ["numpy", "mpi4py", "ml_dtypes"],
    "fast": ["numba", "llvmlite", "numpy"],
    "mpi": ["openmpi", "mpi4py", "numpy"],
    "torch": ["torch", "numpy"],
    "data": ["lmdb", "msgpack", "redis", "xxhash", "numpy"],
    "lightning": ["lightning", "torch"],
    "top": ["rich"],
    "cuda12": ["cupy-cuda12x", "nvidia-nccl-cu12", "nvidia-cuda-nvrtc-cu12", "numpy"],
    "cuda13": ["cupy-cuda13x", "nvidia-nccl-cu13", "nvidia-cuda-nvrtc", "numpy"],
    "examples": ["torch", "matplotlib", "scikit-learn", "tqdm", "numpy"],
}
"""The packages of each extra whose versions the table shows."""


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=f"of {', '.join(TESTS)}; all by default")
    parser.add_argument("--bounds", choices=BOUNDS, action="append", help="both by default")
    parser.add_argument("--python", default=platform.python_version(), help="as uv takes it; this one by default")
    parser.add_argument("--with", dest="added", action="append", default=[], metavar="REQUIREMENT")
    parser.add_argument("--without-dependencies", action="append", default=[], metavar="REQUIREMENT")
    parser.add_argument("--here", action="store_true", help="test what is installed, as the first of --bounds")
    parser.add_argument("--patience", type=float, default=1.0, help="what time limits are multiplied by")
    parser.add_argument("--report", action="store_true", help="only write the table")
    options = parser.parse_args(arguments)
    if unknown := {*options.extras} - TESTS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(TESTS)}")
    failed = 0
    if not options.report:
        for extra in options.extras or TESTS:
            for bound in options.bounds or BOUNDS:
                if options.here:
                    bound = options.bounds[0] if options.bounds else "installed"
                    row = measured(extra, sys.executable, bound, options.patience)
                else:
                    with tempfile.TemporaryDirectory(prefix=f"{extra}-{bound}-") as folder:
                        python = install(extra, bound, folder, options)
                        row = measured(extra, python, bound, options.patience)
                print(json.dumps(row), flush=True)
                keep(row)
                failed += row["failed"]
                if options.here:
                    break
    RESULTS.with_suffix(".md").write_text(table(rows()))
    return int(failed > 0)


def install(extra, bound, folder, options):
    """Make a virtual environment in `folder`; returns its Python."""
    uv("venv", "--quiet", "--python", options.python, f"{folder}/env")
    python = f"{folder}/env/bin/python"
    extras = [] if extra == "none" else [extra, *BESIDE.get(extra, [])]
    named = [word for each in extras for word in ("--extra", each)]
    added = Path(folder, "added.txt")
    added.write_text("\n".join(options.added))
    pip = ["pip", "install", "--quiet", "--python", python]
    # Of a project's file uv knows that what it names is direct; of a project that it builds it does not.
    uv(*pip, "--resolution", BOUNDS[bound], "-r", ROOT / "pyproject.toml", *named, "-r", added)
    if options.without_dependencies:
        uv(*pip, "--no-deps", *options.without_dependencies)
    pins = Path(folder, "pins.txt")
    freeze = subprocess.run(
        ["uv", "pip", "freeze", "--python", python], capture_output=True, text=True, check=True
    )
    pins.write_text(freeze.stdout)
    uv(*pip, "--constraint", pins, *TOOLS)
    uv(*pip, "--no-deps", ROOT)
    return python


def uv(*arguments):
    """Run uv, or end with what it printed."""
    done = subprocess.run(
        ["uv", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"uv {' '.join(map(str, arguments))}\n{done.stdout}")


def measured(extra, python, bound, patience=1.0):
    """Run the tests of an extra with `python`; returns a row of the table."""
    start = time.monotonic()
    limit = f"--timeout={600 * patience:g}"
    command = [python, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", limit, *TESTS[extra]]
    environment = {**os.environ, "BAGUA_TEST_COMPLETE": "0", "VIRTUAL_ENV": str(Path(python).parents[1])}
    environment["BAGUA_TEST_PATIENCE"] = str(patience)
    environment["PATH"] = f"{Path(python).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    row = {"extra": extra, "bound": bound, **facts(python, SHOWN[extra]), **outcomes(done.stdout)}
    if done.returncode and not row["failed"]:
        row["failed"] = 1  # the run itself
    if row["failed"]:
        print(done.stdout, flush=True)
    return {**row, "seconds": round(time.monotonic() - start)}


def outcomes(text):
    """Count what pytest's last line says.

    >>> outcomes("... 2 failed, 1 passed, 7 deselected, 1 error in 0.95s ...")
    {'passed': 1, 'failed': 3, 'skipped': 0}
    """
    found = re.findall(r"(\d+) (passed|failed|error|skipped)", text.strip().rpartition("\n")[2])
    counts = {word: int(number) for number, word in found}
    return {
        "passed": counts.get("passed", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0),
        "skipped": counts.get("skipped", 0),
    }


def facts(python, packages):
    """The versions of Python and of packages, as `python` has them."""
    code = (
        "import importlib.metadata as m, json, platform, sys\n"
        "versions = {d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}\n"
        "wanted = {name: versions.get(name.lower().replace('_', '-')) for name in sys.argv[1:]}\n"
        "print(json.dumps({'python': platform.python_version(), 'versions': wanted}))"
    )
    return json.loads(subprocess.run([python, "-c", code, *packages], capture_output=True, check=True).stdout)


def rows():
    """All results, in the order of `TESTS`."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return sorted(kept, key=lambda row: ([*TESTS].index(row["extra"]), row["bound"] != "oldest", row["python"]))


def keep(row):
    """Write a row in place of the one that it measures again."""
    names = ("extra", "bound", "python")
    others = [old for old in rows() if any(old[name] != row[name] for name in names)]
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(each) for each in [*others, row]) + "\n]\n")


def table(rows):
    """Write rows as Markdown."""
    lines = [
        "# Extras, with the oldest and the newest versions that they allow",
        "",
        "`python tests/extras.py` measures this table. Each row is an environment of its own, unless a note says",
        "otherwise, in which tests that concern the extra run. What is skipped needs packages of other extras.",
        "",
        "| extra | bound | versions | Python | passed | failed | skipped | time |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items() if version)
        extra = "(none)" if row["extra"] == "none" else f"`{row['extra']}`"
        counts = "not measured | | | |"
        if "passed" in row:
            counts = f"{row['passed']} | {row['failed']} | {row['skipped']} | {row['seconds']} s |"
        lines.append(f"| {extra} | {row['bound']} | {versions} | {row['python']} | {counts}")
    lines += [f"\n`{row['extra']}`, {row['bound']}: {row['note']}" for row in rows if "note" in row]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
