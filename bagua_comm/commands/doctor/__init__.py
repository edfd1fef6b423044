"""`bagua doctor`: problems of the machines of a job, and their remedies. Collective, under any launcher.

Examine the hosts and ranks of a job: versions, networks, speeds between ranks, limits, shared memory, clocks,
cores, ULFM and GPUs. Start it as you start your program, for instance by mpirun -n 4 python -m bagua_comm doctor.
The exit code is 1 if there is a problem, else 0.

    mpirun -n 4 python -m bagua_comm doctor
    python -m bagua_comm run --hostfile hosts -m bagua_comm doctor
    srun --mpi=pmix python -m bagua_comm doctor --json
    torchrun --nproc-per-node 4 -m bagua_comm doctor

`facts` collects the facts of a rank, `measure` sends messages, `findings` draws conclusions, and `report` shows
them on rank 0.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from types import ModuleType

from ... import bootstrap
from ...bootstrap.environment import under_torchrun
from ...bootstrap.gpu import GpuFacts, describe_gpu, nccl_obstacle
from ...comm import Communicator
from ...errors import BaguaError, CommTimeout
from ...launch.cli import CommandError, program_name
from ..info import Facts
from . import facts, report
from .findings import Finding, World, examine
from .measure import MAX_MEASURED, measure_clocks, measure_pairs, ranks_to_measure

SUMMARY = "examine all ranks together, and advise; start it as you start your program"

TIMEOUT_S = 20.0
"""The time limit of a wait for other ranks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(options: argparse.Namespace) -> int:
    """Examine all ranks, and report on rank 0; returns the exit code, which is the same on all ranks.

    Collective.

    Raises:
        CommandError: There is no world to examine.
    """
    try:
        with _connect() as comm:
            world = examine_world(comm)
            found = examine(world)
            exit_code = int(any(finding.level == "problem" for finding in found))
            if comm.rank == 0:
                _show(world, found, exit_code, as_json=options.json)
            comm.barrier()  # mpirun ends rank 0 once another rank has an exit code other than 0
            return exit_code
    except CommTimeout as exc:
        hint = (
            "if all ranks run, a firewall or the wrong network may keep them apart: try --interface NAME of run"
        )
        raise CommandError(f"{exc}; {hint}", exit_code=1) from exc
    except BaguaError as exc:
        raise CommandError(str(exc), exit_code=1) from exc


def _connect() -> Communicator:
    """Connect under any launcher. Collective."""
    library: ModuleType = bootstrap
    if under_torchrun():
        # bagua_comm does not depend on bagua_torch, but with torchrun, PyTorch is installed.
        library = importlib.import_module("bagua_torch")
    comm: Communicator = library.connect(timeout_s=TIMEOUT_S, gpu="none", trace=False)
    return comm


def examine_world(comm: Communicator) -> World:
    """Collect the facts of all ranks, and measure.

    Collective.
    """
    mine = facts.collect()
    everyone = comm.allgather_object((mine, _gpu(comm, mine)))
    all_facts = [each[0] for each in everyone]
    world = World(all_facts, [], [], {})
    if world.is_mixed:
        return world  # the measurements of other versions may differ
    gpus = [GpuFacts._make(gpu) for _, gpu in everyone if gpu is not None]
    if len(gpus) == comm.size:
        all_facts[0]["gpu"]["obstacle"] = nccl_obstacle(gpus)
    firsts = [ranks[0] for ranks in world.hosts.values()]
    return World(
        all_facts,
        facts.mpi_nodes(comm),
        measure_pairs(comm, ranks_to_measure(comm.size, firsts)),
        measure_clocks(comm, firsts[:MAX_MEASURED]),
    )


def _gpu(comm: Communicator, mine: Facts) -> tuple[object, ...] | None:
    """The facts about this rank's GPU for NCCL; None without a GPU."""
    count = mine["gpu"]["count"]
    return tuple(describe_gpu(comm.local_rank % count)) if isinstance(count, int) and count else None


def _show(world: World, found: list[Finding], exit_code: int, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.record(world, found, exit_code), indent=1))
    else:
        print(*report.lines(world, found, f"{program_name()} doctor"), sep="\n")
    sys.stdout.flush()
