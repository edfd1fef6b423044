"""The launch agent of Open MPI, which runs a command on another host: ssh by default, and srun under Slurm."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..system.processes import state_of

ANSWER_S = 5.0
"""The time limit for the answer of a host."""

SRUN_ANSWER_S = 30.0
"""That of srun: each command is a step of the job, which the controller of Slurm makes, one after the other."""

END_S = 2.0
"""The time between SIGTERM and SIGKILL for an agent."""

_AGENTS, _ARGUMENTS = ("plm_ssh_agent", "plm_rsh_agent"), ("plm_ssh_args", "plm_rsh_args")
_PREFIXES = ("PRTE_MCA_", "OMPI_MCA_")
_END = "end of output"

_SRUN = "srun --jobid={} --overlap --mpi=none --quiet --nodes=1 --ntasks=1"
"""Runs a command on a host of a job of Slurm, beside the steps there."""


@dataclass(frozen=True)
class RemoteShell:
    """Runs commands on other hosts by the launch agent of Open MPI."""

    words: tuple[str, ...]
    """The agent's command line, without the host and the command at its end."""
    answer_s: float = ANSWER_S
    """The time limit for the answer of a host."""

    def ask(self, hosts: Sequence[str], script: str, *, limit_s: float | None = None) -> dict[str, str | None]:
        """Run a script of sh on each host; returns its output, or None for a host that does not answer.

        Args:
            hosts: The names of the hosts.
            script: The script.
            limit_s: The time limit for all answers; `answer_s` if None.
        """
        command = f"sh -c {shlex.quote(f'{script}; echo {_END}')}"
        asked = {host: self.start(host, command) for host in hosts}
        deadline = time.monotonic() + (self.answer_s if limit_s is None else limit_s)
        answers = {host: _answer(process, deadline) for host, process in asked.items()}
        end(asked.values())
        return answers

    def start(self, host: str, command: str) -> subprocess.Popen[str] | None:
        """Start a command on a host; None if the agent cannot be started."""
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


def find_remote_shell(given: Sequence[str]) -> RemoteShell:
    """Return the launch agent of mpirun, if the user passes these arguments to mpirun.

    >>> find_remote_shell(["--prtemca", "plm_ssh_agent", "true -q"]).words
    ('true', '-q')
    """
    agent, more = _parameter(_AGENTS, given), shlex.split(_parameter(_ARGUMENTS, given) or "")
    choices = [shlex.split(choice) for choice in (agent or "ssh : rsh").split(":")]
    job = os.environ.get("SLURM_JOB_ID")
    if not agent and job and _starts_by_slurm(given) and shutil.which("srun"):
        # srun quotes nothing, and needs no shell on the other side.
        command = f'exec {_SRUN.format(shlex.quote(job))} --nodelist="$0" sh -c "$1"'
        return RemoteShell(("sh", "-c", command), SRUN_ANSWER_S)
    words = next((words for words in choices if words and shutil.which(words[0])), ["ssh"])
    if os.path.basename(words[0]) == "ssh":
        more += ["-x", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={ANSWER_S:.0f}"]
    return RemoteShell((*words, *more))


def _starts_by_slurm(given: Sequence[str]) -> bool:
    """Whether the user leaves it to mpirun to use srun in a job of Slurm, whatever the arguments of ssh are."""
    chosen = _parameter(("plm",), given, _PREFIXES[:1]) or "^"
    return ("slurm" in chosen.removeprefix("^").split(",")) != chosen.startswith("^")


def _parameter(names: Sequence[str], given: Sequence[str], prefixes: Sequence[str] = _PREFIXES) -> str | None:
    """The value of an MCA parameter, from mpirun's arguments or its environment variables."""
    for word, value in itertools.pairwise(given):
        if word in names:
            return value
    variables = [f"{prefix}{name}" for prefix in prefixes for name in names]
    return next((os.environ[name] for name in variables if name in os.environ), None)


def _answer(process: subprocess.Popen[str] | None, deadline: float) -> str | None:
    """The output of a process until the deadline, if the script has ended."""
    if process is None:
        return None
    try:
        text = process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0]
    except subprocess.TimeoutExpired:
        return None
    before, mark, _ = text.rpartition(f"{_END}\n")
    return before if mark else None


def end(processes: Iterable[subprocess.Popen[str] | None]) -> None:
    """End processes with their children: by SIGTERM, so that srun ends its step, which SIGKILL leaves running."""
    started = [process for process in processes if process is not None]
    # Until Popen has read the exit code, the number of a process belongs to no other one.
    running = [process for process in started if process.returncode is None]
    for process in running:
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline and any(state_of(process.pid) != "ended" for process in running):
        time.sleep(0.01)
    for process in running:
        _signal(process, signal.SIGKILL)
    for process in started:
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, number)
