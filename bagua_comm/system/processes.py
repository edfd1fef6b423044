"""This host, and other processes on it, as Linux shows them.

A process id is valid in one PID namespace only. Containers may share the name of their host, its memory and its
network, and yet number their processes independently. So a process that another process names is a `ProcessId`,
which is looked up, compared and killed through its methods.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import re
import secrets
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PORT_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
_LOWEST_PORT = 20_000
"""Below are the ports of well-known services."""

_PORT_TRIES = 100


def this_host() -> str:
    """Return a text that identifies this host: the same in all of its processes, and in no others.

    It contains the host's name, since emulated hosts share a kernel, and the boot id of Linux, since containers
    on several hosts may have one name.

    >>> this_host() == this_host()
    True
    """
    started = ""
    with suppress(OSError):
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {started}"


def this_network() -> str:
    """Return a text that is the same in all processes that share 127.0.0.1; a container may have its own.

    >>> this_network() == this_network()
    True
    """
    with suppress(OSError):
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{started} {os.stat('/proc/self/ns/net').st_ino}"
    return this_host()


def free_port() -> int:
    """Return a port that is free now on all addresses of this host, for a server that starts soon.

    Linux chooses ports for connections, and for servers that ask for any port, from the range in
    /proc/sys/net/ipv4/ip_local_port_range. This one is below it, unless that range begins too low.

    Raises:
        OSError: No port is free.
    """
    first = 0
    with suppress(OSError, ValueError):
        first = int(Path(_PORT_RANGE).read_text().split()[0])
    own = random.SystemRandom()  # ranks that share a seed must not share a port
    for _ in range(_PORT_TRIES if first > _LOWEST_PORT else 0):
        with suppress(OSError):
            return _bound(own.randrange(_LOWEST_PORT, first))
    return _bound(0)


def _bound(port: int) -> int:
    """Bind this port, or any port if 0, and return it free again."""
    with socket.socket() as one:
        one.bind(("", port))
        number: int = one.getsockname()[1]
    return number


def pid_namespace() -> str:
    """Return a text that identifies the PID namespace: the same in all of its processes, and in no others.

    >>> pid_namespace() == pid_namespace()
    True
    """
    number, seen = 0, True  # a system without namespaces has a single one
    with suppress(OSError):
        number = os.stat("/proc/self/ns/pid").st_ino
    if os.path.isdir("/proc"):
        try:
            seen = os.readlink("/proc/self") == str(os.getpid())
        except OSError:
            seen = not os.path.exists("/proc/stat")  # then it is not Linux's
    # If /proc shows another namespace than this process is in, no process can be looked up there.
    return f"{this_host()} {number}" if seen else f"{this_host()} {number} {_nonce(os.getpid())}"


def namespace_number() -> int:
    """Return a hash of `pid_namespace`, of 63 bits, for names of files and places where a text does not fit."""
    return int.from_bytes(hashlib.blake2b(pid_namespace().encode(), digest_size=8).digest(), "little") >> 1


@functools.cache
def _nonce(process: int) -> str:
    """A random text of this process; the argument separates a forked child from its parent."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class ProcessId:
    """A unique id of a process, valid in all processes of all hosts.

    >>> ProcessId.mine().state() in ("running", "")
    True
    >>> ProcessId("another host", os.getpid(), 0).has_ended()
    False
    """

    namespace: str
    """See `pid_namespace`."""
    pid: int
    start: int
    """See `start_of`."""

    @classmethod
    def mine(cls) -> ProcessId:
        """Return the id of this process."""
        return ProcessId(pid_namespace(), os.getpid(), start_of(os.getpid()))

    @classmethod
    def parse(cls, text: str) -> ProcessId:
        """Return the id that `text` has written.

        Raises:
            ValueError: This is not such a text.

        >>> ProcessId.parse("12 345 host 4026531836")
        ProcessId(namespace='host 4026531836', pid=12, start=345)
        """
        pid, start, namespace = text.split(" ", 2)
        return ProcessId(namespace, int(pid), int(start))

    def text(self) -> str:
        """Return the id as one line, for a file or an environment variable.

        >>> ProcessId("host 4026531836", 12, 345).text()
        '12 345 host 4026531836'
        """
        return f"{self.pid} {self.start} {self.namespace}"

    def is_visible(self) -> bool:
        """Whether this process can look up that one by its process id."""
        return self.namespace == pid_namespace()

    def state(self) -> str:
        """Return its state, as `state_of` does; "" also if it is not visible."""
        if not self.is_visible():
            return ""
        return state_of(self.pid) if start_of(self.pid) == self.start else "ended"

    def has_ended(self) -> bool:
        """Whether it is known to have ended; False if it is not visible."""
        return self.state() == "ended"

    def kill(self) -> bool:
        """Kill it, with SIGKILL; returns whether it was visible and running."""
        return self.is_visible() and kill(self.pid, self.start)


