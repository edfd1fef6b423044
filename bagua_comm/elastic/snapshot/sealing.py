"""Environment variables for processes that MPI starts, on whichever host: sealed, since MPI shows them to all.

MPI_Comm_spawn takes arguments, which everybody on the host can read, and a few hundred bytes of environment
variables, which only the same user can read. So the variables are arguments, sealed with a key that is used once;
and the key is the environment variable.
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
"""The length of an argument; Linux takes twice as much."""

_IN_THE_OPEN = ("LD_LIBRARY_PATH", "PYTHONHOME")
"""Without these Python may not start, to open what is sealed."""


class Sealed(NamedTuple):
    """How a process is started with variables."""

    command: list[str]
    """To be started by `env`."""
    variable: str
    """The environment variable that it needs besides, NAME=VALUE."""


def seal(variables: dict[str, str], shown: dict[str, str], program: Sequence[str]) -> Sealed:
    """A command that runs a program with environment variables.

    Args:
        variables: Those that nobody else may read.
        shown: Those that may be read.
        program: The path of the program, and its arguments.
    """
    key = secrets.token_bytes(32)
    data = zlib.compress(json.dumps(variables).encode())  # Open MPI takes 128 KiB of arguments in all
    text = base64.b64encode(unsealing.check(data, key) + unsealing.crypt(data, key)).decode()
    parts = [text[at : at + _ARGUMENT_BYTES] for at in range(0, len(text), _ARGUMENT_BYTES)]
    shown = {**{name: variables[name] for name in _IN_THE_OPEN if name in variables}, **shown}
    start = [*(f"{name}={value}" for name, value in shown.items()), sys.executable]
    code = child_program(inspect.getsource(unsealing))
    return Sealed([*start, "-S", "-c", code, str(len(parts)), *parts, *program], f"{unsealing.KEY}={key.hex()}")
