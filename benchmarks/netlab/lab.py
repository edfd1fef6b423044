"""Emulated hosts: namespaces, their links, and commands that run on them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bagua_comm.launch.mpirun import find_mpirun

from ..bench import ROOT
from ..bench.record import NETWORK_VARIABLE
from .flows import flow_commands
from .latency import delayed
from .marks import mark
from .tools import LabError, do

PREFIX = "bg"
"""The beginning of the names of all namespaces, and of the bridge."""

BURST_BYTES = 1 << 17
"""Bytes that a link may send faster than its rate."""

QUEUE = "100ms"
"""Longest time that a packet waits for a link before it is dropped."""

QUEUE_PACKETS = 10_000
"""Packets that may wait for the switch that delays them to read them; dropped ones would be a bottleneck."""

SUBNET = "10.99.0"
"""The beginning of the addresses of all hosts."""

CONGESTION = "cubic"
"""How TCP between hosts finds its rate: as Linux does unless it is told otherwise. With the machine's own way,
figures would depend on the machine: bbr slows each connection down for 0.2 s in every 10 s."""

Direction = Literal["in", "out", "both"]

_AGENT = """#!/bin/sh
# Stands in for ssh: enters the namespace of the host that mpirun names, unless that host is dead.
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
[ -e {memory}/dead-$host ] && exit 255
exec ip netns exec {prefix}-$host unshare -u sh -c "hostname $host; mount --bind {memory}/$host /dev/shm; $*"
"""


@dataclass(frozen=True)
class Lab:
    """Emulated hosts that exist; see `build`."""

    prefix: str
    hosts: int
    rate: str
    memory: Path
    """A file system in memory; each host finds one of its folders in /dev/shm."""
    flow_rate: str | None = None
    """The rate of each flow."""
    latency_s: float = 0.0
    """Time that each packet waits between two hosts, one way."""

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"{SUBNET}.{host + 1}"

    def tap(self, host: int) -> str:
        """The device by which a host's packets go to the switch that delays them; see latency.py."""
        return f"{self.prefix}t{host}"

    def bridge(self, host: int) -> str:
        """The bridge of a host; all share one, unless a switch joins them, see latency.py."""
        return f"{self.prefix}b{host if self.latency_s else 0}"

    def inside(self, host: int, *command: str) -> list[str]:
        """The command that runs `command` on a host."""
        mount = f"mount --bind {self.memory}/h{host} /dev/shm"
        named = ["unshare", "-u", "sh", "-c", f'hostname h{host}; {mount}; exec "$@"', "sh"]
        return ["ip", "netns", "exec", f"{self.prefix}-h{host}", *named, *command]

    def mpirun(
        self, script: Sequence[str], *, ranks_per_host: int = 1, arguments: Sequence[str] = ()
    ) -> list[str]:
        """The command that runs Python on all hosts under mpirun; `script` is what follows `python`."""
        mpirun = find_mpirun()
        if mpirun is None:
            raise LabError("there is no mpirun; pip install 'bagua-comm[mpi]' brings Open MPI")
        hosts = ",".join(f"h{i}:{ranks_per_host}" for i in range(self.hosts))
        variables = [part for name in self.variables() for part in ("-x", name)]
        flags = [
            "--prtemca",
            "plm_ssh_agent",
            str(self.agent()),
            "--host",
            hosts,
            "-n",
            str(self.hosts * ranks_per_host),
        ]
        flags += ["--bind-to", "none", "--mca", "btl_tcp_if_include", "eth0", "--mca", "mpi_yield_when_idle", "1"]
        return self.inside(0, mpirun, *flags, *variables, *arguments, sys.executable, *script)

    def run_command(self, *, ranks_per_host: int = 1) -> list[str]:
        """The command `bagua run` on all hosts, without the script; run it inside of host 0."""
        hosts = ",".join(f"h{i}:{ranks_per_host}" for i in range(self.hosts))
        agent = (f"--mpirun={word}" for word in ("--prtemca", "plm_ssh_agent", str(self.agent())))
        command = [sys.executable, "-m", "bagua_comm", "run", "--host", hosts, "--interface", "eth0", *agent]
        return [*command, "--env", f"PYTHONPATH={ROOT}"]

    def agent(self) -> Path:
        """A program for mpirun to start commands on hosts with, as ssh does."""
        agent = Path(tempfile.gettempdir(), f"{self.prefix}-agent")
        agent.write_text(_AGENT.format(prefix=self.prefix, memory=self.memory))
        agent.chmod(0o755)
        return agent

    def fail(self, host: int) -> list[int]:
        """Let a host die: its link goes down, all of its processes end, and its memory is lost.

        It does not answer from then on, also not to the agent. Returns the ids of the processes.
        """
        (self.memory / f"dead-h{host}").touch()
        do(f"ip link set {self.prefix}v{host} down")
        pids = _kill_in(f"{self.prefix}-h{host}")
        for path in (self.memory / f"h{host}").iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        return pids

    def cut(self, host: int) -> None:
        """Set a host's link down: its processes live, and reach nobody. The agent does not reach it either.

        What the agent has started there before is silent from then on: its output does not cross the link, so
        the shells in which the agent's commands run are stopped.
        """
        do(f"ip link set {self.prefix}v{host} down")
        self._silence(host)

    def split(self, hosts: Sequence[int]) -> None:
        """Separate these hosts from the others: each group reaches itself alone, and no link goes down.

        The agent does not reach them either, and the other hosts do not see their processes; see `cut`, `mark`.

        Raises:
            LabError: The hosts of this lab have a latency.
        """
        if self.latency_s:
            raise LabError("hosts with a latency have no bridge in common, so they cannot be split")
        do(f"ip link add {self.prefix}c type bridge")
        do(f"ip link set {self.prefix}c up")
        for host in hosts:
            do(f"ip link set {self.prefix}v{host} master {self.prefix}c")
            self._silence(host)
            for pid in _processes_in(f"{self.prefix}-h{host}"):
                mark(pid, hidden=True)

    def _silence(self, host: int) -> None:
        (self.memory / f"dead-h{host}").touch()
        for pid in _processes_in(f"{self.prefix}-h{host}"):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text() == "sh\n":
                    os.kill(pid, signal.SIGSTOP)

    def mend(self, host: int) -> None:
        """Undo `cut` and `split`, or `fail` so that new processes can be started on this host."""
        (self.memory / f"dead-h{host}").unlink(missing_ok=True)
        do(f"ip link set {self.prefix}v{host} master {self.bridge(host)} up")
        for pid in _processes_in(f"{self.prefix}-h{host}"):
            mark(pid, hidden=False)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def limit(self, host: int, rate: str, direction: Direction = "both") -> None:
        """Hold what a host sends ("out"), what it is sent ("in"), or both to another rate, also during a run."""
        _shape(self, host, rate, BURST_BYTES, direction)

    def lose(self, host: int, direction: Direction) -> None:
        """Lose all that a host sends or is sent, without an error; `limit` ends it."""
        _shape(self, host, self.rate, 1, direction)  # tbf drops a packet that is larger than the burst

    def torchrun(self, script: Sequence[str], *, ranks_per_host: int = 1) -> list[list[str]]:
        """The commands, one for each rank, that run Python as torchrun would; see `mpirun`."""
        world = self.hosts * ranks_per_host
        return [
            self.inside(
                rank // ranks_per_host,
                "env",
                f"RANK={rank}",
                f"WORLD_SIZE={world}",
                f"LOCAL_RANK={rank % ranks_per_host}",
                f"LOCAL_WORLD_SIZE={ranks_per_host}",
                sys.executable,
                *script,
            )
            for rank in range(world)
        ]

    def variables(self) -> dict[str, str]:
        """Environment variables of all ranks: one thread each, and the address of gloo's rendezvous."""
        return {
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": "29400",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            NETWORK_VARIABLE: self.network(),
        }

    def network(self) -> str:
        """The hosts and their links, for records of programs: JSON, of a text and the arguments of `run`."""
        text = f"{self.hosts} emulated hosts, links of {self.rate}"
        arguments = f"--hosts {self.hosts} --rate {self.rate}"
        if self.flow_rate:
            text += f", each flow at most {self.flow_rate}"
            arguments += f" --flow-bandwidth {self.flow_rate}"
        if self.latency_s:
            text += f", latency {1e3 * self.latency_s:g} ms one way"
            arguments += f" --latency {1e3 * self.latency_s:g}ms"
        return json.dumps({"text": text, "arguments": arguments})

    def environment(self) -> dict[str, str]:
        """The whole environment to start the commands in."""
        as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return {**os.environ, **as_root, **self.variables()}

    def run(self, *commands: Sequence[str], timeout_s: float = 3600.0) -> int:
        """Run commands at the same time; the exit code of the first that fails, else 0.

        Raises:
            subprocess.TimeoutExpired: They took longer, and were killed.
        """
        running = [subprocess.Popen(command, env=self.environment()) for command in commands]
        deadline = time.monotonic() + timeout_s
        try:
            codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in running]
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return next((code for code in codes if code), 0)

    def output(self, command: Sequence[str], *, timeout_s: float = 60.0) -> str:
        """Run a command and return its output.

        Raises:
            subprocess.CalledProcessError: It fails.
            subprocess.TimeoutExpired: It takes longer.
        """
        result = subprocess.run(
            command, env=self.environment(), capture_output=True, text=True, timeout=timeout_s, check=True
        )
        return result.stdout


