"""Homes with compiled kernels, and processes that stand for their compiler."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from bagua_comm import kernels
from bagua_comm.kernels.numba.cache import cache_dir

LIMIT_S = 60.0


def home_with_kernels(home):
    """Copy this machine's compiled kernels to another home, and return their folder there."""
    kernels.compile_now()
    made = cache_dir()
    folder = home / ".cache" / "bagua_comm" / made.name
    shutil.copytree(made, folder)
    for each in (folder.parent.parent, folder.parent, folder):
        each.chmod(0o700)
    return folder


def run(code, home, **variables):
    """Run Python code with this home, and return what it prints."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "HOME": str(home), **variables},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


class FakeCompiler:
    """Starts processes that run Python code instead of a compiler, and records them.

    Args:
        code: The code; it finds the folder of the kernels in `folder`.
    """

    def __init__(self, code):
        self.code, self.started, self.urgent = code, [], []

    def __call__(self, step, folder, *, urgent):
        """See `background.start`."""
        self.urgent.append(urgent)
        process = subprocess.Popen(
            [sys.executable, "-c", f"from pathlib import Path; folder = Path({str(folder)!r})\n{self.code}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.started.append(process)
        return process


def state_of(pid):
    """The state of a process, as Linux writes it: T if it is stopped, Z if it has ended; "" if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def has_ended(pid):
    """Whether a process has ended."""
    return state_of(pid) in ("", "Z")
