"""The command line: `python -m bagua_comm run -n 4 train.py`, `info`, `advise`.

`run` starts mpirun with the arguments that this machine needs. It replaces its own process by mpirun's, so
signals and the exit code are mpirun's. On one host, ranks talk through shared memory alone and listen on no port.
Environment variables are read here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__, arrays, bootstrap, cuda
from .errors import ArrayError
from .planning import advise

DESCRIPTION = "The command line: `python -m bagua_comm run -n 4 train.py`, `info`, `advise`."
"""Not taken from the docstring, which `python -OO` leaves out."""

RUN_DESCRIPTION = (
    "Start a Python script on several ranks by mpirun. With Open MPI every rank also gets RANK, WORLD_SIZE, "
    "LOCAL_RANK and LOCAL_WORLD_SIZE, and on one host MASTER_ADDR and MASTER_PORT, a port that is free now, so "
    "that Accelerate, Transformers and torch.distributed find the ranks. What is set already stays as it is."
)

PER_RANK = (
    "sh",
    "-c",
    "export RANK=${RANK:-$OMPI_COMM_WORLD_RANK} WORLD_SIZE=${WORLD_SIZE:-$OMPI_COMM_WORLD_SIZE} "
    "LOCAL_RANK=${LOCAL_RANK:-$OMPI_COMM_WORLD_LOCAL_RANK} "
    'LOCAL_WORLD_SIZE=${LOCAL_WORLD_SIZE:-$OMPI_COMM_WORLD_LOCAL_SIZE}; exec "$@"',
    "sh",
)
"""Gives a rank of Open MPI its numbers in torchrun's names, too, and becomes the command that follows."""

ULFM = ("--with-ft", "ulfm")
"""Tells Open MPI that ranks may die, and that the others go on."""

SHARED_MEMORY = ("--mca", "btl", "self,sm")
"""Tells Open MPI to use shared memory and no network."""

SEGMENT_BYTES = 32 << 20
"""Twice the room in /dev/shm that Open MPI wants for each rank. Where there is less, it needs the network."""

OTHER_HOSTS = (
    "--host",
    "-host",
    "-H",
    "--hostfile",
    "-hostfile",
    "--machinefile",
    "-machinefile",
    "--default-hostfile",
    "--add-host",
    "--add-hostfile",
    "--rankfile",
    "-rf",
    "--app",
)
"""Arguments of mpirun that may start ranks on other hosts."""

