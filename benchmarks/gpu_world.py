"""What the parts of benchmarks/gpu.py share: facts of the device, times taken on it, and ranks that share it.

Ranks are processes. mpirun starts them where there is one; else they are started here, and meet over gloo. Each
gives itself an NCCL_HOSTID of its own, with which NCCL lets them share a GPU: to NCCL they are machines, and talk
over sockets, and the GPU takes turns between their kernels. Figures of such ranks compare what ran side by side;
they are not those of ranks with GPUs and links of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import gpu_lines
import numpy as np
from common import Spread

from bagua_comm import Communicator, kernels
from bagua_comm.__main__ import find_mpirun
from bagua_comm.arrays import Array
from bagua_comm.bootstrap import GPU
from bagua_comm.errors import CommError

HERE = Path(__file__).parent
FLUSH_BYTES = 256 << 20
"""Written, and then as much read, between two timed calls: more than the cache of any GPU holds."""

FLUSH_ROWS = 256
"""What is read is added up in so many rows: the sums, which are written, are so many times smaller."""

GRACE_S = 5.0
"""When one rank has failed, the others have so long to say why."""

END_S = 2.0
"""When a process has been asked to end, it has so long to do so."""

SECTION_ENDS = "BAGUA_GPU_SECTION_ENDS"
"""An environment variable of tests: when benchmarks/gpu.py ends them, as seconds since the epoch."""

SPARE_S = 4.0
"""Ranks of tests are ended so long before, so that what they have said is heard."""

# ---------------------------------------------------------------------------------------------------
# The device
# ---------------------------------------------------------------------------------------------------


def collect_device() -> dict[str, Any]:
    """The current device, and the versions of what is above it."""
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
    versions = {
        "cupy": cupy.__version__,
        "cuda driver": runtime.driverGetVersion(),
        "cuda runtime": runtime.runtimeGetVersion(),
        "nccl": _nccl_version(),
        "torch": _installed("torch"),
    }
    return {
        "name": properties["name"].decode(),
        "compute_capability": cupy.cuda.Device().compute_capability,
        "multiprocessors": properties["multiProcessorCount"],
        "stand_in": is_stand_in(),
        "versions": versions,
    }


def is_stand_in() -> bool:
    """Whether `import cupy` gives not CuPy, but what stands in for it in tests: its figures mean nothing."""
    import cupy

    return str(cupy.ndarray.__module__).split(".")[0] != "cupy"


def _nccl_version() -> object:
    try:
        from bagua_comm.transports.nccl.transport import version

        return version()
    except (ImportError, CommError) as exc:
        return f"none ({exc})"


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def torch_with_cuda() -> Any:
    """The module torch, if it is here and sees a CUDA device; else None."""
    if is_stand_in():
        return None
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


# ---------------------------------------------------------------------------------------------------
# Time on the device
# ---------------------------------------------------------------------------------------------------

_LONGEST = 1 << 24
"""Rows that one launch of `Hold` adds up."""


class Hold:
    """Keeps the current stream busy, so that one can see what the host does meanwhile.

    One thread adds up one column, which takes a time in proportion to its length.
    """

    def __init__(self) -> None:
        import cupy

        self._cuda = cupy.cuda
        self._column, self._sum = cupy.zeros((_LONGEST, 1), np.uint8), cupy.zeros(1, np.uint8)
        self._rounds_per_s = 1e6
        for seconds in (0.01, 0.05):  # the clock rises meanwhile
            start, end = self._cuda.Event(), self._cuda.Event()
            start.record()
            self._launch(int(seconds * self._rounds_per_s) + 1)
            end.record()
            end.synchronize()
            elapsed_s = max(self._cuda.get_elapsed_time(start, end) / 1e3, 1e-6)
            self._rounds_per_s *= seconds / elapsed_s

    def __call__(self, seconds: float) -> Any:
        """Enqueue about so many seconds of work; returns an event behind it."""
        self._launch(int(seconds * self._rounds_per_s))
        event = self._cuda.Event(disable_timing=True)
        event.record()
        return event

    def _launch(self, rounds: int) -> None:
        for done in range(0, rounds, _LONGEST):
            kernels.of(self._sum).reduce_rows(self._column[: rounds - done], self._sum, "sum")


class Stopwatch:
    """Times by events on the current stream, of calls that find nothing of theirs in the cache.

    Before each call other memory is written, and then yet other memory is read: what is written stays in the
    cache, and its way out of it would be timed. What is read need not go anywhere.
    """

    def __init__(self) -> None:
        import cupy

        self._cuda = cupy.cuda
        width = 16 if is_stand_in() else FLUSH_BYTES // FLUSH_ROWS  # the stand-in has no cache
        self._written, self._read = (cupy.zeros((FLUSH_ROWS, width), np.uint8) for _ in range(2))
        self._sum = cupy.empty(width, np.uint8)

    def _flush(self, value: int) -> None:
        self._written.fill(value)
        kernels.of(self._sum).reduce_rows(self._read, self._sum, "sum")

    def seconds(self, calls: Mapping[str, Callable[[], object]], *, iterations: int) -> dict[str, Array]:
        """How long each call takes on the device, `iterations` times, in turn.

        The host never waits in between: the other memory takes the device longer than it takes the host to
        enqueue the next call, so that no gap is timed.
        """
        events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
        for i in range(-min(3, iterations), iterations):
            for name, call in calls.items():
                pair = self._cuda.Event(), self._cuda.Event()
                self._flush(i % 2)
                pair[0].record()
                call()
                pair[1].record()
                if i >= 0:
                    events[name].append(pair)
        self._cuda.get_current_stream().synchronize()
        return {
            name: np.array([self._cuda.get_elapsed_time(*pair) / 1e3 for pair in pairs])
            for name, pairs in events.items()
        }


@contextlib.contextmanager
def counted_launches() -> Iterator[list[str]]:
    """The names of our kernels that this thread launches in the body of `with`."""
    from bagua_comm.kernels import device

    names: list[str] = []
    thread = threading.get_ident()
    kernels_of: Any = device
    get = kernels_of._kernel

    def get_counting(file: str, name: str, *rest: str) -> Callable[..., None]:
        kernel = get(file, name, *rest)

        def launch(*arguments: Any) -> None:
            if threading.get_ident() == thread:
                names.append(name)
            kernel(*arguments)

        return launch

    kernels_of._kernel = get_counting
    try:
        yield names
    finally:
        kernels_of._kernel = get


def us(seconds: Array) -> dict[str, float]:
    """Median and quartiles of some seconds, in microseconds."""
    spread = Spread.of(np.asarray(seconds) * 1e6)
    return {"median": spread.median, "q1": spread.q1, "q3": spread.q3}


# ---------------------------------------------------------------------------------------------------
# Ranks
# ---------------------------------------------------------------------------------------------------


def launch(
    ranks: int,
    arguments: Sequence[object],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    mpi: bool = True,
    log: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments` on several ranks of this machine, whose output comes together.

    Args:
        ranks: How many.
        arguments: Of Python; the script first.
        timeout_s: After this long all are ended, and the exit code is 124. Sooner if `SECTION_ENDS`.
        env: Their environment.
        mpi: Use mpirun, if there is one.
        log: The output is appended to this file while it comes.
    """
    variables = dict(os.environ if env is None else env)
    if SECTION_ENDS in variables:
        timeout_s = min(timeout_s, float(variables[SECTION_ENDS]) - time.time() - SPARE_S)
    python = [sys.executable, *map(str, arguments)]
    if mpi and find_mpirun() is not None:
        command = [sys.executable, "-m", "bagua_comm", "run", "-n", str(ranks), *python[1:]]
        return _finish([(command, variables)], timeout_s, log)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    each = [variables | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return _finish([(python, env) for env in each], timeout_s, log)


def run_limited(
    command: Sequence[object],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run one command; 124 is its exit code if it had to be ended. See `launch`."""
    return _finish([(list(map(str, command)), dict(os.environ if env is None else env))], timeout_s, log)


def _finish(
    commands: list[tuple[list[str], dict[str, str]]], timeout_s: float, log: Path | None
) -> subprocess.CompletedProcess[str]:
    """Run commands beside each other; when one fails or time is up, the others are ended as well.

    They import what is in this clone. No process that they start lives on, not even if this one is killed.
    """
    for _, env in commands:
        env["PYTHONUNBUFFERED"] = "1"
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), env.get("PYTHONPATH")]))
    keeper = [sys.executable, "-I", "-S", str(HERE / "keeper.py"), str(END_S), str(os.getpid())]
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
                    code, deadline = failed, min(deadline, time.monotonic() + GRACE_S)
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
        command, env=env, stdout=output, stderr=subprocess.STDOUT, cwd=HERE.parent, start_new_session=True
    )


def _end(keepers: Sequence[subprocess.Popen[bytes]]) -> None:
    """End keepers, and with them what they keep."""
    for keeper in keepers:
        keeper.terminate()
    for keeper in keepers:
        try:
            keeper.wait(END_S + 5)  # it gives up sooner
        except subprocess.TimeoutExpired:
            keeper.kill()


@contextlib.contextmanager
def joined(gpu: GPU, *, timeout_s: float = 60.0) -> Iterator[Communicator]:
    """The world of the ranks that `launch` has started. Collective.

    Args:
        gpu: What carries device arrays: see `bagua_comm.connect`.
        timeout_s: How long a call waits for its peers.
    """
    os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{os.getpid()}"
    if "RANK" in os.environ:
        from bagua_torch import connect
    else:
        from bagua_comm import connect
    with connect(timeout_s=timeout_s, gpu=gpu) as comm:
        yield comm


# ---------------------------------------------------------------------------------------------------
# Command lines of the parts
# ---------------------------------------------------------------------------------------------------


def part_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that benchmarks/gpu.py gives to each of its parts."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to append the results")
    parser.add_argument("--under", nargs="+", default=[], metavar="KEY", help="where they belong in the record")
    parser.add_argument("--shrink", type=int, default=1, metavar="N", help="make all arrays N times smaller")
    parser.add_argument("--iterations", type=int, default=20, metavar="N", help="timed calls of each")
    return parser


class Results(dict[str, Any]):
    """Results that are in their file, as lines (gpu_lines.py), as soon as they are known. Only rank 0 writes."""

    def __init__(self, path: Path, *, under: Sequence[str] = (), rank: int = 0) -> None:
        super().__init__()
        self._path, self._under = path if rank == 0 else None, under
        self._failed: list[str] = []

    @classmethod
    def of(cls, options: argparse.Namespace, *, rank: int = 0) -> Results:
        """Where the arguments of a part say."""
        return cls(options.out, under=options.under, rank=rank)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if self._path is not None:
            gpu_lines.append(self._path, [*self._under, name], value)

    @contextlib.contextmanager
    def going_on(self, name: str) -> Iterator[None]:
        """What the body of `with` raises becomes the result `name`, and the program goes on."""
        try:
            yield
        except Exception as exc:
            traceback.print_exc()
            self[name] = {"failed": f"{type(exc).__name__}: {exc}"}
            self._failed.append(name)

    def end(self) -> None:
        """Leave the program with exit code 1 if anything has failed."""
        if self._failed:
            sys.exit(f"failed: {', '.join(self._failed)}")


def main() -> None:
    """Say what the device is."""
    results = Results.of(part_parser("What the device is.").parse_args())
    for name, value in collect_device().items():
        results[name] = value


if __name__ == "__main__":
    main()
