"""Emulated hosts on one Linux machine: network namespaces joined by a bridge, each link held to a rate.

    python -m benchmarks.netlab run --hosts 4 --rate 1gbit -m benchmarks.collectives --beside gloo
    python -m benchmarks.netlab run --hosts 2 --ranks-per-host 2 --rate 500mbit examples/train.py
    python -m benchmarks.netlab run --launcher torchrun --hosts 4 --rate 1gbit examples/train.py
    python -m benchmarks.netlab run --flow-bandwidth 100mbit --mpirun=--mca --mpirun=btl_tcp_links --mpirun=8 a.py
    python -m benchmarks.netlab rate --rate 1gbit
    python -m benchmarks.netlab clean

Each host has a namespace with one interface, eth0 at 10.99.0.1, 10.99.0.2, ..., a host name and a /dev/shm of its
own, so that MPI takes them for machines and talks TCP between them. Both ends of a link pass a token bucket
(tc's tbf), so that no host sends or receives faster than the rate. The script joins mpirun's world; MASTER_ADDR,
MASTER_PORT and GLOO_SOCKET_IFNAME are set as well, so that it can open a gloo group of torch.distributed over
the same links, and time the two in turn. `--launcher torchrun` starts it as torchrun would instead, without
MPI.

`--flow-bandwidth` also holds every flow (a TCP connection in one direction) to a rate, as clouds do. What a host
sends passes htb, with a class for each hash of addresses and ports. There are 1,024 classes; with 48 flows, one
pair of them on average meets in a class, which then holds both to the rate of one.

This needs root, iproute2, and a kernel with network namespaces, veth, bridges and tbf. It removes everything when
it ends, also after an error or Ctrl-C; `clean` removes what a killed run has left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bagua_comm.launch.mpirun import find_mpirun

from .bench import ROOT

PREFIX = "bg"
"""The beginning of the names of all namespaces, and of the bridge."""

BURST_BYTES = 1 << 17
"""Bytes that a link may send faster than its rate."""

QUEUE = "100ms"
"""Longest time that a packet waits for a link before it is dropped."""

SUBNET = "10.99.0"
"""The beginning of the addresses of all hosts."""

CONGESTION = "cubic"
"""How TCP between hosts finds its rate: as Linux does unless it is told otherwise. With the machine's own way,
figures would depend on the machine: bbr slows each connection down for 0.2 s in every 10 s."""

Direction = Literal["in", "out", "both"]

FLOW_CLASS_BITS, FLOW_BURST_BYTES = 10, 1 << 17
"""Flows are hashed into 2**10 classes; each sends so much at once, faster than its rate."""

FLOW_MAJOR, FIRST_FLOW_CLASS = 2, 16
"""The numbers of these classes are 2:10, 2:11 and so on, as tc writes them, in hexadecimal."""

_AGENT = """#!/bin/sh
# Stands in for ssh: enters the namespace of the host that mpirun names, unless that host is dead.
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
[ -e {memory}/dead-$host ] && exit 255
exec ip netns exec {prefix}-$host unshare -u sh -c "hostname $host; mount --bind {memory}/$host /dev/shm; $*"
"""


class LabError(Exception):
    """This machine cannot emulate hosts; the message names the reason."""


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

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"{SUBNET}.{host + 1}"

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
        _do(f"ip link set {self.prefix}v{host} down")
        pids = _kill_in(f"{self.prefix}-h{host}")
        for path in (self.memory / f"h{host}").iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        return pids

    def cut(self, host: int) -> None:
        """Set a host's link down: its processes live, and reach nobody. The agent does not reach it either.

        What the agent has started there before is silent from then on: its output does not cross the link, so
        the shells in which the agent's commands run are stopped.
        """
        (self.memory / f"dead-h{host}").touch()
        _do(f"ip link set {self.prefix}v{host} down")
        for pid in _processes_in(f"{self.prefix}-h{host}"):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text() == "sh\n":
                    os.kill(pid, signal.SIGSTOP)

    def mend(self, host: int) -> None:
        """Undo `cut`, or `fail` so that new processes can be started on this host."""
        (self.memory / f"dead-h{host}").unlink(missing_ok=True)
        _do(f"ip link set {self.prefix}v{host} up")
        for pid in _processes_in(f"{self.prefix}-h{host}"):
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
        }

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
def build(hosts: int, rate: str, flow_rate: str | None = None) -> Iterator[Lab]:
    """Emulate hosts in the body of `with`, and remove them at its end.

    Args:
        hosts: How many, 1 to 250.
        rate: The rate of each host's link, both ways, as tc writes it: "500mbit", "1gbit".
        flow_rate: The rate of each flow that a host sends: "100mbit"; None for no limit beside the link's.

    Raises:
        LabError: This machine does not allow it.
    """
    check_machine()
    prefix = f"{PREFIX}{os.getpid()}x"
    lab = Lab(prefix, hosts, rate, Path(tempfile.gettempdir(), f"{prefix}-memory"), flow_rate)
    try:
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
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
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
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split()
    return [int(pid) for pid in found]


def _names(command: Sequence[str], prefix: str) -> list[str]:
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return [line.split()[0] for line in lines if line.startswith(prefix)]


def _build(lab: Lab) -> None:
    bridge = f"{lab.prefix}b"
    lab.memory.mkdir()
    _do(f"mount -t tmpfs {lab.prefix} {lab.memory}")
    for host in range(lab.hosts):
        (lab.memory / f"h{host}").mkdir()
    _do(f"ip link add {bridge} type bridge")
    _do(f"ip link set {bridge} up")
    for host in range(lab.hosts):
        space, outside = f"{lab.prefix}-h{host}", f"{lab.prefix}v{host}"
        _do(f"ip netns add {space}")
        _do(f"ip link add {outside} type veth peer name eth0 netns {space}")
        _do(f"ip link set {outside} master {bridge} up")
        _do(f"ip -n {space} link set lo up")
        _do(f"ip -n {space} addr add {lab.address(host)}/24 dev eth0")
        _do(f"ip -n {space} link set eth0 up")
        _do(f"ip -n {space} route replace {SUBNET}.0/24 dev eth0 src {lab.address(host)} congctl {CONGESTION}")
        _shape(lab, host, lab.rate, BURST_BYTES, "both")
        if lab.flow_rate is not None:
            _do(f"tc -n {space} -batch -", "\n".join(_flow_commands(lab.flow_rate)))


def _shape(lab: Lab, host: int, rate: str, burst: int, direction: Direction) -> None:
    """Give the ends of a host's link a token bucket."""
    shape = f"root handle 1: tbf rate {rate} burst {burst} latency {QUEUE}"
    if direction != "in":
        _do(f"tc -n {lab.prefix}-h{host} qdisc replace dev eth0 {shape}")
    if direction != "out":
        _do(f"tc qdisc replace dev {lab.prefix}v{host} {shape}")


