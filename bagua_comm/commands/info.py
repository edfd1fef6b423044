"""`bagua info`: versions, the MPI library, devices, kernels, and the transports on this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from typing import Any, TypeAlias

from .. import arrays, kernels, net
from .._version import __version__
from ..bootstrap.gpu import describe_gpu, nccl_obstacle, provide_cupy_cache
from ..execution import cuda
from ..launch.cli import cores
from ..launch.mpirun import OPEN_MPI, find_mpirun
from ..logs import library_name
from ..net import building, choosing
from ..system import infiniband

NOT_INSTALLED = "not installed"

Facts: TypeAlias = dict[str, Any]
"""Facts by name, as plain data for JSON."""

SUMMARY = "print versions, MPI, devices, kernels and transports"

VARIABLES = re.compile(
    "(BAGUA|OMPI_MCA|OMPI_ALLOW|OMPI_COMM_WORLD|PMI|PMIX|NCCL|TORCHELASTIC)_.*"
    "|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|SLURM_(JOB_ID|NTASKS|PROCID|STEP_NUM_TASKS)"
    "|OMP_NUM_THREADS|MPI_LOCALNRANKS|GLOO_SOCKET_IFNAME|FI_TCP_IFACE|CUPY_CACHE_DIR|XDG_CACHE_HOME"
)
"""The environment variables that `info` prints: those of docs/reference/environment.md."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `info`."""
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the result of `collect_info`."""
    facts = collect_info()
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    for title, entries in facts.items():
        print(title)
        width = max((len(name) for name in entries), default=0)
        for name, value in entries.items():
            print(f"  {name:<{max(width, 20)}}  {value}")
    return 0


def collect_info() -> dict[str, Facts]:
    """Return the facts that `info` prints: section -> name -> value."""
    provide_cupy_cache()
    return {
        "versions": versions(),
        "MPI": mpi_facts(),
        **({"InfiniBand": found} if (found := infiniband.devices()) else {}),
        "devices": {
            "CPU cores": len(cores()),
            "CUDA devices": cuda.device_count(),
            **cuda.device_facts(),
            "device arrays": _device_side(),
        },
        "kernels": {"of NumPy arrays": kernels.state()},
        "NCCL's network plugin": plugin_facts(),
        "transports carry": {
            "local": "NumPy and CuPy arrays between threads of one process",
            "mpi": "NumPy arrays between processes and machines",
            "torch": "the same under torchrun, through bagua_torch.connect()",
            "nccl": "CuPy arrays and CUDA tensors, with one GPU for each rank",
            "staged": "the same for ranks that share GPUs, through host memory",
            "dtypes": ", ".join(sorted(arrays.MOVABLE)),
        },
        "torch.distributed": {"backend bagua": torch_backend()},
        "environment": {k: v for k, v in sorted(os.environ.items()) if VARIABLES.fullmatch(k)},
    }


def versions() -> dict[str, str]:
    """Return the versions of this library and of those that it uses."""
    return {
        "bagua_comm": __version__,
        "python": platform.python_version(),
        **{name: installed(name) for name in ("numpy", "mpi4py", "ml_dtypes", "torch")},
        "cupy": installed("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "nccl": installed("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    }


def torch_backend() -> str:
    """Return how programs on torch.distributed get the backend "bagua", or what they lack."""
    if installed("torch") == NOT_INSTALLED:
        return "needs PyTorch: pip install 'bagua-comm[torch]'"
    found = importlib.metadata.entry_points(group="torch.distributed.backends")
    known = "" if "bagua" in found.names else "; not found by its entry point: install bagua-comm again"
    return f'import bagua_torch; init_process_group("bagua"){known}'


def plugin_facts() -> Facts:
    """Return the facts about NCCL's network plugin: its file, its source, and what keeps NCCL from using it."""
    library, compilers = net.path(), [" ".join(command) for command in building.compilers()]
    obstacles = choosing.breaks(os.environ)
    return {
        "library": str(library) if library else "not built: python -m bagua_comm net build",
        "source": net.source_hash(),
        "compilers": ", ".join(compilers) or "none; apt install gcc libc6-dev, or pip install ziglang",
        "asked for by": f"{choosing.VARIABLE}={chosen}" if (chosen := choosing.asked_for(None)) else "nobody",
        "kept away by": "; ".join(obstacles) or "nothing",
    }


def installed(*distributions: str) -> str:
    """Return the version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return version if len(distributions) == 1 else f"{version} ({name})"
    return NOT_INSTALLED


def _device_side() -> str:
    """The transport of `connect` for device arrays on this machine, and the reason."""
    count = cuda.device_count()
    if not count:
        return "not carried: there is no device"
    try:
        gpu = describe_gpu(0)
    except Exception as exc:
        return f"not carried: the device cannot be used: {exc}"
    if gpu.broken:
        return f"not carried: the device cannot be used: {gpu.broken}"
    obstacle = nccl_obstacle([gpu])
    if obstacle is not None:
        return f"through host memory (staged), since {obstacle}"
    if nccl_obstacle([gpu] * 2) is None:
        return "over NCCL, also where ranks share a GPU, by NCCL_MULTI_RANK_GPU_ENABLE=1"
    return f"over NCCL up to {count} ranks on this machine; through host memory with more, which share GPUs"


def mpi_facts() -> Facts:
    """Return the facts about the MPI library. A child process starts MPI, since that may end the process."""
    facts: Facts = {"mpirun": find_mpirun() or "not found"}
    if importlib.util.find_spec("mpi4py") is None:
        return {**facts, "library": "mpi4py is not installed"}
    code = (
        "import json; from mpi4py import MPI\n"
        "try:\n"
        "    ulfm = MPI.COMM_SELF.Get_failed().Get_size() == 0\n"
        "except NotImplementedError:\n"
        "    ulfm = False\n"
        "multiple = MPI.Query_thread() == MPI.THREAD_MULTIPLE\n"
        f"maps = open({str(infiniband.MAPS)!r}).read()\n"
        "print(json.dumps([MPI.Get_library_version(), multiple, ulfm, maps]))\n"
    )
    try:
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return {**facts, "library": "did not start within 60 s"}
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        return {**facts, "library": f"cannot be loaded: {reason}"}
    text, multiple, ulfm, maps = json.loads(result.stdout.splitlines()[-1])
    library = library_name(text)
    level = "MPI_THREAD_MULTIPLE" if multiple else "less than MPI_THREAD_MULTIPLE"
    if not ulfm:
        survives = "no: this MPI has no ULFM"
    elif library.startswith(OPEN_MPI):
        survives = "yes, under run --ulfm, --spares or --restarts"
    else:
        survives = "no: run --ulfm needs Open MPI"
    facts |= {"library": library, "thread level": level, "ranks may die": survives}
    unused = infiniband.why_unused(maps)
    return {**facts, **({"InfiniBand": f"{unused}; see docs/clusters/hpc.md"} if unused else {})}
