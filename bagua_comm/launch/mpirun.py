"""The mpirun of this machine: where it is, whose it is, and how its arguments are called."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..bootstrap import tcp_links as links
from .cli import CommandError
from .hosts import Host

PER_RANK = (
    "sh",
    "-c",
    "export RANK=${RANK:-$OMPI_COMM_WORLD_RANK} WORLD_SIZE=${WORLD_SIZE:-$OMPI_COMM_WORLD_SIZE} "
    "LOCAL_RANK=${LOCAL_RANK:-$OMPI_COMM_WORLD_LOCAL_RANK} "
    "LOCAL_WORLD_SIZE=${LOCAL_WORLD_SIZE:-$OMPI_COMM_WORLD_LOCAL_SIZE}; "
    'if [ -z "$OMP_NUM_THREADS" ]; then '
    "OMP_NUM_THREADS=$(nproc || echo 1); "
    "OMP_NUM_THREADS=$((OMP_NUM_THREADS / ${OMPI_COMM_WORLD_LOCAL_SIZE:-1})); "
    '[ "$OMP_NUM_THREADS" -gt 0 ] || OMP_NUM_THREADS=1; '
    "export OMP_NUM_THREADS; "
    'fi; exec "$@"',
    "sh",
)
"""Gives a rank of Open MPI its numbers in torchrun's names, too, and its share of the cores of its host as
OMP_NUM_THREADS, unless that is set; becomes the command that follows."""

SEGMENT_BYTES = 16 << 20
"""The room in /dev/shm that Open MPI wants for each rank. Where there is less, it needs the network."""

OPEN_MPI, MPICH, INTEL = "Open MPI", "MPICH", "Intel MPI"


HIDDEN = "..."
"""Printed in place of a secret value."""


@dataclass(frozen=True)
class Setting:
    """Arguments of mpirun and environment variables that belong together, and why they are there."""

    why: str
    arguments: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    is_secret: bool = False
    """Whether the values of the variables are hidden in output."""

    def shown(self) -> list[str]:
        """Return the variables as `NAME=VALUE`, for output."""
        return [f"{name}={HIDDEN if self.is_secret else value}" for name, value in self.variables.items()]


@dataclass(frozen=True)
class Mpirun:
    """An mpirun that was found."""

    path: str
    library: str
    """`OPEN_MPI`, `MPICH` or `INTEL`; empty if it says nothing that is known."""
    version: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, [self.library or "an unknown MPI", self.version]))

    @property
    def is_open_mpi(self) -> bool:
        """Whether it takes Open MPI's arguments."""
        return self.library == OPEN_MPI

    def hosts(self, hosts: Sequence[Host], hostfile: str | None) -> tuple[str, ...]:
        """The arguments that choose hosts.

        Raises:
            CommandError: There are none here.
        """
        if self.is_open_mpi:
            return ("--hostfile", hostfile) if hostfile else ("--host", ",".join(map(str, hosts)))
        self._must_be_known("--hostfile" if hostfile else "--host")
        if self.library == MPICH:
            return ("-hosts", ",".join(map(str, hosts)))
        # Intel's -hosts takes names alone, and -ppn one number for all of them.
        if len({host.slots for host in hosts}) > 1:
            raise CommandError(
                "Intel MPI takes as many ranks on each host: give every host the same number, or its own "
                "--mpirun=-machinefile --mpirun=FILE"
            )
        ranks = () if hosts[0].slots is None else ("-ppn", str(hosts[0].slots))
        return ("-hosts", ",".join(host.name for host in hosts), *ranks)

    def forward(self, variables: dict[str, str]) -> tuple[str, ...]:
        """The arguments that take environment variables to ranks on other hosts, too."""
        if self.is_open_mpi:  # which takes its own there anyway
            return tuple(word for name in variables if not name.startswith("OMPI_") for word in ("-x", name))
        if not self.library:
            return ()
        return ("-genvall",) if variables else ()  # with their values, everybody could read them

    def interface(self, name: str) -> Setting:
        """What keeps MPI, what starts its ranks, gloo and NCCL to one network interface."""
        variables = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), name)
        if self.is_open_mpi:
            starts = ("--mca", "oob_tcp_if_include") if self._major() < 5 else ("--prtemca", "prte_if_include")
            arguments = ["--mca", "btl_tcp_if_include", name, *starts, name]
        else:
            self._must_be_known("--interface")
            arguments = ["-iface", name]
            variables["FI_TCP_IFACE"] = name  # libfabric, by which both send messages over TCP
        return Setting("--interface: the network for MPI, gloo and NCCL", tuple(arguments), variables)

    def links(self, count: int) -> tuple[str, ...]:
        """The arguments for at least so many TCP connections between two ranks; see `links.odd`."""
        self.must_be_open_mpi("--links")
        return ("--mca", "btl_tcp_links", str(links.odd(count)))

    def ulfm(self) -> tuple[str, ...]:
        """The arguments with which ranks may die, and the others go on, newcomers among them."""
        self.must_be_open_mpi("--ulfm")
        return ("--with-ft", "ulfm", "--prtemca", "state_base_recoverable", "1")

    def search_path(self) -> dict[str, str]:
        """PATH, if this mpirun needs it to find its own programs, which lie beside it."""
        folder, path = str(Path(self.path).parent), os.environ.get("PATH", os.defpath)
        if self.is_open_mpi or folder in path.split(os.pathsep):
            return {}
        return {"PATH": os.pathsep.join([folder, path])}

    def has_default_hosts(self) -> bool:
        """Whether this Open MPI is set up to run on other hosts by default."""
        file = Path(self.path).parent.parent / "etc" / "prte-default-hostfile"
        try:
            lines = file.read_text().splitlines()
        except OSError:
            return False
        return any(line.strip() and not line.lstrip().startswith("#") for line in lines)

    def _major(self) -> int:
        return int(self.version.partition(".")[0] or 5)

    def _must_be_known(self, flag: str) -> None:
        if not self.library:
            raise CommandError(
                f"{flag} needs Open MPI, MPICH or Intel MPI, and {self.path} does not say that it belongs to "
                "one; give it arguments of its own by --mpirun=ARG"
            )

    def must_be_open_mpi(self, flag: str) -> None:
        """Raise `CommandError` unless this is Open MPI, which `flag` needs."""
        if not self.is_open_mpi:
            raise CommandError(f"{flag} needs Open MPI, and {self.path} belongs to {self}")


def find_mpirun() -> str | None:
    """The mpirun that belongs to this Python, else the one on the PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def ask_mpirun(path: str) -> Mpirun:
    """Whose mpirun this is, by what it says of its version."""
    unknown = Mpirun(path, "")
    try:
        result = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=30,
            env={**os.environ, **unknown.search_path()},
        )
    except (OSError, subprocess.TimeoutExpired):
        return unknown
    return recognise(path, result.stdout)


def recognise(path: str, text: str) -> Mpirun:
    """Whose mpirun it is that says `text` of its version.

    >>> recognise("mpirun", "mpirun (Open MPI) 5.0.11")
    Mpirun(path='mpirun', library='Open MPI', version='5.0.11')
    """
    names = {"Open MPI": OPEN_MPI, "Intel(R) MPI": INTEL, "HYDRA build details": MPICH}
    library = next((library for sign, library in names.items() if sign in text), "")
    version = re.search(r"\d+\.\d+(\.\d+)*", text)
    return Mpirun(path, library, version[0] if version and library else "")
