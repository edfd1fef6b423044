"""Spans of bagua_comm in PyTorch's profiler: `import bagua_torch` is enough to see them there.

    with torch.profiler.profile() as profiler:
        ...                                     # a training step
    profiler.export_chrome_trace("step.json")   # "bagua_comm: exchange bucket=0 bytes=4096" and the like

PyTorch's profiler records the thread that started it, and the threads of autograd. It records the thread of a
lane with `experimental_config=torch.profiler._ExperimentalConfig(profile_all_threads=True)`. It records work on a
device from all threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch.autograd import profiler

from bagua_comm.trace import label


class ProfilerRanges:
    """Shows spans as ranges of `torch.profiler.record_function` while a profiler runs."""

    def __init__(self) -> None:
        self.active: Callable[[], bool] = partial(getattr, profiler, "_is_profiler_enabled", False)
        """Whether a profiler runs in this process.

        PyTorch has no documented query, and a range of `record_function` costs many microseconds even without a
        profiler. If a version of PyTorch lacks this name, there are no ranges.
        """

    def range(self, name: str, args: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """Return a range for the calling thread."""
        return profiler.record_function(label(name, args))


RANGES = ProfilerRanges()
"""The instance that `import bagua_torch` adds; `bagua_comm.trace.ignore(RANGES)` removes it."""
