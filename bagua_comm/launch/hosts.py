"""The hosts of a job, from `a:4,b:4` or a file with lines such as `a slots=4` or `a:4`, and its ranks."""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .cli import CommandError, cores, count

LOOPBACK = ("localhost", "127.0.0.1")
"""Names that every host has for itself."""

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
    "-hosts",
    "-f",
)
"""Arguments of mpirun that may start ranks on other hosts."""

DEFAULT_HOSTFILES = (
    "PRTE_MCA_prte_default_hostfile",
    "OMPI_MCA_orte_default_hostfile",
    "HYDRA_HOST_FILE",
    "I_MPI_HYDRA_HOST_FILE",
)
"""Environment variables with the path of the hostfile that an mpirun reads by default."""

ALLOCATIONS = (
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "PBS_JOBID",
    "PBS_NODEFILE",
    "LSB_JOBID",
    "PE_HOSTFILE",
    "COBALT_NODEFILE",
    "FLUX_JOB_ID",
    *DEFAULT_HOSTFILES,
)
"""Environment variables from which mpirun may read other hosts."""

NODE_FILES = ("PBS_NODEFILE", "PE_HOSTFILE", "LSB_DJOB_HOSTFILE", "COBALT_NODEFILE")
"""Environment variables of schedulers with the path of a file; each line begins with a node of the allocation."""


@dataclass(frozen=True)
class Host:
    """A host, and its number of slots for ranks; None if the user did not give one."""

    name: str
    slots: int | None = None

    def __str__(self) -> str:
        return self.name if self.slots is None else f"{self.name}:{self.slots}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse a list of hosts such as "a:4,b:4".

    >>> parse_hosts("a:4,b")
    (Host(name='a', slots=4), Host(name='b', slots=None))
    """
    return tuple(_host(part, f"--host {text}") for part in text.split(","))


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Read hosts from a file with one host on each line, in the format of Open MPI or of MPICH.

    Raises:
        CommandError: The file cannot be read, names no host, or has an invalid line.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise CommandError(f"--hostfile {path}: {exc}") from exc
    hosts = []
    for number, line in enumerate(lines, 1):
        if words := line.partition("#")[0].split():
            where = f"--hostfile {path}, line {number}"
            slots = [word.partition("=")[2] for word in words[1:] if word.startswith("slots=")]
            hosts.append(_host(":".join([words[0], *slots]), where))
    if not hosts:
        raise CommandError(f"--hostfile {path} names no host; expected lines such as 'node1 slots=4'")
    return tuple(hosts)


def named_hosts(options: argparse.Namespace) -> tuple[Host, ...]:
    """Return the hosts of `--host` or `--hostfile`; none without these."""
    if options.hostfile is not None:
        return read_hostfile(options.hostfile)
    return parse_hosts(options.host) if options.host is not None else ()


def is_supervised(options: argparse.Namespace) -> bool:
    """Whether `run` supervises mpirun, in place of becoming it."""
    return options.spares is not None or options.restarts is not None


def known_hosts(options: argparse.Namespace) -> tuple[Host, ...]:
    """Return the named hosts; without these, those of Slurm's allocation, unless mpirun is given others."""
    return named_hosts(options) or (() if chooses_hosts(options.mpirun) else allocated_hosts(os.environ))


def chooses_hosts(given: Sequence[str]) -> bool:
    """Whether one of these arguments of mpirun may choose hosts."""
    return any(argument.partition("=")[0] in OTHER_HOSTS for argument in given)


