"""What Linux tells about this host, and about another process on it.

The number of a process means something in one PID namespace alone. Containers may share the name of their host,
its memory and its network, and yet count their processes each by itself. So a process of which another one tells
is a `ProcessId`, and is looked up, compared or killed through that.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


def this_host() -> str:
    """A text that is the same in all processes of this host, and in no process of another one.

    It has the host's name, since emulated hosts share a kernel, and the number that Linux gave itself when it
    started, since containers on several hosts may have one name.

    >>> this_host() == this_host()
    True
    """
    started = ""
    with suppress(OSError):
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {started}"


def this_network() -> str:
    """A text that is the same in all processes that share 127.0.0.1: containers may have one of their own.

    >>> this_network() == this_network()
    True
    """
    with suppress(OSError):
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{started} {os.stat('/proc/self/ns/net').st_ino}"
    return this_host()


def pid_namespace() -> str:
    """A text that is the same in all processes that see each other by their process ids, and in no other ones.

    >>> pid_namespace() == pid_namespace()
    True
    """
    number, seen = 0, True  # where no namespaces are known, there is one
    with suppress(OSError):
        number = os.stat("/proc/self/ns/pid").st_ino
    if os.path.isdir("/proc"):
        try:
            seen = os.readlink("/proc/self") == str(os.getpid())
        except OSError:
            seen = not os.path.exists("/proc/stat")  # then it is not Linux's
    # Where /proc tells of another namespace than this process is in, nobody can be looked up there.
    return f"{this_host()} {number}" if seen else f"{this_host()} {number} {_word(os.getpid())}"


def namespace_number() -> int:
    """A number of `pid_namespace`, of 63 bits: for names of files, and where a text does not fit."""
    return int.from_bytes(hashlib.blake2b(pid_namespace().encode(), digest_size=8).digest(), "little") >> 1


@functools.cache
def _word(process: int) -> str:
    """A word of this process alone."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class ProcessId:
    """A process as others may know it: no two processes ever have the same.

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
        """That of this process."""
        return ProcessId(pid_namespace(), os.getpid(), start_of(os.getpid()))

    @classmethod
    def parse(cls, text: str) -> ProcessId:
        """What `text` has written.

        Raises:
            ValueError: It is something else.

        >>> ProcessId.parse("12 345 host 4026531836")
        ProcessId(namespace='host 4026531836', pid=12, start=345)
        """
        pid, start, namespace = text.split(" ", 2)
        return ProcessId(namespace, int(pid), int(start))

    def text(self) -> str:
        """For a file or an environment variable; one line.

        >>> ProcessId("host 4026531836", 12, 345).text()
        '12 345 host 4026531836'
        """
        return f"{self.pid} {self.start} {self.namespace}"

    def is_visible(self) -> bool:
        """Whether this process can see that one by its number."""
        return self.namespace == pid_namespace()

    def state(self) -> str:
        """See `state_of`; "" also where it cannot be seen from here."""
        if not self.is_visible():
            return ""
        return state_of(self.pid) if start_of(self.pid) == self.start else "ended"

    def has_ended(self) -> bool:
        """Whether it is known to have ended; only processes of its namespace know."""
        return self.state() == "ended"

    def kill(self) -> bool:
        """Kill it, with SIGKILL; whether it was there, and can be seen from here."""
        return self.is_visible() and kill(self.pid, self.start)


def processor_ticks(stat: Path = Path("/proc/stat")) -> list[int]:
    """Ticks of all processors since this host started, each kind of time by itself; zeros if that is unknown.

    The kinds: processes of usual priority, nice ones, the system, nobody, waits for disks, interrupts, those put
    off, and other machines of a hypervisor.

    >>> len(processor_ticks())
    8
    """
    try:
        return [int(ticks) for ticks in stat.read_text().split("\n")[0].split()[1:9]]
    except OSError:
        return [0] * 8


def state_of(process: int) -> str:
    """Whether a process is "running", "stopped" (by a signal, a debugger) or has "ended"; "" if that is unknown.

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
    """The files in a folder that this process has mapped into its memory, as it does to share memory.

    >>> mapped_files("/no/such/folder/")
    []
    """
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sorted({line[line.index(folder) :] for line in lines if folder in line})
    return []


def start_of(process: int) -> int:
    """When a process was started, in clock ticks of Linux; 0 if it has ended, or that is unknown.

    The number and the start of a process together mean one process of this namespace for ever.

    >>> start_of(os.getpid()) == start_of(os.getpid())
    True
    """
    with suppress(OSError, IndexError, ValueError):
        return int(_stat(process)[19])
    return 0


def _stat(process: int) -> list[str]:
    """What Linux tells of a process in a line, from its state on: what comes before may hold anything."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def _parent(process: int) -> int:
    return int(_stat(process)[1])


def started_with(name: str, value: str) -> dict[int, dict[str, str]]:
    """The processes that can be seen from here and were started with a certain environment variable.

    Returns:
        By process, all the variables that it was started with.

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
    """The environment variables that a process was started with."""
    texts = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(text).partition("=") for text in texts if text)
    return {name: value for name, _, value in pairs}


def kill(process: int, start: int) -> bool:
    """Kill a process of this namespace, with SIGKILL, if it was started at `start`; whether it was.

    One of which another process has told is killed by `ProcessId.kill`.
    """
    try:
        handle = os.pidfd_open(process)  # it refers to this process also when its number is given to another one
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
    """The nearest process above this one that was started without this environment variable.

    A launcher gives its processes variables that it has not got itself, and what is in between hands them on.
    Where no such process is seen, it is the first one, 1 or 0.

    >>> starter("SET_BY_NOBODY") == os.getppid()
    True
    """
    process = os.getppid()
    with suppress(OSError, IndexError, ValueError):
        while process > 1 and variable in _environment(process):
            process = _parent(process)
    return process


def sees_starter(variable: str) -> bool:
    """Whether `starter` can be seen from here: in a container of its own this process may not see its siblings.

    >>> sees_starter("SET_BY_NOBODY")
    True
    """
    process = starter(variable)
    try:
        return process > 0 and variable not in _environment(process)
    except OSError:  # it belongs to somebody else, who has none of our variables
        return True


def slurm_step() -> str | None:
    """The Slurm step that this process belongs to: "8.0", or "8.batch" in a job's script; None if not known.

    Slurm starts a process of its own on each node for each step, which is called "slurmstepd: [8.0]"; the tasks
    are its children. Environment variables tell less, since a job that is submitted by a task inherits them.

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