def _flow_commands(rate: str) -> Iterator[str]:
    """The tc queues that limit each flow, below the token bucket of eth0."""
    number = FLOW_MAJOR
    yield f"qdisc add dev eth0 parent 1:1 handle {number:x}: htb"
    for minor in range(FIRST_FLOW_CLASS, FIRST_FLOW_CLASS + (1 << FLOW_CLASS_BITS)):
        limits = f"rate {rate} burst {FLOW_BURST_BYTES} cburst {FLOW_BURST_BYTES} quantum {1 << 16}"
        yield f"class add dev eth0 parent {number:x}: classid {number:x}:{minor:x} htb {limits}"
    code = _hash_of_flow()
    program = ",".join([str(len(code)), *(" ".join(map(str, step)) for step in code)])
    yield f"filter add dev eth0 parent {number:x}: protocol ip prio 1 bpf bytecode {program!r}"


def _hash_of_flow() -> list[tuple[int, int, int, int]]:
    """A program of the kernel's packet filter: the class of a TCP packet, by receiver and ports; 0 for others.

    The ports alone differ between the connections of two hosts, and only the client's: so both count, and all of
    their bits, since Linux gives a client's connections to one server even ports alone.
    """
    load_half, load_byte, load_word = 0x28, 0x30, 0x20
    multiply, add_x, shift_right, add, to_x = 0x24, 0x0C, 0x74, 0x04, 0x07
    if_equal, give_a, give = 0x15, 0x16, 0x06
    golden = 0x9E3779B1  # 2**32 divided by the golden ratio: the upper bits of a product depend on all bits below
    return [
        (load_half, 0, 0, 12),
        (if_equal, 0, 11, 0x0800),  # IPv4
        (load_byte, 0, 0, 23),
        (if_equal, 0, 9, 6),  # TCP
        (load_word, 0, 0, 30),  # the receiver's address
        (multiply, 0, 0, golden),
        (to_x, 0, 0, 0),
        (load_word, 0, 0, 34),  # both ports
        (add_x, 0, 0, 0),
        (multiply, 0, 0, golden),
        (shift_right, 0, 0, 32 - FLOW_CLASS_BITS),
        (add, 0, 0, (FLOW_MAJOR << 16) + FIRST_FLOW_CLASS),
        (give_a, 0, 0, 0),
        (give, 0, 0, 0),
    ]


