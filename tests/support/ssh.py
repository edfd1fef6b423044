"""Workers of the MPI Operator on emulated hosts: each has an sshd, and the launcher reaches them by name.

    with ssh.workers(tmp_path, count=2, slots=2) as pods:
        result = pods.launch([sys.executable, "-m", "bagua_comm", "run", "--hostfile", str(pods.hostfile), ...])

A host of `benchmarks.netlab` stands for a pod: it has a network, a host name, and a file of names of its own. A
worker also has a /dev/shm of its own.

Keys and configurations lie in the folder that is given; the files of the user are neither read nor written. This
needs root and Debian's packages openssh-server and openssh-client.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import netlab
from support.launch import TESTS
from support.waiting import until

SSHD = "/usr/sbin/sshd"

SSHD_CONFIGURATION = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PidFile none
"""

SSH_CONFIGURATION = """
Host *
  IdentityFile {folder}/key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


class NoHosts(Exception):
    """This machine cannot run sshd on emulated hosts; the message says why."""


@dataclass(frozen=True)
class Pods:
    """A launcher and workers that run; see `workers`."""

    lab: netlab.Lab
    names: list[str]
    """The host names of the workers."""
    hostfile: Path
    """The file that the operator mounts as /etc/mpi/hostfile."""
    environment: dict[str, str]

    def launch(self, command, *, timeout_s=120.0):
        """Run a command in the launcher's pod; returns its result."""
        inside = _named(self.lab, 0, "job-launcher", *command)
        return subprocess.run(inside, capture_output=True, text=True, timeout=timeout_s, env=self.environment)

    def start(self, command, **settings):
        """Start a command in the launcher's pod; returns its process."""
        inside = _named(self.lab, 0, "job-launcher", *command)
        return subprocess.Popen(inside, text=True, env=self.environment, **settings)

    def kill(self, name):
        """End a worker as a loss of power does: its processes at once, its memory, and its link."""
        host = f"{self.lab.prefix}-h{self.names.index(name) + 1}"
        subprocess.run(["ip", "-n", host, "link", "set", "eth0", "down"], check=True)
        pids = subprocess.run(["ip", "netns", "pids", host], check=True, capture_output=True, text=True).stdout
        for pid in pids.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@contextlib.contextmanager
def workers(folder, count, slots):
    """Run the launcher and `count` workers in the body of `with`.

    Raises:
        NoHosts: This machine does not allow it.
    """
    for tool in (SSHD, "ssh", "ssh-keygen"):
        if shutil.which(tool) is None:
            raise NoHosts(f"there is no {tool}; install openssh-server and openssh-client")
    with contextlib.ExitStack() as stack:
        try:
            lab = stack.enter_context(netlab.build(count + 1, "1gbit"))
        except netlab.LabError as exc:
            raise NoHosts(str(exc)) from exc
        names = [f"job-worker-{number}" for number in range(count)]
        hosts = "127.0.0.1 localhost\n" + "".join(
            f"{lab.address(number)} {name}.job.default.svc {name}\n" for number, name in enumerate(names, 1)
        )
        _write_keys(folder)
        for host in range(count + 1):
            stack.enter_context(_names_on(lab, host, f"{hosts}{lab.address(0)} job-launcher\n"))
        Path("/run/sshd").mkdir(exist_ok=True)
        for number, name in enumerate(names, 1):
            stack.enter_context(_sshd(lab, number, name, folder))
        hostfile = folder / "hostfile"
        hostfile.write_text("".join(f"{name}.job.default.svc slots={slots}\n" for name in names))
        yield Pods(lab, names, hostfile, _environment(folder, hostfile))


def _write_keys(folder):
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "sshd_config").write_text(SSHD_CONFIGURATION.format(folder=folder))
    (folder / "ssh_config").write_text(SSH_CONFIGURATION.format(folder=folder))
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    ssh.chmod(0o755)


@contextlib.contextmanager
def _names_on(lab, host, text):
    """Give a host a separate /etc/hosts; `ip netns exec` mounts this file there."""
    folder = Path(f"/etc/netns/{lab.prefix}-h{host}")
    folder.mkdir(parents=True)
    try:
        (folder / "hosts").write_text(text)
        yield
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def _sshd(lab, host, name, folder):
    """Run sshd on a host in the body of `with`, once it answers."""
    sshd = [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]
    own_memory = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=256m tmpfs /dev/shm && exec "$@"', "sh"]
    command = _named(lab, host, name, *own_memory, *sshd)
    with open(folder / f"{name}.log", "w") as log:
        daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        printed = folder / f"{name}.log"
        until(lambda: "listening" in printed.read_text() or daemon.poll() is not None)
        if daemon.poll() is not None:
            raise RuntimeError(f"sshd does not answer: {printed.read_text()}")
        yield
    finally:
        daemon.terminate()
        daemon.wait(timeout=30)


def _named(lab, host, name, *command):
    """The command that runs `command` on a host under this host name."""
    return lab.inside(host, "sh", "-c", 'hostname "$0" && exec "$@"', name, *command)


def _environment(folder, hostfile):
    """The variables that the operator gives a launcher, and the paths of this library and our ssh."""
    foreign = ("SLURM_", "PMI", "OMPI_", "PRTE_", "MASTER_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {
        **inherited,
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": str(hostfile),
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "PATH": os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), inherited["PATH"]]),
        "PYTHONPATH": str(TESTS.parent),
    }
