"""The JSON record of a run: what ran, on which machine, with which versions and arguments, and its results."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import bagua_comm
from bagua_comm import Communicator

Record = dict[str, Any]

NETWORK_VARIABLE = "BENCHMARKS_NETWORK"
"""The environment variable in which `benchmarks.netlab` describes the network of its hosts."""


def begin_record(
    benchmark: str,
    options: argparse.Namespace,
    *,
    comm: Communicator | None = None,
    packages: Sequence[str] = (),
) -> Record:
    """The head of a record, before its `results`: the benchmark, machine, versions, ranks and arguments.

    Args:
        benchmark: Its name.
        options: The arguments; output paths are left out.
        comm: The ranks; one rank if None.
        packages: Further packages whose versions matter.
    """
    return {
        "benchmark": benchmark,
        "machine": collect_machine(),
        "versions": {**collect_versions(comm), **{name: importlib.metadata.version(name) for name in packages}},
        "ranks": 1 if comm is None else comm.size,
        "arguments": {key: value for key, value in vars(options).items() if key not in ("json", "out")},
    }


def collect_machine() -> Record:
    """The processor, its cores, and how many of them this rank may use (mpirun may bind it to some)."""
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return {"cpu": _cpu(), "cores": cores, "cores_per_rank": usable}


def collect_versions(comm: Communicator | None = None) -> dict[str, str]:
    """Versions of Python, this library and NumPy; of mpi4py and MPI too, if ranks communicate by MPI."""
    versions = {
        "python": platform.python_version(),
        "bagua_comm": bagua_comm.__version__,
        "numpy": np.__version__,
    }
    if comm is None or comm.transports[0].name != "mpi":
        return versions
    import mpi4py
    from mpi4py import MPI  # not before `connect`, which tells Open MPI how to start

    library = MPI.Get_library_version().split(",")[0].strip("\0 \n")
    return {**versions, "mpi4py": mpi4py.__version__, "MPI": library}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def header_lines(record: Record) -> list[str]:
    """The head of a record, as lines above the first table."""
    machine = record["machine"]
    lines = [
        f"# {record['benchmark']}",
        f"# machine   : {machine['cpu']}, {machine['cores']} cores, {machine['cores_per_rank']} for each rank",
        f"# versions  : {listed(record['versions'])}",
        f"# ranks     : {record['ranks']}",
    ]
    return [*lines, f"# arguments : {listed(record['arguments'])}"] if "arguments" in record else lines


def listed(entries: dict[str, Any]) -> str:
    """Names and values in one line, without those that are None.

    >>> listed({"numpy": "2.2", "sizes": [1, 2], "root": None})
    'numpy 2.2, sizes 1,2'
    """

    def plain(value: object) -> str:
        return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)

    return ", ".join(f"{name} {plain(value)}" for name, value in entries.items() if value is not None)


def write_json(path: Path, record: Record) -> None:
    """Replace a record at once, so that an interrupted program leaves the former file."""
    text = json.dumps(record, indent=1) + "\n"
    if path.exists() and not path.is_file():  # /dev/null, say
        path.write_text(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(text)
    unfinished.replace(path)
