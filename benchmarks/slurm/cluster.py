"""A Slurm of two nodes on this machine: slurmctld and munged here, and a slurmd for each emulated node.

    with start() as cluster:
        result = cluster.run("srun", "--mpi=pmix", "-N2", "-n2", sys.executable, "script.py")
        assert result.returncode == 0, result.stderr

    result = cluster.batch("job.sh")  # sbatch --wait; its output comes back as `stdout`

`run` starts any command with the variables that Slurm's tools need (`cluster.environment`). In tests/clusters the
fixture `slurm` starts one cluster for a file, or skips with the reason why there is none.

A node is a slurmd in namespaces of its own, so that it has a host name (n1, n2; each finds the other's address by
it), a /dev/shm, a /run and a /tmp, and sees none of the other's processes. Both have this machine's network and
other files. All files of Slurm, and of the munge that it trusts, lie in one temporary folder. At the end, also
after an error, every process on a node is killed and the folder removed.

This needs root and Debian's packages in `PACKAGES`; `install` installs them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bagua_comm.system.processes import free_port
from benchmarks.bench import ROOT

PACKAGES = ("munge", "slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libpmix-dev")
"""Debian's packages that hold what this starts."""

TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scancel", "sinfo", "unshare", "setpriv")

NODES = {"n1": "127.0.0.2", "n2": "127.0.0.3"}
"""The nodes' host names, and the addresses that these stand for on the nodes."""

SLOTS = 2
"""How many tasks a node takes, whatever cores this machine has."""

APT_S = 200
"""The time limit of apt-get, for the list of packages and for their installation."""

LONGEST_FOLDER = 107 - len("/spool-n1/stepd.slurm.pmix.1000.0")
"""The longest path of Slurm's folder: it has sockets of tasks, and their paths may have 107 bytes.

Slurm reports no error if one is longer: srun ends with 0 without running a task.
"""

START_S = 60.0
"""The time limit for the start of the nodes."""

CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.socket.2
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=2
MessageTimeout=30
InactiveLimit=0
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


class NoSlurmError(Exception):
    """This machine cannot run Slurm; the message says why."""


