"""Spans of bagua_comm in PyTorch's profiler: `import bagua_torch` is enough to see them there.

    with torch.profiler.profile() as profiler:
        ...                                     # a training step
    profiler.export_chrome_trace("step.json")   # "bagua_comm: exchange bucket=0 bytes=4096" and the like

PyTorch's profiler records the thread that started it, and the threads of autograd. It records the thread of a
lane with `experimental_config=torch.profiler._ExperimentalConfig(profile_all_threads=True)`. It records work on a
device from all threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import ParamSpec, TypeVar

from torch.autograd import profiler

from bagua_comm.trace import label

P = ParamSpec("P")
T = TypeVar("T")


class ProfilerRanges:
    """Shows spans as ranges of `torch.profiler.record_function` while a profiler runs."""

    def __init__(self) -> None:
        self.active: Callable[[], bool] = partial(getattr, profiler, "_is_profiler_enabled", False)
        """Whether a profiler runs in this process.

        PyTorch has no documented query, and a range of `record_function` costs many microseconds even without a
        profiler. If a version of PyTorch lacks this name, there are no ranges.
        """
        self._lock = threading.RLock()  # a signal handler may begin a range, too
        self._profile: object = object()
        """Identifies the profile that runs; None while it ends."""
        self._open_at_the_end: list[object] = []

    @contextmanager
    def range(self, name: str, args: Mapping[str, object]) -> Iterator[None]:
        """A range of the calling thread, unless the profile ends before it."""
        record = profiler.record_function(label(name, args))
        profile = self._begin(record)
        try:
            yield
        finally:
            self._end(record, profile)

    def end_profile(self, end: Callable[P, T]) -> Callable[P, T]:
        """Wrap the function that ends a profile: ranges that are open then do not end in the next one."""

        @wraps(end)
        def wrapped(*args: P.args, **options: P.kwargs) -> T:
            with self._lock:
                self._profile = None
            try:
                return end(*args, **options)
            finally:
                self._profile = object()

        return wrapped

    def _begin(self, record: AbstractContextManager[object]) -> object:
        """Begin a range. Returns the profile that shows it; None if there is none."""
        with self._lock:
            if self._profile is not None:
                record.__enter__()
            return self._profile

    def _end(self, record: AbstractContextManager[object], profile: object) -> None:
        """End a range of a profile.

        The thread of a lane may be in a range when the profile ends. The end of the range would write into the
        memory of the profile, which is freed. So it never ends: it is kept, since its destructor would end it.
        """
        with self._lock:
            if profile is not None and profile is self._profile:
                record.__exit__(None, None, None)
            elif profile is not None:
                self._open_at_the_end.append(record)


RANGES = ProfilerRanges()
"""The instance that `import bagua_torch` adds; `bagua_comm.trace.ignore(RANGES)` removes it."""

if hasattr(profiler, "_disable_profiler"):  # PyTorch has no hook for the end of a profile
    profiler._disable_profiler = RANGES.end_profile(profiler._disable_profiler)
else:
    RANGES.active = bool
