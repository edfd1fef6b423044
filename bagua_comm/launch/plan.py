"""The plan of a start: mpirun with the arguments and variables that this machine needs, each with its reason.

With Open MPI, the ranks of one host communicate through shared memory alone and listen on no port, if no hosts
are named, neither by a scheduler, and /dev/shm has 32 MiB for each rank.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..bootstrap.environment import MPI_SETTINGS
from ..bootstrap.job import Job
from ..net import choosing
from ..system.processes import free_port
from . import cli
from .cli import CommandError, count, parse_variable, program_name
from .hosts import (
    LOOPBACK,
    Host,
    Placement,
    chooses_hosts,
    is_here,
    is_on_one_node,
    is_supervised,
    known_hosts,
    named_hosts,
    other_hosts,
    ranks_of,
)
from .mpirun import PER_RANK, SEGMENT_BYTES, Mpirun, Setting

MASTER_PORT = 29500
"""The rendezvous port on another host, whose free ports are unknown here: PyTorch's default."""


@dataclass(frozen=True)
class Plan:
    """The command that `run` starts, with the reason for each part."""

    mpirun: Mpirun
    ranks: int
    where: str
    settings: tuple[Setting, ...]
    program: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """mpirun and all of its arguments."""
        arguments = [word for setting in self.settings for word in setting.arguments]
        return [self.mpirun.path, "-n", str(self.ranks), *arguments, *self.program]

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that are added for mpirun."""
        return {name: value for setting in self.settings for name, value in setting.variables.items()}

    def shell(self) -> str:
        """Return the command as a line for a shell, with the values of `--env` hidden."""
        hidden = [text for setting in self.settings for text in setting.shown()]
        variables = list({text.partition("=")[0]: text for text in hidden}.values())
        return shlex.join([*(["env", *variables] if variables else []), *self.command])

    def lines(self) -> Iterator[str]:
        """Return lines that describe the command and the reasons, with the values of `--env` hidden."""
        by = f"{self.mpirun.path} ({self.mpirun})"
        yield f"{program_name()} run: {count(self.ranks, 'rank')} on {self.where}, by {by}"
        for setting in self.settings:
            yield f"  {shlex.join([*setting.shown(), *setting.arguments])}"
            yield f"      {setting.why}"
        program = self.program[len(PER_RANK) :] if self.program[: len(PER_RANK)] == PER_RANK else self.program
        if program != self.program:
            yield "  RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE"
            yield "      each rank also gets its numbers under torchrun's names"
            if "OMP_NUM_THREADS" not in {**os.environ, **self.variables}:
                yield "  OMP_NUM_THREADS"
                yield "      each rank divides the cores of its host by the ranks there"
        yield f"  {shlex.join(program)}"


@dataclass(frozen=True)
class _Request:
    """The input of a plan."""

    options: argparse.Namespace
    mpirun: Mpirun
    hosts: tuple[Host, ...]
    hostfile: str | None
    """The file of the same hosts, if there is one."""
    ranks: int
    """The number of ranks that are started."""
    cores: int
    """The number of cores of this host that may be used."""
    alone: bool
    """Whether ranks run on this host only, for certain."""
    supervised: Job | None
    """The job, for its ranks; None without a supervisor."""

    def where(self) -> str:
        if self.hosts:
            return f"{count(len(self.hosts), 'host')}: {', '.join(map(str, self.hosts))}"
        if self.alone:
            return f"this host, which has {count(self.cores, 'core')}"
        return "the hosts that mpirun finds itself"


def make_plan(
    options: argparse.Namespace, mpirun: Mpirun, placement: Placement | None = None, job: Job | None = None
) -> Plan:
    """Return the plan for the arguments of `run`.

    Args:
        options: The arguments.
        mpirun: The mpirun that starts the ranks.
        placement: The placement of an attempt of a supervised job; if None, that of the arguments.
        job: The supervised job, for its ranks.

    Raises:
        CommandError: The arguments exclude each other, or this mpirun does not support them.
    """
    if "SLURM_HET_SIZE" in os.environ and not named_hosts(options) and not chooses_hosts(options.mpirun):
        script = f"{'-m ' if options.module else ''}{options.script}"
        raise CommandError(
            "mpirun does not see the nodes of a heterogeneous job of Slurm, and would start ranks on some of "
            f"them only: start them by srun --mpi=pmix --het-group=0,1 python {script}"
        )
    hosts = known_hosts(options) if is_supervised(options) else named_hosts(options)
    placement = placement or Placement(ranks_of(options, hosts), hosts)
    if is_supervised(options):
        mpirun.must_be_open_mpi("--spares" if options.restarts is None else "--restarts")
        job = job or Job(spares=placement.ranks.spares, min_ranks=options.min_ranks)
    if options.ranks is None and not hosts and mpirun.has_default_hosts():
        raise CommandError("how many ranks? Give -n: by default, this mpirun starts ranks on the hosts of a file")
    hostfile = options.hostfile if placement.hosts == hosts else None
    alone = not hosts and stays_here(mpirun, options.mpirun)
    is_watched = placement.hosts or alone or (is_on_one_node(options.mpirun) and not mpirun.has_default_hosts())
    if is_supervised(options) and not is_watched:
        raise CommandError("--spares and --restarts watch the hosts of ranks: name them by --host or --hostfile")
    cores = len(cli.cores())
    request = _Request(options, mpirun, placement.hosts, hostfile, placement.ranks.started, cores, alone, job)
    variables = list(_variables(request))
    settings = [*_arguments(request), *variables, *_forwarded(request, variables), *_for_mpirun_itself(request)]
    if options.mpirun:
        settings.append(Setting("--mpirun: your arguments", tuple(options.mpirun)))
    python = (sys.executable, *(["-m"] if options.module else []), options.script, *options.args)
    program = (*(PER_RANK if mpirun.is_open_mpi else ()), *python)
    return Plan(mpirun, request.ranks, request.where(), tuple(settings), program)


def _arguments(request: _Request) -> Iterator[Setting]:
    """The arguments for the placement and the communication of ranks."""
    options, mpirun = request.options, request.mpirun
    if request.hosts:
        why = "you named these hosts" if named_hosts(options) else "the nodes of the allocation are watched"
        yield Setting(why, mpirun.hosts(request.hosts, request.hostfile))
    if mpirun.is_open_mpi:
        yield Setting("a rank has several threads, so it is not bound to a core", ("--bind-to", "none"))
    if mpirun.is_open_mpi and request.alone and request.ranks > request.cores:
        share = f"{count(request.ranks, 'rank')} share {count(request.cores, 'core')}"
        why = f"{share}: a rank that waits yields its core"
        yield Setting(why, ("--oversubscribe", "--mca", "mpi_yield_when_idle", "1"))
    elif mpirun.is_open_mpi and request.alone and request.ranks > (physical := cli.physical_cores()):
        sees = f"Open MPI sees {count(physical, 'core')} here, with {request.cores} hardware threads"
        why = f"{sees}; a rank uses one"
        yield Setting(why, ("--oversubscribe",))
    if mpirun.is_open_mpi and request.alone and _can_use_shared_memory(request.ranks, options.mpirun):
        why = "one host: ranks use shared memory, and listen on no port; mpirun itself does (SECURITY.md)"
        yield Setting(why, ("--mca", "btl", "self,sm"))
    if options.ulfm or request.supervised is not None:
        yield Setting("--ulfm: when a rank dies, the others continue", mpirun.ulfm())
    if options.links:
        why = "--links: the number of TCP connections between two ranks of different hosts"
        if options.links % 2 == 0:
            why += ", and one more, since Open MPI uses only half of an even number"
        yield Setting(why, mpirun.links(options.links))


def _variables(request: _Request) -> Iterator[Setting]:
    """The environment variables of ranks: those that they need, unless they are set, and the user's."""
    options, mpirun = request.options, request.mpirun
    chosen = {text.partition("=")[0] for text in options.env} | os.environ.keys()
    ours = {name: value for name, value in MPI_SETTINGS.items() if name not in chosen}
    if ours and mpirun.is_open_mpi:
        yield Setting("pieces of collectives are sent eagerly", variables=ours)
    if "OMP_NUM_THREADS" not in chosen and request.alone:
        why = "the cores are divided among the ranks; by default, each would start a thread on every core"
        yield Setting(why, variables={"OMP_NUM_THREADS": str(max(1, request.cores // request.ranks))})
    hosts = request.hosts or known_hosts(options)
    if mpirun.is_open_mpi and (request.alone or hosts) and not {"MASTER_ADDR", "MASTER_PORT"} & chosen:
        address, port, free = rendezvous_address(hosts)
        why = "the rendezvous of torch.distributed; the port is free now"
        if not free:
            why = f"the rendezvous of torch.distributed; whether the port is free on {address} is not known here"
        yield Setting(why, variables={"MASTER_ADDR": address, "MASTER_PORT": str(port)})
    if options.interface:
        if request.alone:
            _check_interface(options.interface)
        yield mpirun.interface(options.interface)
    if options.net:
        yield Setting("--net: the network of NCCL between hosts", variables={choosing.VARIABLE: options.net})
    if request.supervised is not None:
        why = "the job: the number of spares, and the folder for data that outlives ranks"
        yield Setting(why, variables=request.supervised.variables())
    for text in options.env:
        yield Setting("--env", variables=_variable(text), is_secret=True)


def _forwarded(request: _Request, settings: Sequence[Setting]) -> Iterator[Setting]:
    """The arguments that export variables to ranks on other hosts."""
    names = ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    variables = {name: os.environ[name] for name in names if name in os.environ}
    for setting in settings:
        variables |= setting.variables
    arguments = request.mpirun.forward(variables)
    if arguments and not request.alone:
        yield Setting("these variables are exported to ranks on other hosts", arguments)


def _for_mpirun_itself(request: _Request) -> Iterator[Setting]:
    """The environment variables that mpirun itself needs."""
    if path := request.mpirun.search_path():
        yield Setting("mpirun finds its own programs in its folder", variables=path)
    if request.mpirun.is_open_mpi and hasattr(os, "geteuid") and os.geteuid() == 0:
        allowed = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
        yield Setting("you are root, which Open MPI refuses by default", variables=allowed)


def rendezvous_address(hosts: Sequence[Host]) -> tuple[str, int, bool]:
    """Return the address and port of torch.distributed's rendezvous, and whether the port is certainly free.

    It is on the first host, that of rank 0; without hosts, on this one.
    """
    if all(host.name in LOOPBACK for host in hosts):
        return "127.0.0.1", free_port(), True
    # On another host, the name "localhost" would mean that host.
    address = socket.gethostname() if hosts[0].name in LOOPBACK else hosts[0].name
    return (address, free_port(), True) if is_here(address) else (address, MASTER_PORT, False)


def _variable(text: str) -> dict[str, str]:
    """The variable of an argument `--env`."""
    name, value = parse_variable(text)
    if value is None and name not in os.environ:
        raise CommandError(f"--env {name}: {name} is not set here; set it, or give --env {name}=VALUE")
    return {name: os.environ[name] if value is None else value}


def _check_interface(name: str) -> None:
    there = [found for _, found in socket.if_nameindex()]
    if name not in there:
        raise CommandError(f"--interface: there is no {name} on this host; there are {', '.join(there)}")


def _can_use_shared_memory(ranks: int, given: Sequence[str]) -> bool:
    """Whether /dev/shm has twice the space that is needed, and the user chose no network."""
    if "OMPI_MCA_btl" in os.environ or "btl" in given:
        return False
    try:
        return shutil.disk_usage("/dev/shm").free >= ranks * 2 * SEGMENT_BYTES
    except OSError:
        return False


def stays_here(mpirun: Mpirun, given: Sequence[str]) -> bool:
    """Whether ranks run on this host only, for certain, if the user passes these arguments to mpirun."""
    return other_hosts(given) is None and not mpirun.has_default_hosts()
