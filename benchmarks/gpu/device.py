"""The GPU: its properties, work to keep it busy, and timing.

    python -m benchmarks.gpu.device --out device.jsonl

is the first section of benchmarks.gpu: it writes the facts of `collect_device`.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bagua_comm import kernels
from bagua_comm.arrays import Array
from bagua_comm.errors import CommError

from .part import Results, part_parser

FLUSH_BYTES = 256 << 20
"""Written, and then as much read, between two timed calls: more than the cache of any GPU holds."""

FLUSH_ROWS = 256
"""The memory that is read has this many rows. Only their sum is written, which is this many times smaller."""

# ---------------------------------------------------------------------------------------------------
# The device
# ---------------------------------------------------------------------------------------------------


def collect_device() -> dict[str, Any]:
    """The current device, and the versions of its driver and libraries."""
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
    """Whether `import cupy` gives the stand-in of the tests instead of CuPy; then figures mean nothing."""
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
    """The module torch if it is installed and finds a CUDA device; else None."""
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
"""The most rows that one launch of `Hold` adds up."""


class Hold:
    """Keeps the current stream busy, to find out whether the host waits for it.

    One thread of the device adds up a column. The time is proportional to the column's length.
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
        """Enqueue about this many seconds of work; returns an event after it."""
        self._launch(int(seconds * self._rounds_per_s))
        event = self._cuda.Event(disable_timing=True)
        event.record()
        return event

    def _launch(self, rounds: int) -> None:
        for done in range(0, rounds, _LONGEST):
            kernels.of(self._sum).reduce_rows(self._column[: rounds - done], self._sum, "sum")


class Stopwatch:
    """Times calls by events on the current stream; no call finds its data in the cache.

    Before each call other memory is written, and then other memory again is read. After the write alone, its data
    would still be in the cache, and its way to the memory would be timed. Data that was only read is dropped.
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
        """Seconds of calls on the device, made in turn, `iterations` times each.

        The host never waits in between: the device is busy with the other memory for longer than the host needs
        to enqueue the next call, so that no gap is timed.
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


def main() -> None:
    """Write the facts."""
    results = Results.of(part_parser(__doc__).parse_args())
    for name, value in collect_device().items():
        results[name] = value


if __name__ == "__main__":
    main()