ALLOCATIONS = (
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "PBS_JOBID",
    "PBS_NODEFILE",
    "LSB_JOBID",
    "PE_HOSTFILE",
    "COBALT_NODEFILE",
    "FLUX_JOB_ID",
    "PRTE_MCA_prte_default_hostfile",
    "OMPI_MCA_orte_default_hostfile",
)
"""Environment variables in which mpirun finds other hosts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bagua_comm", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="start a Python script on several ranks", description=RUN_DESCRIPTION)
    run.add_argument("-n", "--ranks", type=_positive, default=os.cpu_count() or 1, metavar="N")
    run.add_argument("--host", help="hosts to run on, as mpirun's --host")
    run.add_argument("--mpirun", action="append", default=[], metavar="ARG", help="one more argument for mpirun")
    run.add_argument(
        "--ulfm",
        action="store_true",
        help="let the other ranks go on when one dies: they get RankFailed, and call shrink() (Open MPI)",
    )
    run.add_argument("-m", dest="module", action="store_true", help="the script is a module's name")
    run.add_argument("--dry-run", action="store_true", help="print the command instead")
    run.add_argument("script")
    run.add_argument("args", nargs=argparse.REMAINDER)

    info = commands.add_parser("info", help="print versions, MPI, devices and what can be carried")
    info.add_argument("--json", action="store_true", help="as JSON")

    advice = commands.add_parser("advise", help="predict which algorithm trains fastest on a cluster")
    advise.add_arguments(advice)

    options = parser.parse_args(argv)
    if options.command == "advise":
        try:
            return advise.run(options)
        except (advise.AdviceError, ArrayError) as exc:
            print(f"bagua_comm advise: {exc}", file=sys.stderr)
            return 2
    return _run(options) if options.command == "run" else _info(options)


# ---------------------------------------------------------------------------------------------------
# run
# ---------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    mpirun = find_mpirun()
    if mpirun is None:
        print(
            "bagua_comm run: there is no mpirun; pip install 'bagua-comm[mpi]' brings Open MPI",
            file=sys.stderr,
        )
        return 127
    if not options.module and not Path(options.script).is_file():
        print(f"bagua_comm run: there is no file {options.script}", file=sys.stderr)
        return 2
    python = [sys.executable, *(["-m"] if options.module else []), options.script, *options.args]
    flags, variables = launch_settings(mpirun, options.ranks, local=options.host is None, given=options.mpirun)
    if options.ulfm and not flags:
        print(f"bagua_comm run: --ulfm needs Open MPI, which {mpirun} does not belong to", file=sys.stderr)
        return 2
    flags += ULFM if options.ulfm else ()
    hosts = ["--host", options.host] if options.host else []
    numbers = PER_RANK if flags else ()
    command = [mpirun, "-n", str(options.ranks), *hosts, *flags, *options.mpirun, *numbers, *python]
    if options.dry_run:
        print(*(f"{key}={value}" for key, value in variables.items()), shlex.join(command))
        return 0
    sys.stdout.flush()
    return os.execve(mpirun, command, {**os.environ, **variables})


def find_mpirun() -> str | None:
    """The mpirun that belongs to this Python, else the one on the PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def launch_settings(
    mpirun: str, ranks: int, *, local: bool, given: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """The arguments and environment variables that mpirun needs for `ranks` ranks.

    Args:
        mpirun: Its path.
        ranks: How many ranks it starts.
        local: Whether the user named no hosts.
        given: Arguments of mpirun that the user gives.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    variables = {name: value for name, value in bootstrap.MPI_SETTINGS.items() if name not in os.environ}
    if "OMP_NUM_THREADS" not in os.environ and local:
        # Else every rank would start a thread per core, and they would stand in each other's way.
        variables["OMP_NUM_THREADS"] = str(max(1, cores // ranks))
    if "Open MPI" not in _version_of(mpirun):
        return [], variables
    if local and _stays_here(mpirun, given) and not {"MASTER_ADDR", "MASTER_PORT"} & os.environ.keys():
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    # Ranks have several threads (the lane beside the caller), so they are not bound to a core.
    flags = ["--bind-to", "none"]
    if local and ranks > cores:
        flags += ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    if local and _shared_memory_will_do(mpirun, ranks, given):
        flags += SHARED_MEMORY
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        variables["OMPI_ALLOW_RUN_AS_ROOT"] = variables["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return flags, variables


def _shared_memory_will_do(mpirun: str, ranks: int, given: Sequence[str]) -> bool:
    """Whether ranks certainly run on this host alone, its memory has room, and the user chose no network."""
    if "OMPI_MCA_btl" in os.environ or "btl" in given or not _stays_here(mpirun, given):
        return False
    try:
        return shutil.disk_usage("/dev/shm").free >= ranks * SEGMENT_BYTES
    except OSError:
        return False


def _stays_here(mpirun: str, given: Sequence[str]) -> bool:
    """Whether ranks certainly run on this host alone."""
    names = {argument.partition("=")[0] for argument in given}
    elsewhere = not names.isdisjoint(OTHER_HOSTS) or any(name in os.environ for name in ALLOCATIONS)
    return not elsewhere and not _has_default_hosts(mpirun)


def _free_port() -> int:
    """A port of this host that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


def _has_default_hosts(mpirun: str) -> bool:
    """Whether this Open MPI is set up to run on other hosts by default."""
    file = Path(mpirun).parent.parent / "etc" / "prte-default-hostfile"
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return False
    return any(line.strip() and not line.lstrip().startswith("#") for line in lines)


def _version_of(mpirun: str) -> str:
    try:
        result = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


# ---------------------------------------------------------------------------------------------------
# info
# ---------------------------------------------------------------------------------------------------


def _info(options: argparse.Namespace) -> int:
    facts = collect_info()
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    for title, entries in facts.items():
        print(title)
        for name, value in entries.items():
            print(f"  {name:<22}{value}")
    return 0


def collect_info() -> dict[str, dict[str, Any]]:
    """What `info` prints: section -> name -> value."""
    bootstrap.make_room_for_cupy()
    return {
        "versions": {
            "bagua_comm": __version__,
            "python": platform.python_version(),
            **{name: _installed(name) for name in ("numpy", "mpi4py", "ml_dtypes", "torch")},
            "cupy": _installed("cupy-cuda13x", "cupy-cuda12x", "cupy"),
            "nccl": _installed("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        },
        "MPI": _mpi_facts(),
        "devices": {
            "CPU cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "CUDA devices": cuda.device_count(),
            **cuda.device_facts(),
            "device arrays": _device_side(),
        },
        "transports carry": {
            "local": "NumPy and CuPy arrays between threads of one process",
            "mpi": "NumPy arrays between processes and machines",
            "torch": "the same under torchrun, through bagua_torch.connect()",
            "nccl": "CuPy arrays and CUDA tensors, for ranks with a GPU each",
            "staged": "the same for any ranks with a GPU, through host memory",
            "dtypes": ", ".join(sorted(arrays.MOVABLE)),
        },
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("OMPI_COMM_WORLD_", "OMPI_ALLOW", "PMI", "OMP_NUM", "NCCL_"))
        },
    }


def _installed(*distributions: str) -> str:
    for name in distributions:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return version if len(distributions) == 1 else f"{version} ({name})"
    return "not installed"


def _device_side() -> str:
    """Which transport `connect` takes for device arrays here, and why."""
    count = cuda.device_count()
    if not count:
        return "not carried: there is no device"
    try:
        gpu = bootstrap.my_gpu(0)
    except Exception as exc:
        return f"not carried: the device cannot be used: {exc}"
    obstacle = bootstrap.nccl_obstacle([gpu])
    if obstacle is not None:
        return f"through host memory (staged), since {obstacle}"
    if bootstrap.nccl_obstacle([gpu] * 2) is None:
        return "over NCCL, also where ranks share a GPU, by NCCL_MULTI_RANK_GPU_ENABLE=1"
    return f"over NCCL up to {count} ranks on this machine; through host memory with more, which share GPUs"


def _mpi_facts() -> dict[str, Any]:
    facts: dict[str, Any] = {"mpirun": find_mpirun() or "not found"}
    if importlib.util.find_spec("mpi4py") is None:
        return {**facts, "library": "mpi4py is not installed"}
    # In a process of its own: starting MPI may end the process, where MPI is not installed well.
    code = (
        "from mpi4py import MPI;"
        "print(MPI.Get_library_version().split(',')[0].strip());"
        "print(MPI.Query_thread() == MPI.THREAD_MULTIPLE)"
    )
    try:
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return {**facts, "library": "did not start within 60 s"}
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        return {**facts, "library": f"cannot be loaded: {reason}"}
    library, multiple = result.stdout.strip().splitlines()[-2:]
    level = "MPI_THREAD_MULTIPLE" if multiple == "True" else "less than MPI_THREAD_MULTIPLE"
    return {**facts, "library": library, "thread level": level}


if __name__ == "__main__":
    sys.exit(main())