def allocated_hosts(variables: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts of Slurm's allocation, the first of which gets rank 0, with a slot for each task.

    >>> tasks = {"SLURM_TASKS_PER_NODE": "4(x2),1"}
    >>> [str(host) for host in allocated_hosts({"SLURM_JOB_NODELIST": "rack2n[08-09],gpu1", **tasks})]
    ['rack2n08:4', 'rack2n09:4', 'gpu1:1']
    """
    text = variables.get("SLURM_JOB_NODELIST") or variables.get("SLURM_NODELIST", "")
    names = [name for part in re.findall(r"(?:\[[^\]]*\]|[^\[,])+", text) for name in _expanded(part)]
    tasks = _tasks_of_nodes(variables)
    slots: Sequence[int | None] = tasks if len(tasks) == len(names) else [None] * len(names)
    return tuple(_host(name, f"SLURM_JOB_NODELIST={text}", slot) for name, slot in zip(names, slots, strict=True))


def _expanded(pattern: str) -> list[str]:
    """The names of a pattern of Slurm, as "rack[2-3,7]n[08-09]"."""
    before, bracket, rest = pattern.partition("[")
    if not bracket:
        return [pattern]
    inside, _, after = rest.partition("]")
    numbers = []
    for part in inside.split(","):
        first, _, last = part.partition("-")
        span = range(int(first), int(last or first) + 1) if f"{first}{last}".isdecimal() else []
        numbers += [str(number).zfill(len(first)) for number in span]
    return [f"{before}{number}{end}" for number in numbers for end in _expanded(after)]


def _tasks_of_nodes(variables: Mapping[str, str]) -> list[int]:
    """The number of tasks of each node of Slurm's allocation; empty if it does not say."""
    of_nodes = re.findall(r"(\d+)(?:\(x(\d+)\))?", variables.get("SLURM_TASKS_PER_NODE", ""))
    return [int(each) for each, times in of_nodes for _ in range(int(times or 1))]


def other_hosts(given: Sequence[str]) -> str | None:
    """Return what may let mpirun start ranks on other hosts: one of these arguments, or a variable; else None."""
    named = (argument.partition("=")[0] for argument in given)
    return next((name for name in (*named, *os.environ) if name in OTHER_HOSTS + ALLOCATIONS), None)


def is_on_one_node(given: Sequence[str]) -> bool:
    """Whether a scheduler has allocated one node, for certain, and these arguments of mpirun choose no other."""
    if chooses_hosts(given) or any(name in os.environ for name in DEFAULT_HOSTFILES):
        return False
    files = [Path(os.environ[name]) for name in NODE_FILES if name in os.environ]
    with suppress(OSError, UnicodeDecodeError):
        lines = [line.split() for file in files for line in file.read_text().splitlines()]
        return len({words[0] for words in lines if words}) == 1
    return False


def allocated_ranks(variables: Mapping[str, str]) -> int | None:
    """Return the number of ranks that a scheduler has reserved; None if it does not say.

    >>> allocated_ranks({"SLURM_TASKS_PER_NODE": "4(x2),2"})
    10
    """
    tasks, slots = sum(_tasks_of_nodes(variables)), 0
    with suppress(OSError):
        slots = len(Path(variables["PBS_NODEFILE"]).read_bytes().split()) if "PBS_NODEFILE" in variables else 0
    named = [variables.get(name, "") for name in ("SLURM_NTASKS", "LSB_DJOB_NUMPROC")]
    grid_engine = variables.get("NSLOTS", "") if "PE_HOSTFILE" in variables else ""
    found = [*named, str(tasks), str(slots), grid_engine]
    return next((int(text) for text in found if text.isdecimal() and int(text)), None)


def number_of_ranks(options: argparse.Namespace, hosts: Sequence[Host]) -> int:
    """Return the number of `-n`; without it, the number of slots of these hosts, or of a scheduler's allocation.

    On this host alone, it is the number of cores that this process may use.

    Raises:
        CommandError: A host has no number of slots, or the hosts are known to mpirun alone.
    """
    if options.ranks is not None:
        return int(options.ranks)
    slots = [host.slots for host in hosts if host.slots is not None]
    if len(slots) < len(hosts):
        raise CommandError("how many ranks? Give -n, or a number for each host: node1:4, or 'slots=4' in a file")
    elsewhere = other_hosts(options.mpirun)
    if hosts or elsewhere is None:
        return sum(slots) or len(cores())
    if elsewhere in ALLOCATIONS and (ranks := allocated_ranks(os.environ)):
        return ranks
    raise CommandError(f"how many ranks? Give -n: {elsewhere} may choose other hosts, and no number is known")


@dataclass(frozen=True)
class Ranks:
    """The numbers of ranks of a job."""

    training: int
    """The ranks that train."""
    spares: int = 0
    """The spare ranks."""
    least: int = 1
    """The least number of ranks that train; with fewer, the job ends."""

    @property
    def started(self) -> int:
        """The number of ranks that mpirun starts."""
        return self.training + self.spares


@dataclass(frozen=True)
class Placement:
    """The hosts of a job, and the number of its ranks."""

    ranks: Ranks
    hosts: tuple[Host, ...] = ()
    """Empty if the user named none."""
    left_out: tuple[str, ...] = ()
    """The hosts that do not answer."""


def ranks_of(options: argparse.Namespace, hosts: Sequence[Host]) -> Ranks:
    """Return the numbers of ranks of a job. Without `-n`, training and spare ranks fill the slots of the hosts.

    Raises:
        CommandError: A host has no number of slots, or there are too few slots, or too few ranks train.
    """
    spares, least = options.spares or 0, options.min_ranks or 1
    number = number_of_ranks(options, hosts)
    training = number if options.ranks is not None else number - spares
    if training < 1:
        raise CommandError(f"--spares {spares}: there is room for {count(number, 'rank')}, so none would train")
    if training < least:
        raise CommandError(f"--min-ranks {least}: {count(training, 'rank')} train; expected at most {training}")
    slots = [host.slots for host in hosts if host.slots is not None]
    if spares and hosts and len(slots) == len(hosts) and training + spares > sum(slots):
        raise CommandError(
            f"--spares {spares}: {training + spares} ranks are started with them, and the hosts have "
            f"{sum(slots)} slots; name more hosts, or give a smaller -n"
        )
    return Ranks(training, spares, least)


def is_here(address: str) -> bool:
    """Whether this is certainly this host. Names are not resolved, since a name server may be slow."""
    here = socket.gethostname()
    if address in LOOPBACK:
        return True
    if not re.fullmatch(r"[0-9.]+", address):
        return address in (here, here.partition(".")[0])
    with socket.socket() as one:
        try:
            one.bind((address, 0))
        except OSError:
            return False
    return True


def _host(text: str, where: str, slots: int | None = None) -> Host:
    match = re.fullmatch(r"((?!-)[\w.+-]+)(?::([1-9][0-9]{0,6}))?", text)
    if match is None:
        raise CommandError(f"{where}: {text!r} is not a host; expected e.g. node1, or node1:4 for 4 ranks")
    return Host(match[1], int(match[2]) if match[2] else slots)