def _do(command: str, text: str = "") -> None:
    result = subprocess.run(command.split(), input=text, capture_output=True, text=True)
    if result.returncode:
        raise LabError(f"this machine does not allow emulated hosts: {command}: {result.stderr.strip()}")


# ---------------------------------------------------------------------------------------------------
# The rate that a link reaches
# ---------------------------------------------------------------------------------------------------


def measure_rate(lab: Lab, *, seconds: float = 2.0) -> float:
    """Bytes a second that arrive on host 1 from one plain TCP stream of host 0: no program can be faster."""
    this = (sys.executable, "-m", "benchmarks.netlab")
    receiver = subprocess.Popen(
        lab.inside(1, *this, "receive"), stdout=subprocess.PIPE, text=True, env=lab.environment()
    )
    try:
        lab.output(lab.inside(0, *this, "send", lab.address(1), str(seconds)))
        return float(receiver.communicate(timeout=30)[0])
    finally:
        receiver.kill()
        receiver.wait()


_PORT = 29399


def _send(address: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    with _connected(address) as stream:
        block = bytes(1 << 18)
        while time.monotonic() < end:
            stream.sendall(block)


def _connected(address: str) -> socket.socket:
    for _ in range(100):
        try:
            return socket.create_connection((address, _PORT), timeout=30)
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise LabError(f"no process listens at {address}, port {_PORT}")


def _receive() -> float:
    with socket.create_server(("", _PORT)) as server:
        server.settimeout(30)
        stream, _ = server.accept()
        buffer = bytearray(1 << 18)
        stream.recv_into(buffer)
        received, start = 0, time.monotonic()
        while count := stream.recv_into(buffer):
            received += count
        return received / (time.monotonic() - start)


# ---------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a Python script on emulated hosts")
    run.add_argument("--ranks-per-host", type=int, default=1, metavar="L")
    run.add_argument("--launcher", choices=["mpirun", "torchrun"], default="mpirun")
    run.add_argument("--mpirun", action="append", default=[], metavar="ARG", help="one more argument for mpirun")
    run.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS")
    rate = commands.add_parser("rate", help="print what one TCP stream reaches")
    for command in (run, rate):
        command.add_argument("--hosts", type=_hosts, default=4, metavar="N")
        command.add_argument("--rate", default="1gbit", help="rate of each link, as tc writes it")
        command.add_argument("--flow-bandwidth", metavar="RATE", help="rate of each flow: 100mbit; no limit")
    run.add_argument("-m", dest="module", action="store_true", help="the script is a module's name")
    run.add_argument("script")
    run.add_argument("args", nargs=argparse.REMAINDER)
    commands.add_parser("clean", help="remove what a killed run has left")
    send = commands.add_parser("send")
    send.add_argument("address")
    send.add_argument("seconds", type=float)
    commands.add_parser("receive")
    options = parser.parse_args(argv)
    act: dict[str, Callable[[argparse.Namespace], int]] = {"run": _run_command, "rate": _rate_command}
    try:
        if options.command in act:
            return act[options.command](options)
    except LabError as exc:
        print(f"netlab: {exc}", file=sys.stderr)
        return 1
    if options.command == "clean":
        remove(PREFIX)
    elif options.command == "send":
        _send(options.address, options.seconds)
    else:
        print(_receive())
    return 0


def _hosts(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 250:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hosts; expected 1 to 250")
    return int(text)


def _run_command(options: argparse.Namespace) -> int:
    script = [*(["-m"] if options.module else []), options.script, *options.args]
    with build(options.hosts, options.rate, options.flow_bandwidth) as lab:
        ranks = options.ranks_per_host
        if options.launcher == "mpirun":
            commands = [lab.mpirun(script, ranks_per_host=ranks, arguments=options.mpirun)]
        else:
            commands = lab.torchrun(script, ranks_per_host=ranks)
        return lab.run(*commands, timeout_s=options.timeout)


def _rate_command(options: argparse.Namespace) -> int:
    with build(max(2, options.hosts), options.rate, options.flow_bandwidth) as lab:
        print(f"{measure_rate(lab) / 1e9:.4f} GB/s")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
