"""Encrypted environment variables for spawned processes, on any host.

MPI_Comm_spawn takes arguments, which every user of the host can read, and a few hundred bytes of environment
variables, which only the same user can read. So the variables are passed as arguments, encrypted by a key that
is used once, and the key is passed in an environment variable.
"""

from __future__ import annotations

import base64
import inspect
import json
import secrets
import sys
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from ...bootstrap.environment import child_program
from . import unsealing

_ARGUMENT_BYTES = 1 << 16
"""The length of an argument; Linux allows twice as much."""

_UNSEALED = ("LD_LIBRARY_PATH", "PYTHONHOME")
"""Variables that Python may need to start, before it can decrypt the others."""


class Sealed(NamedTuple):
    """A command with encrypted environment variables."""

    command: list[str]
    """Arguments of `env`."""
    variable: str
    """The environment variable that it needs in addition, as NAME=VALUE."""


def seal(variables: dict[str, str], shown: dict[str, str], program: Sequence[str]) -> Sealed:
    """Make a command that runs a program with environment variables.

    Args:
        variables: Variables that other users may not read.
        shown: Variables that everyone may read.
        program: The path of the program, and its arguments.
    """
    key = secrets.token_bytes(32)
    data = zlib.compress(json.dumps(variables).encode())  # Open MPI allows 128 KiB of arguments in all
    text = base64.b64encode(unsealing.check(data, key) + unsealing.crypt(data, key)).decode()
    parts = [text[at : at + _ARGUMENT_BYTES] for at in range(0, len(text), _ARGUMENT_BYTES)]
    shown = {**{name: variables[name] for name in _UNSEALED if name in variables}, **shown}
    start = [*(f"{name}={value}" for name, value in shown.items()), sys.executable]
    code = child_program(inspect.getsource(unsealing))
    return Sealed([*start, "-S", "-c", code, str(len(parts)), *parts, *program], f"{unsealing.KEY}={key.hex()}")