@dataclass(frozen=True)
class Cluster:
    """A Slurm that runs; see `start`."""

    folder: Path
    environment: dict[str, str]
    """Variables for Slurm's tools, and for ranks, which find this library and each other by them."""

    def run(
        self, *command: object, timeout_s: float = 100.0, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with the variables of this cluster; returns its result."""
        return subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env={**self.environment, **(env or {})},
        )

    def batch(
        self, script: Path, *options: str, timeout_s: float = 100.0, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Submit a script and wait for its end; returns sbatch's result, with the job's output as `stdout`.

        Whatever `#SBATCH --output=` the script has, `--output` on the command line goes before it.
        """
        output = self.folder / f"job-{time.monotonic_ns()}.out"
        given = ["sbatch", "--wait", f"--output={output}", *options, script]
        result = self.run(*given, timeout_s=timeout_s, env=env)
        result.stdout = output.read_text(errors="replace") if output.exists() else ""
        return result

    def logs(self) -> str:
        """The last lines of the logs of all daemons, to show with a failure."""
        return "\n".join(
            f"== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            for log in sorted(self.folder.glob("*.log"))
        )


def install() -> None:
    """Install Debian's packages of Slurm, unless its tools are there.

    Raises:
        NoSlurmError: They are not there, and cannot be installed.
    """
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        raise NoSlurmError("a Slurm for tests needs root: its nodes are namespaces of the kernel")
    with open(Path(tempfile.gettempdir(), "bagua-tests-slurm.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if not missing:
            return
        if shutil.which("apt-get") is None:
            raise NoSlurmError(f"there is no {missing[0]}, and no apt-get to install {', '.join(PACKAGES)}")
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for arguments in (["update"], ["install", "--yes", "--no-install-recommends", *PACKAGES]):
            command = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", *arguments]
            result = subprocess.run(
                ["timeout", str(APT_S), *command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=env,
            )
            if result.returncode != 0 and arguments != ["update"]:
                reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
                raise NoSlurmError(f"apt-get cannot install {', '.join(PACKAGES)}: {reason}")


@contextlib.contextmanager
def start(*, named: bool = True, shared: Sequence[Path] = ()) -> Iterator[Cluster]:
    """Run a Slurm of two nodes in the body of `with`.

    Args:
        shared: Folders of /tmp that the nodes see, besides those of Slurm and of this library.
        named: Whether the host name of a node is its name in Slurm; else it is that of this machine.

    Raises:
        NoSlurmError: This machine does not allow it.
        RuntimeError: The nodes did not come up; the message has the logs.
    """
    install()
    with contextlib.ExitStack() as daemons:
        folder = Path(
            daemons.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True))
        )
        if len(str(folder)) > LONGEST_FOLDER:
            raise RuntimeError(
                f"Slurm needs a folder whose path has at most {LONGEST_FOLDER} characters, not {folder}"
            )
        configuration = _configure(folder, named)
        cluster = Cluster(folder, _environment(configuration))
        daemons.enter_context(_daemon(folder, "munged", "--foreground", "--force", *_of_munge(folder)))
        daemons.enter_context(_daemon(folder, "slurmctld", "-D", "-i", "-f", configuration))
        for node in NODES:
            inside = [
                f"mount --bind {folder}/hosts /etc/hosts",
                "mount -t tmpfs tmpfs /dev/shm",
                "mount -t tmpfs tmpfs /run",
                f"ln -s {folder}/munge /run/munge",
                *_own_temporary_files([folder, ROOT, *map(Path, (sys.prefix, sys.base_prefix)), *shared]),
                'exec "$@"',
            ]
            script = " && ".join([f"hostname {node}", *inside] if named else inside)
            shell = ["sh", "-c", script, "sh"]
            daemons.enter_context(_daemon(folder, *shell, "slurmd", "-D", "-N", node, "-f", configuration))
        _wait_for_nodes(cluster)
        yield cluster


def _own_temporary_files(seen: Sequence[Path]) -> list[str]:
    """Commands that hide this machine's /tmp, except for some folders.

    prted names its files in /tmp by its process number and mpirun's, and leaves them if it is killed. Each new
    node has these numbers again; a prted that finds the files of an earlier one ends, and mpirun with it.
    """
    folders = {path.resolve() for path in seen if path.resolve().is_relative_to("/tmp")}
    outer = sorted(path for path in folders if not folders & set(path.parents))
    kept = [(shlex.quote(f"/run/of-tmp/{number}"), shlex.quote(str(path))) for number, path in enumerate(outer)]
    return [
        *(f"mkdir -p {place} && mount --bind {path} {place}" for place, path in kept),
        "mount -t tmpfs tmpfs /tmp",
        *(f"mkdir -p {path} && mount --bind {place} {path}" for place, path in kept),
    ]


def _of_munge(folder: Path) -> list[str]:
    """The arguments of munged, with a new key; its socket is where processes on a node look for it, too."""
    own = folder / "munge"
    own.mkdir(mode=0o755)
    (own / "key").write_bytes(os.urandom(64))
    (own / "key").chmod(0o400)
    files = ("key-file=key", "socket=munge.socket.2", "pid-file=pid", "log-file=log", "seed-file=seed")
    return [f"--{file.replace('=', f'={own}/')}" for file in files]


def _configure(folder: Path, named: bool) -> Path:
    """Write slurm.conf; returns its path."""
    for name in ("state", *(f"{part}-{node}" for node in NODES for part in ("spool", "tmp"))):
        (folder / name).mkdir(parents=True, exist_ok=True)
    host = socket.gethostname()
    port, *ports = free_ports(1 + len(NODES))
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={node if named else host} NodeAddr=127.0.0.1 Port={each} CPUs={SLOTS}"
        for node, each in zip(NODES, ports, strict=True)
    )
    path = folder / "slurm.conf"
    addresses = [f"{address} {node}\n" for node, address in NODES.items()]
    (folder / "hosts").write_text("".join([Path("/etc/hosts").read_text(), *addresses]))
    path.write_text(CONFIGURATION.format(folder=folder, host=host, port=port, nodes=nodes, names=",".join(NODES)))
    return path


def free_ports(count: int) -> list[int]:
    """Ports of this machine that are free now."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def _environment(configuration: Path) -> dict[str, str]:
    """This process's variables without those of a Slurm or MPI that started it, and those of the tests."""
    foreign = ("SLURM_", "PMI", "OMPI_", "PRTE_", "MPI_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {
        **inherited,
        "SLURM_CONF": str(configuration),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_btl_tcp_if_include": "lo",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


@contextlib.contextmanager
def _daemon(folder: Path, *command: object) -> Iterator[None]:
    """Run a daemon in new namespaces in the body of `with`; then kill it and all its descendants.

    They are killed as well if this process dies.
    """
    die_with_us = ["setpriv", "--pdeathsig", "KILL"]
    namespaces = ["unshare", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with open(folder / "daemons.log", "a") as log:
        outside = subprocess.Popen(
            [*die_with_us, *namespaces, *map(str, command)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield
        ended = outside.poll()
        assert ended is None, f"{command[0]} ended with exit code {ended} before it was killed"
    finally:
        # The daemon is the first process in its namespace: the kernel kills all others there when it dies.
        for first in Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(first), signal.SIGKILL)
        try:
            outside.wait(5)  # unshare ends with 1, or by the signal, depending on its version
        except subprocess.TimeoutExpired:
            outside.kill()
            outside.wait()


def _wait_for_nodes(cluster: Cluster) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        result = cluster.run("sinfo", "--noheader", "--Node", "--format=%t")
        if result.stdout.split() == ["idle"] * len(NODES):
            return
        time.sleep(0.2)  # sleeps: between questions to Slurm
    raise RuntimeError(
        f"Slurm's nodes are not idle after {START_S:g} s: {result.stdout}{result.stderr}\n{cluster.logs()}"
    )
