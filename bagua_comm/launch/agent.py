"""The launch agent of Open MPI: what runs a command on another host, ssh unless the user says otherwise."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

LIMIT_S = 5.0
"""How long a host has to answer."""

SILENT_S = 5.0
"""A host that has sent nothing for so long is asked whether it lives."""

_AGENTS, _ARGUMENTS = ("plm_ssh_agent", "plm_rsh_agent"), ("plm_ssh_args", "plm_rsh_args")
_BEGINNINGS = ("PRTE_MCA_", "OMPI_MCA_")
_ANSWERED = "this is all"


@dataclass(frozen=True)
class Agent:
    """The words of a command line; a host's name and a command follow them."""

    words: tuple[str, ...]

    def ask(self, hosts: Sequence[str], script: str, *, limit_s: float = LIMIT_S) -> dict[str, str | None]:
        """What a script for sh prints on each of these hosts; None for a host that does not answer in time."""
        command = f"sh -c {shlex.quote(f'{script}; echo {_ANSWERED}')}"
        asked = {host: self.start(host, command) for host in hosts}
        deadline = time.monotonic() + limit_s
        return {host: _answer(process, deadline) for host, process in asked.items()}

    def start(self, host: str, command: str) -> subprocess.Popen[str] | None:
        """Start a command there; None if there is no such agent."""
        with contextlib.suppress(OSError):
            return subprocess.Popen(
                [*self.words, host, command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
                start_new_session=True,  # so that Ctrl-C does not end it, and it can be killed with its children
            )
        return None


class Pulse:
    """Whether hosts live: each sends a line every second, over a connection that stays open.

    Open MPI does not notice that a host has lost its power or its link.

    Args:
        agent: What reaches them.
        hosts: Their names.
    """

    def __init__(self, agent: Agent, hosts: Sequence[str]) -> None:
        self._agent = agent
        self._beats = {host: self._begin(host) for host in hosts}
        self._last_s = dict.fromkeys(hosts, time.monotonic())

    def lost(self) -> list[str]:
        """The hosts that have been silent for too long, and do not answer when they are asked.

        Waits only if one is silent, and then at most `LIMIT_S`.
        """
        now, silent = time.monotonic(), []
        for host, process in self._beats.items():
            data = _read(process)
            if data:
                self._last_s[host] = now
            elif data is not None or now - self._last_s[host] > SILENT_S:
                silent.append(host)
        if not silent:
            return []
        answers = self._agent.ask(silent, "true")
        for host in silent:
            if answers[host] is not None:  # only the connection was lost
                _end(self._beats[host])
                self._beats[host], self._last_s[host] = self._begin(host), time.monotonic()
        return [host for host in silent if answers[host] is None]

    def close(self) -> None:
        """End the connections."""
        for process in self._beats.values():
            _end(process)

    def _begin(self, host: str) -> subprocess.Popen[str] | None:
        process = self._agent.start(host, "sh -c 'while echo; do sleep 1; done' 2>/dev/null")
        if process is not None and process.stdout is not None:
            os.set_blocking(process.stdout.fileno(), False)
        return process


def find_agent(given: Sequence[str]) -> Agent:
    """The launch agent of mpirun, if the user gives it these arguments.

    >>> find_agent(["--prtemca", "plm_ssh_agent", "true -q"]).words
    ('true', '-q')
    """
    agent, more = _parameter(_AGENTS, given), shlex.split(_parameter(_ARGUMENTS, given) or "")
    choices = [shlex.split(choice) for choice in (agent or "ssh : rsh").split(":")]
    found = [words for words in choices if words and shutil.which(words[0])] or [["ssh"]]
    words = found[0]
    if os.path.basename(words[0]) == "ssh":
        more += ["-x", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={LIMIT_S:.0f}"]
    return Agent((*words, *more))


def _parameter(names: Sequence[str], given: Sequence[str]) -> str | None:
    """The value of an MCA parameter, from mpirun's arguments or its environment."""
    for word, value in itertools.pairwise(given):
        if word in names:
            return value
    variables = [f"{beginning}{name}" for beginning in _BEGINNINGS for name in names]
    return next((os.environ[name] for name in variables if name in os.environ), None)


def _answer(process: subprocess.Popen[str] | None, deadline: float) -> str | None:
    """What a process prints until then, if that is all that the script prints."""
    if process is None:
        return None
    try:
        text = process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0]
    except subprocess.TimeoutExpired:
        _end(process)
        return None
    before, mark, _ = text.rpartition(f"{_ANSWERED}\n")
    return before if mark else None


def _read(process: subprocess.Popen[str] | None) -> bytes | None:
    """What a process has printed since the last time: b"" if it prints no more, None if nothing has come."""
    if process is None or process.stdout is None:
        return b""
    try:
        return os.read(process.stdout.fileno(), 1 << 16)
    except BlockingIOError:
        return None


def _end(process: subprocess.Popen[str] | None) -> None:
    """Kill a process with its children."""
    if process is None:
        return
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
