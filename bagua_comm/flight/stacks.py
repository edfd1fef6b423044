"""The Python stacks of this process's threads, in which the lines of the user's program are marked.

They are in the records of the flight recorder, which so show the line where a rank was, in a call or in none.
"""

from __future__ import annotations

import functools
import gc
import linecache
import site
import sys
import sysconfig
import threading
from collections.abc import Iterable, Sequence
from types import CodeType, FrameType
from typing import NamedTuple

LIBRARY = ("bagua_comm", "bagua_torch")
"""The packages of this library."""

THREADS, FRAMES = 32, 100
"""The number of threads, and of frames of each, that a record keeps."""

_RECORDING = ("bagua_comm.flight", "bagua_comm.bootstrap.rank_exit")
"""Modules that write records; their innermost frames are left out."""


class Frame(NamedTuple):
    """A call of a Python function in progress."""

    file: str
    line: int
    function: str
    text: str
    """The source of the line; empty if it cannot be read."""
    is_users: bool
    """Whether it belongs to the user's program: neither to this library nor to an installed package."""

    def __str__(self) -> str:
        code = f": {self.text}" if self.text else ""
        return f"{self.file}:{self.line}, in {self.function}{code}"


class Position(NamedTuple):
    """The line that a call in progress has reached. Its frame would keep the call's variables after its end."""

    code: CodeType
    line: int
    globals: dict[str, object]

    @property
    def module(self) -> str:
        """The name of the function's module; empty if it has none."""
        return str(self.globals.get("__name__", ""))

    def frame(self) -> Frame:
        """The call with the source of its line."""
        file = self.code.co_filename
        text = linecache.getline(file, self.line, self.globals).strip()
        return Frame(file, self.line, self.code.co_name, text, is_users_code(file, self.module))


class ThreadStack(NamedTuple):
    """The stack of a thread, the innermost frame first."""

    name: str
    frames: tuple[Frame, ...]

    @property
    def users_frame(self) -> Frame | None:
        """The innermost frame of the user's program; None if it has none."""
        return next((frame for frame in self.frames if frame.is_users), None)

    def lines(self) -> list[str]:
        """The stack as py-spy prints it: the innermost frame first; `>` marks frames of the user's program."""
        frames = [
            f"  {'>' if frame.is_users else ' '} {frame.function} ({frame.file}:{frame.line})"
            for frame in self.frames
        ]
        return [f'Thread "{self.name}"', *frames]


def stacks_now() -> tuple[ThreadStack, ...]:
    """The stacks of all threads of this process, first those with frames of the user's program.

    The main thread is the first of its group. Calls no function of another thread, and waits for none.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    calls = sorted(current_stacks().items(), key=lambda item: item[0] != main)
    stacks = [
        ThreadStack(names.get(ident, f"thread {ident}"), tuple(call.frame() for call in _recorded(stack)))
        for ident, stack in calls[:THREADS]
    ]
    return tuple(sorted(stacks, key=lambda stack: stack.users_frame is None))


def users_line(stacks: Sequence[ThreadStack]) -> str:
    """The innermost line of the user's program in the first of these stacks; "" if there is none."""
    frame = stacks[0].users_frame if stacks else None
    return "" if frame is None else str(frame)


def is_users_code(file: str, module: str) -> bool:
    """Whether a file belongs to the user's program: neither to this library nor to an installed package."""
    return module.partition(".")[0] not in LIBRARY and not is_installed(file)


def is_installed(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    return file.startswith(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    """How the names of files of Python and of installed packages begin."""
    paths = {site.getusersitepackages(), *sysconfig.get_paths().values()} - {sysconfig.get_path("data")}
    return ("<", *sorted(paths))


def current_stacks() -> dict[int, list[Position]]:
    """The calls in progress in all threads, by thread, innermost first.

    CPython hangs if it collects garbage while it lists the frames of threads (python/cpython#106883), and may
    crash if a thread ends before its frames are followed. So neither happens here, if it can be helped.
    """
    with _listing:
        collects, interval_s = gc.isenabled(), sys.getswitchinterval()
        gc.disable()
        sys.setswitchinterval(1.0)
        try:
            return {ident: list(_outward(frame)) for ident, frame in sys._current_frames().items()}
        finally:
            sys.setswitchinterval(interval_s)
            if collects:
                gc.enable()


_listing = threading.RLock()
"""Held while settings of the interpreter are changed; a signal handler may list frames meanwhile."""


def _recorded(calls: list[Position]) -> list[Position]:
    """The calls of a stack that a record keeps: without the innermost ones, which write it."""
    first = next((n for n, call in enumerate(calls) if not call.module.startswith(_RECORDING)), len(calls))
    return calls[first : first + FRAMES]


def _outward(frame: FrameType | None) -> Iterable[Position]:
    while frame is not None:
        yield Position(frame.f_code, frame.f_lineno or 0, frame.f_globals)
        frame = frame.f_back
