"""The heartbeat of hosts: Open MPI does not notice that a host has lost its power or its link."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

from .remote_shell import RemoteShell, end

SILENT_S = 5.0
"""A host that has sent nothing for this long is checked."""


class Heartbeat:
    """Monitors hosts: each sends a line every second, over a connection that stays open.

    Args:
        shell: Reaches the hosts.
        hosts: The names of the hosts.
    """

    def __init__(self, shell: RemoteShell, hosts: Sequence[str]) -> None:
        self._shell = shell
        self._beats = {host: self._connect(host) for host in hosts}
        self._last_s = dict.fromkeys(hosts, time.monotonic())

    def lost(self) -> list[str]:
        """Return the hosts that have been silent for too long and do not answer a check.

        Waits only if a host is silent, and then at most the shell's `answer_s`.
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
        answers = self._shell.ask(silent, "true")
        for host in silent:
            if answers[host] is not None:  # only the connection was lost
                end([self._beats[host]])
                self._beats[host], self._last_s[host] = self._connect(host), time.monotonic()
        return [host for host in silent if answers[host] is None]

    def close(self) -> None:
        """Close the connections."""
        end(self._beats.values())

    def _connect(self, host: str) -> subprocess.Popen[str] | None:
        process = self._shell.start(host, "sh -c 'while echo; do sleep 1; done' 2>/dev/null")
        if process is not None and process.stdout is not None:
            os.set_blocking(process.stdout.fileno(), False)
        return process


def _read(process: subprocess.Popen[str] | None) -> bytes | None:
    """The output of a process since the last call: b"" at its end, None if there is none yet."""
    if process is None or process.stdout is None:
        return b""
    with suppress(BlockingIOError):
        return os.read(process.stdout.fileno(), 1 << 16)
    return None