def state_of(process: int) -> str:
    """Return the state of a process: "running", "stopped" (by a signal or a debugger), "ended", or "" if unknown.

    >>> state_of(os.getpid()) in ("running", "")
    True
    """
    if not os.path.isdir("/proc/self"):
        return ""
    try:
        letter = _stat(process)[0]
    except OSError:
        return "ended"
    return {"T": "stopped", "t": "stopped", "Z": "ended", "X": "ended"}.get(letter, "running")


def mapped_files(folder: str) -> list[str]:
    """Return the files in a folder that this process has mapped into its memory.

    >>> mapped_files("/no/such/folder/")
    []
    """
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sorted({line[line.index(folder) :] for line in lines if folder in line})
    return []


def start_of(process: int) -> int:
    """Return the start time of a process, in clock ticks of Linux; 0 if it has ended, or that is unknown.

    The process id and the start time together identify one process of this namespace forever.

    >>> start_of(os.getpid()) == start_of(os.getpid())
    True
    """
    with suppress(OSError, IndexError, ValueError):
        return int(_stat(process)[19])
    return 0


def _stat(process: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the name before it may contain any character."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def _parent(process: int) -> int:
    return int(_stat(process)[1])


def children_of(process: int) -> list[int]:
    """Return the visible processes that `process` has started and that have not ended.

    >>> os.getpid() in children_of(os.getppid())
    True
    """
    numbers = [entry.name for entry in os.scandir("/proc")] if os.path.isdir("/proc/self") else []
    found = []
    for number in map(int, filter(str.isdecimal, numbers)):
        with suppress(OSError, IndexError, ValueError):
            if _parent(number) == process and state_of(number) in ("running", "stopped"):
                found.append(number)
    return found


def started_with(name: str, value: str) -> dict[int, dict[str, str]]:
    """Return the visible processes that were started with this value of an environment variable.

    Returns:
        By process id, all environment variables at its start.

    >>> started_with("SET_BY_NOBODY", "1")
    {}
    """
    found = {}
    for entry in os.scandir("/proc") if os.path.isdir("/proc/self") else ():
        if entry.name.isdecimal():
            with suppress(OSError):
                variables = _environment(int(entry.name))
                if variables.get(name) == value:
                    found[int(entry.name)] = variables
    return found


def _environment(process: int) -> dict[str, str]:
    """The environment variables of a process at its start."""
    texts = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(text).partition("=") for text in texts if text)
    return {name: value for name, _, value in pairs}


def kill(process: int, start: int) -> bool:
    """Kill a process of this namespace, if its start time is `start`; returns whether SIGKILL was sent.

    Use `ProcessId.kill` for a process id from another process.
    """
    try:
        handle = os.pidfd_open(process)  # it refers to this process even if its id is reused
    except (AttributeError, OSError):  # AttributeError: only Linux has it
        return False
    try:
        if start_of(process) != start:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def starter(variable: str) -> int:
    """Return the nearest ancestor of this process that was started without this environment variable.

    A launcher sets variables for its processes that it does not have itself; processes in between pass them on.
    If no such ancestor is visible, the result is the first process, 1 or 0.

    >>> starter("SET_BY_NOBODY") == os.getppid()
    True
    """
    process = os.getppid()
    with suppress(OSError, IndexError, ValueError):
        while process > 1 and variable in _environment(process):
            process = _parent(process)
    return process


def sees_starter(variable: str) -> bool:
    """Whether `starter` is visible; from within a container, a process may not see its siblings.

    >>> sees_starter("SET_BY_NOBODY")
    True
    """
    process = starter(variable)
    try:
        return process > 0 and variable not in _environment(process)
    except OSError:  # it belongs to another user, so it has none of our variables
        return True


def slurm_step() -> str | None:
    """Return the Slurm step of this process: "8.0", or "8.batch" in the script of a job; None if not known.

    For each step, Slurm starts a process on each node with the title "slurmstepd: [8.0]"; the tasks are its
    children. Environment variables are less reliable, since a job that a task submits inherits them.

    >>> slurm_step()
    """
    process = os.getpid()
    with suppress(OSError, ValueError):
        while process > 0:
            title = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
            if found := re.match(r"slurmstepd: \[(\d+)(?:\+\d+)?(?:\.(\w+))?", title):
                return f"{found[1]}.{found[2] or 'batch'}"
            process = _parent(process)
    return None