@contextlib.contextmanager
def build(hosts: int, rate: str, flow_rate: str | None = None, latency_s: float = 0.0) -> Iterator[Lab]:
    """Emulate hosts in the body of `with`, and remove them at its end.

    Args:
        hosts: How many, 1 to 250.
        rate: The rate of each host's link, both ways, as tc writes it: "500mbit", "1gbit".
        flow_rate: The rate of each flow that a host sends: "100mbit"; None for no limit beside the link's.
        latency_s: Seconds that each packet waits between two hosts, one way: a round trip takes twice that.

    Raises:
        LabError: This machine does not allow it.
    """
    check_machine()
    prefix = f"{PREFIX}{os.getpid()}x"
    lab = Lab(prefix, hosts, rate, Path(tempfile.gettempdir(), f"{prefix}-memory"), flow_rate, latency_s)
    switch = delayed(latency_s, [lab.tap(i) for i in range(hosts)]) if latency_s else contextlib.nullcontext()
    try:
        with switch:
            _build(lab)
            yield lab
    finally:
        remove(lab.prefix)


def check_machine() -> None:
    """Raise unless hosts can be emulated here.

    Raises:
        LabError: They cannot; the message says what is missing.
    """
    if not sys.platform.startswith("linux"):
        raise LabError(f"emulated hosts need Linux; this is {sys.platform}")
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            raise LabError(f"there is no {tool}; install iproute2 and util-linux")
    if os.geteuid() != 0:
        raise LabError("emulated hosts need root: network namespaces and traffic control are the kernel's")


