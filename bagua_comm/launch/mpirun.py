"""The mpirun of this machine: its path, its MPI library, and its arguments."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..bootstrap import tcp_links
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
"""Exports the numbers of a rank of Open MPI under torchrun's names, too, and its share of the cores of its host
as OMP_NUM_THREADS, unless these are set; then executes the command that follows."""

SEGMENT_BYTES = 16 << 20
"""The space in /dev/shm that Open MPI needs for each rank; with less, it uses the network."""

OPEN_MPI, MPICH, INTEL = "Open MPI", "MPICH", "Intel MPI"


HIDDEN = "..."
"""Printed in place of a secret value."""


@dataclass(frozen=True)
class Setting:
    """Arguments of mpirun and environment variables that belong together, and the reason for them."""

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
    """An mpirun, and the MPI library that it belongs to."""

    path: str
    library: str
    """`OPEN_MPI`, `MPICH` or `INTEL`; empty if it is another one."""
    version: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, [self.library or "an unknown MPI", self.version]))

    @property
    def is_open_mpi(self) -> bool:
        """Whether it accepts the arguments of Open MPI."""
        return self.library == OPEN_MPI

    def hosts(self, hosts: Sequence[Host], hostfile: str | None) -> tuple[str, ...]:
        """Return the arguments that choose hosts.

        Raises:
            CommandError: This mpirun has no such arguments.
        """
        if self.is_open_mpi:
            return ("--hostfile", hostfile) if hostfile else ("--host", ",".join(map(str, hosts)))
        self._must_be_known("--hostfile" if hostfile else "--host")
        if self.library == MPICH:
            return ("-hosts", ",".join(map(str, hosts)))
        # Intel's -hosts accepts names only, and -ppn one number for all of them.
        if len({host.slots for host in hosts}) > 1:
            raise CommandError(
                "Intel MPI starts the same number of ranks on each host: give every host the same number, or use "
                "its own --mpirun=-machinefile --mpirun=FILE"
            )
        ranks = () if hosts[0].slots is None else ("-ppn", str(hosts[0].slots))
        return ("-hosts", ",".join(host.name for host in hosts), *ranks)

    def forward(self, variables: dict[str, str]) -> tuple[str, ...]:
        """Return the arguments that export environment variables to ranks on other hosts."""
        if self.is_open_mpi:  # which exports its own anyway
            return tuple(word for name in variables if not name.startswith("OMPI_") for word in ("-x", name))
        if not self.library:
            return ()
        return ("-genvall",) if variables else ()  # with values on the command line, every user could read them

    def interface(self, name: str) -> Setting:
        """Return the setting that restricts MPI, its launch agent, gloo and NCCL to one interface."""
        variables = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), name)
        if self.is_open_mpi:
            is_old = int(self.version.partition(".")[0] or 5) < 5
            starts = ("--mca", "oob_tcp_if_include") if is_old else ("--prtemca", "prte_if_include")
            arguments = ["--mca", "btl_tcp_if_include", name, *starts, name]
        else:
            self._must_be_known("--interface")
            arguments = ["-iface", name]
            variables["FI_TCP_IFACE"] = name  # of libfabric, which both use for messages over TCP
        return Setting("--interface: the network for MPI, gloo and NCCL", tuple(arguments), variables)

    def links(self, count: int) -> tuple[str, ...]:
        """Return the arguments for at least `count` TCP connections between two ranks; see `tcp_links.odd`."""
        self.must_be_open_mpi("--links")
        return ("--mca", "btl_tcp_links", str(tcp_links.odd(count)))

    def ulfm(self) -> tuple[str, ...]:
        """Return the arguments that let the other ranks continue when one dies."""
        self.must_be_open_mpi("--ulfm")
        return ("--with-ft", "ulfm", "--prtemca", "state_base_recoverable", "1")

    def search_path(self) -> dict[str, str]:
        """Return PATH, if this mpirun needs it to find its own programs, which are in its folder."""
        folder, path = str(Path(self.path).parent), os.environ.get("PATH", os.defpath)
        if self.is_open_mpi or folder in path.split(os.pathsep):
            return {}
        return {"PATH": os.pathsep.join([folder, path])}

    def has_default_hosts(self) -> bool:
        """Whether this Open MPI is configured to run on other hosts by default."""
        file = Path(self.path).parent.parent / "etc" / "prte-default-hostfile"
        with suppress(OSError):
            lines = map(str.strip, file.read_text().splitlines())
            return any(line and not line.startswith("#") for line in lines)
        return False

    def _must_be_known(self, flag: str) -> None:
        if not self.library:
            raise CommandError(
                f"{flag} needs Open MPI, MPICH or Intel MPI, and {self.path} belongs to none; pass its own "
                "arguments by --mpirun=ARG"
            )

    def must_be_open_mpi(self, flag: str) -> None:
        """Raise `CommandError` unless this is Open MPI, which `flag` needs."""
        if not self.is_open_mpi:
            raise CommandError(f"{flag} needs Open MPI, and {self.path} belongs to {self}")


def find_mpirun() -> str | None:
    """Return the path of the mpirun of this Python environment, else of the one on the PATH."""
    installed = Path(sysconfig.get_path("scripts")) / "mpirun"
    return str(installed) if installed.exists() else shutil.which("mpirun")


def ask_mpirun(path: str) -> Mpirun:
    """Return the mpirun at this path with its MPI library, from the output of `mpirun --version`."""
    unknown = Mpirun(path, "")
    try:
        result = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,  # the text decides
            env={**os.environ, **unknown.search_path()},
        )
    except (OSError, subprocess.TimeoutExpired):
        return unknown
    return recognise(path, result.stdout)


def recognise(path: str, text: str) -> Mpirun:
    """Return the mpirun at this path with its MPI library, from this output of `mpirun --version`.

    >>> recognise("mpirun", "mpirun (Open MPI) 5.0.11")
    Mpirun(path='mpirun', library='Open MPI', version='5.0.11')
    """
    names = {"Open MPI": OPEN_MPI, "Intel(R) MPI": INTEL, "HYDRA build details": MPICH}
    library = next((library for mark, library in names.items() if mark in text), "")
    version = re.search(r"\d+\.\d+(\.\d+)*", text)
    return Mpirun(path, library, version[0] if version and library else "")
