"""The kernel's tools, ip and tc, and what they refuse."""

from __future__ import annotations

import subprocess


class LabError(Exception):
    """This machine cannot emulate hosts; the message names the reason."""


def do(command: str, text: str = "") -> None:
    result = subprocess.run(command.split(), input=text, capture_output=True, text=True)
    if result.returncode:
        raise LabError(f"this machine does not allow emulated hosts: {command}: {result.stderr.strip()}")
