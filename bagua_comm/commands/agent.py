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
        asked = {host: self._start(host, command) for host in hosts}
        deadline = time.monotonic() + limit_s
        return {host: _answer(process, deadline) for host, process in asked.items()}

    def _start(self, host: str, command: str) -> subprocess.Popen[str] | None:
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


def find_agent(given: Sequence[str]) -> Agent:
    """The launch agent of mpirun, if the user gives it these arguments.

    >>> find_agent(["--prtemca", "plm_ssh_agent", "enter -q"]).words
    ('enter', '-q')
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
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None
    before, mark, _ = text.rpartition(f"{_ANSWERED}\n")
    return before if mark else None
