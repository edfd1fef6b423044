"""Hosts to run on, as users write them: `a:4,b:4`, or a file of lines such as `a slots=4` or `a:4`."""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .cli import CommandError, cores, count

LOOPBACK = ("localhost", "127.0.0.1")
"""Names of this host, whichever it is."""


@dataclass(frozen=True)
class Host:
    """A host, and how many ranks it takes; None where the user did not say."""

    name: str
    slots: int | None = None

    def __str__(self) -> str:
        return self.name if self.slots is None else f"{self.name}:{self.slots}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Hosts from a list such as "a:4,b:4".

    >>> parse_hosts("a:4,b")
    (Host(name='a', slots=4), Host(name='b', slots=None))
    """
    return tuple(_host(part, f"--host {text}") for part in text.split(","))


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Hosts from a file, with a line for each, in the form of Open MPI or of MPICH.

    Raises:
        CommandError: The file cannot be read, names no host, or has a line of another form.
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
    """The hosts that `--host` or `--hostfile` names; none without these."""
    if options.hostfile is not None:
        return read_hostfile(options.hostfile)
    return parse_hosts(options.host) if options.host is not None else ()


def first_allocated(variables: Mapping[str, str]) -> Host | None:
    """The first host of the allocation of Slurm that these environment variables tell of, where rank 0 will be.

    None outside of an allocation.

    >>> first_allocated({"SLURM_JOB_NODELIST": "rack[2-3,7]node[08-09],gpu1"})
    Host(name='rack2node08', slots=None)
    """
    hosts = variables.get("SLURM_JOB_NODELIST") or variables.get("SLURM_NODELIST", "")
    first = re.match(r"(\[[^\]]*\]|[^\[,])*", hosts)
    name = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else "")
    return _host(name, f"SLURM_JOB_NODELIST={hosts}") if name else None


def number_of_ranks(options: argparse.Namespace, hosts: Sequence[Host]) -> int:
    """What `-n` says; else one rank for each slot of these hosts.

    Without hosts, one for each task of Slurm's allocation, or for each core that may be used here.

    Raises:
        CommandError: A host does not say how many ranks it takes.
    """
    if options.ranks is not None or not hosts:
        tasks = os.environ.get("SLURM_NTASKS", "")
        return options.ranks or (int(tasks) if tasks.isdecimal() else 0) or len(cores())
    slots = [host.slots for host in hosts if host.slots is not None]
    if len(slots) < len(hosts):
        raise CommandError("how many ranks? Give -n, or a number for each host: node1:4, or 'slots=4' in a file")
    return sum(slots)


@dataclass(frozen=True)
class Ranks:
    """How many ranks a job starts."""

    training: int
    """Those that train."""
    spares: int = 0
    """Those that stand by."""
    least: int = 1
    """With fewer training ends."""

    @property
    def started(self) -> int:
        """All of them."""
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
    """How many ranks train and stand by. Without `-n`, both together are as many as there are slots.

    Raises:
        CommandError: A host does not say how many ranks it takes, or they take too few, or too few train.
    """
    spares, least = options.spares or 0, options.min_ranks or 1
    number = number_of_ranks(options, hosts)
    training = number if options.ranks is not None else number - spares
    if training < 1:
        raise CommandError(f"--spares {spares}: there is room for {count(number, 'rank')}, so none would train")
    if training < least:
        raise CommandError(f"--min-ranks {least}: {count(training, 'rank')} train; expected at most as many")
    slots = [host.slots for host in hosts if host.slots is not None]
    if spares and hosts and len(slots) == len(hosts) and training + spares > sum(slots):
        raise CommandError(
            f"--spares {spares}: {training + spares} ranks are started with them, and the hosts take "
            f"{sum(slots)}; name more hosts, or give a smaller -n"
        )
    return Ranks(training, spares, least)


def is_here(address: str) -> bool:
    """Whether this is certainly this host. Other names are not looked up: a name server may take its time."""
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


def _host(text: str, where: str) -> Host:
    match = re.fullmatch(r"([\w.+-]+)(?::([1-9][0-9]{0,6}))?", text)
    if match is None:
        raise CommandError(f"{where}: {text!r} is not a host; expected e.g. node1, or node1:4 for 4 ranks")
    return Host(match[1], int(match[2]) if match[2] else None)
