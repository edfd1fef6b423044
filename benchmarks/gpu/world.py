"""Ranks that share a GPU, as processes that end in time.

mpirun starts them where there is one; otherwise they are started here, and use gloo. Each gives itself an
NCCL_HOSTID of its own, with which NCCL lets them share a GPU: NCCL takes them for machines, which talk over
sockets, and the GPU takes turns between their kernels. Figures of such ranks compare what ran side by side; they
are not those of ranks with GPUs and links of their own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

import bagua_comm
from bagua_comm import Communicator
from bagua_comm.bootstrap import GPU
from bagua_comm.launch.mpirun import find_mpirun
from bagua_comm.system.processes import free_port

from ..bench import ROOT

GRACE_S = 5.0
"""Seconds that the other ranks have to report their errors when one has failed."""

END_S = 2.0
"""Seconds that a process has to end, when it has been asked to."""

SECTION_ENDS = "BAGUA_GPU_SECTION_ENDS"
"""An environment variable of tests: when benchmarks.gpu will end them, in seconds since the epoch."""

SPARE_S = 4.0
"""Ranks of tests are ended this many seconds earlier, so that their output can still be read."""


def launch(
    ranks: int,
    arguments: Sequence[object],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    mpi: bool = True,
    grace_s: float = GRACE_S,
    log: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments` on several ranks of this machine, and collect their output together.

    Args:
        ranks: How many.
        arguments: Arguments of Python: a script, or "-m" and a module; then its own.
        timeout_s: Seconds after which all are ended, with the exit code 124; fewer if `SECTION_ENDS` says so.
        env: Their environment.
        mpi: Use mpirun, if there is one.
        grace_s: Seconds that ranks started here go on after one of them has failed.
        log: A file to which the output is appended while it comes.
    """
    variables = dict(os.environ if env is None else env)
    if SECTION_ENDS in variables:
        timeout_s = min(timeout_s, float(variables[SECTION_ENDS]) - time.time() - SPARE_S)
    python = [sys.executable, *map(str, arguments)]
    if mpi and find_mpirun() is not None:
        command = [sys.executable, "-m", "bagua_comm", "run", "-n", str(ranks), *python[1:]]
        return _finish([(command, variables)], timeout_s, log, grace_s)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    each = [variables | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return _finish([(python, env) for env in each], timeout_s, log, grace_s)


def run_limited(
    command: Sequence[object],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run one command; its exit code is 124 if it had to be ended. See `launch`."""
    return _finish([(list(map(str, command)), dict(os.environ if env is None else env))], timeout_s, log)


def _finish(
    commands: list[tuple[list[str], dict[str, str]]],
    timeout_s: float,
    log: Path | None,
    grace_s: float = GRACE_S,
) -> subprocess.CompletedProcess[str]:
    """Run commands at the same time; when one fails or time is up, end the others as well.

    They run in the root of this repository, whose packages they import. Every process that they start ends with
    them, even if this process is killed.
    """
    for _, env in commands:
        env["PYTHONUNBUFFERED"] = "1"
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    keeper = [
        sys.executable,
        "-I",
        "-S",
        str(Path(__file__).with_name("keeper.py")),
        str(END_S),
        str(os.getpid()),
    ]
    with (
        tempfile.TemporaryFile("w+", errors="replace") if log is None else log.open("a+", errors="replace")
    ) as output:
        start = output.seek(0, os.SEEK_END)
        processes: list[subprocess.Popen[bytes]] = []
        deadline = time.monotonic() + timeout_s
        code = 0
        try:
            for command, env in commands:
                processes.append(_started([*keeper, *command], env, output))
            while None in [process.poll() for process in processes]:
                failed = next((p.returncode for p in processes if p.returncode), 0)
                if failed and not code:
                    code, deadline = failed, min(deadline, time.monotonic() + grace_s)
                if time.monotonic() > deadline:
                    code = code or 124
                    break
                time.sleep(0.02)
        finally:
            _end(processes)
        code = code or next((process.returncode for process in processes if process.returncode), 0)
        output.seek(start)
        return subprocess.CompletedProcess([], code, output.read())


def _started(command: list[str], env: Mapping[str, str], output: IO[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=env, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
    )


def _end(keepers: Sequence[subprocess.Popen[bytes]]) -> None:
    """End keepers, and with them all processes that they keep."""
    for keeper in keepers:
        keeper.terminate()
    for keeper in keepers:
        try:
            keeper.wait(END_S + 5)  # it gives up sooner
        except subprocess.TimeoutExpired:
            keeper.kill()


@contextlib.contextmanager
def joined(
    gpu: GPU, *, timeout_s: float = 60.0, process_group: Literal["bagua"] | None = None
) -> Iterator[Communicator]:
    """The world of the ranks that `launch` has started. Collective.

    Args:
        gpu: What carries device arrays: see `bagua_comm.connect`.
        timeout_s: How long a call waits for its peers.
        process_group: The backend of the default process group; None for PyTorch's own, if there is one.
    """
    os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{os.getpid()}"
    if process_group is not None or "RANK" in os.environ:
        import bagua_torch

        comm = bagua_torch.connect(timeout_s=timeout_s, gpu=gpu, process_group=process_group or False)
    else:
        comm = bagua_comm.connect(timeout_s=timeout_s, gpu=gpu)
    with comm:
        yield comm