def remove(prefix: str) -> None:
    """Kill the processes on hosts whose names begin with `prefix`, and remove these hosts and their bridge."""
    for name in _names(["ip", "netns", "list"], prefix):
        _kill_in(name)
        subprocess.run(["ip", "netns", "delete", name], check=False)
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    for name in re.findall(rf"^\d+: ({prefix}[\w-]*)[@:]", links, re.MULTILINE):
        subprocess.run(["ip", "link", "delete", name], check=False, stderr=subprocess.DEVNULL)
    for agent in Path(tempfile.gettempdir()).glob(f"{prefix}*-agent"):
        agent.unlink(missing_ok=True)
    for memory in Path(tempfile.gettempdir()).glob(f"{prefix}*-memory"):
        subprocess.run(["umount", "--lazy", str(memory)], check=False, stderr=subprocess.DEVNULL)
        memory.rmdir()


def _kill_in(namespace: str) -> list[int]:
    """Kill all processes on a host; returns their ids."""
    pids = _processes_in(namespace)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids


def _processes_in(namespace: str) -> list[int]:
    ask = ["ip", "netns", "pids", namespace]
    found = subprocess.run(ask, capture_output=True, text=True, check=False)  # it may be gone
    return [int(pid) for pid in found.stdout.split()]


def _names(command: Sequence[str], prefix: str) -> list[str]:
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[0] for line in lines if line.startswith(prefix)]


def _build(lab: Lab) -> None:
    lab.memory.mkdir()
    do(f"mount -t tmpfs {lab.prefix} {lab.memory}")
    for host in range(lab.hosts):
        (lab.memory / f"h{host}").mkdir()
    for host in range(lab.hosts if lab.latency_s else 1):
        do(f"ip link add {lab.bridge(host)} type bridge")
        do(f"ip link set {lab.bridge(host)} up")
        if lab.latency_s:
            do(f"ip link set {lab.tap(host)} master {lab.bridge(host)} up txqueuelen {QUEUE_PACKETS}")
    for host in range(lab.hosts):
        space, outside = f"{lab.prefix}-h{host}", f"{lab.prefix}v{host}"
        do(f"ip netns add {space}")
        do(f"ip link add {outside} type veth peer name eth0 netns {space}")
        do(f"ip link set {outside} master {lab.bridge(host)} up")
        do(f"ip -n {space} link set lo up")
        do(f"ip -n {space} addr add {lab.address(host)}/24 dev eth0")
        do(f"ip -n {space} link set eth0 up")
        do(f"ip -n {space} route replace {SUBNET}.0/24 dev eth0 src {lab.address(host)} congctl {CONGESTION}")
        _shape(lab, host, lab.rate, BURST_BYTES, "both")
        if lab.flow_rate is not None:
            do(f"tc -n {space} -batch -", "\n".join(flow_commands(lab.flow_rate)))


def _shape(lab: Lab, host: int, rate: str, burst: int, direction: Direction) -> None:
    """Give the ends of a host's link a token bucket."""
    shape = f"root handle 1: tbf rate {rate} burst {burst} latency {QUEUE}"
    if direction != "in":
        do(f"tc -n {lab.prefix}-h{host} qdisc replace dev eth0 {shape}")
    if direction != "out":
        do(f"tc qdisc replace dev {lab.prefix}v{host} {shape}")
