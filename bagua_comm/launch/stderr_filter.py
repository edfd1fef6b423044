"""The stderr of Open MPI's mpirun, without the two paragraphs that it prints after every error of a program.

A rank that ends with an error has printed the reason, and ends all ranks by MPI_Abort. Open MPI prints 15 lines
on that, which hide the reason. So mpirun writes to a pipe, from which a process of its own copies everything else
to stderr as soon as it comes.

If a rank has died or ended with an exit code, or the job was ended while ranks waited, it prints at the end
where the records are, unless a rank has printed that. mpirun drops what they print after Ctrl-C, and often what
the last rank prints after the others have ended.
"""

from __future__ import annotations

import os
import re
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeAlias

RULE = b"-" * 74 + b"\n"
"""The line before and after each paragraph of Open MPI."""

DIED = b"prterun noticed that process rank "

EXITED = (
    b"prterun detected that one or more processes exited with non-zero status,\n"
    b"thus causing the job to be terminated. The first process to do so was:\n"
)

BEGINNINGS = (b"MPI_ABORT was invoked on rank ", b"prterun has exited due to process rank ", DIED, EXITED)

KNOWN = (
    rb"MPI_ABORT was invoked on rank \d+ in communicator [^\n]*\n"
    rb"(  Proc: [^\n]*\n)?(  Errorcode: \d+\n|with errorcode \d+\.\n)\n"
    rb"NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes\.\n"
    rb"You may or may not see output from other processes, depending on\n"
    rb"exactly when Open MPI kills them\.\n",
    rb"prterun has exited due to process rank \d+ with PID \d+ on node \S+ calling\n"
    rb'"abort"\. This may have caused other processes in the application to be\n'
    rb"terminated by signals sent by prterun \(as reported here\)\.\n",
)
"""The paragraphs that are left out."""

_PARAGRAPHS = re.compile(b"|".join(rb"(?:%s%s%s)" % (RULE, text, RULE) for text in KNOWN))

_DEATH = re.compile(
    RULE
    + rb"(?:"
    + DIED
    + rb"(?P<killed>\d+) with PID \d+ on node (?P<host>\S+) exited on\nsignal [^\n]*\n|"
    + EXITED
    + rb"\n *Process name: \[[^\n]*,(?P<ended>\d+)\]\n *Exit code: +(?P<code>\d+)\n)"
    + RULE
)

REPORTS = b") has died: ", b" -m bagua_comm diagnose "
"""Parts of lines in which a rank says where the records are; see `bootstrap.rank_exit`, `comm.prepared`."""


class Death(NamedTuple):
    """The first end of a rank that has ended the job, as mpirun reports it."""

    rank: str
    host: str = ""
    """The host on which a signal has killed it; empty if it ended with an exit code."""
    exit_code: str = ""
    """Its exit code; empty after a signal."""


AtEnd: TypeAlias = Callable[[Death | None], str]
"""See `Filter`."""

_LINE_STARTS = re.compile(rb"[\n\0](?=-)")

LONGEST = 1000
"""Bytes of a paragraph that are held back at most until it is complete."""

HOLD_S = 0.5
"""How long they are held back at most."""


class Filter:
    """Removes the paragraphs from bytes that come in pieces.

    Args:
        at_end: Returns the text to add once all ranks have ended. Its argument is the first death that mpirun has
            reported, or None. It is not called if a rank has printed where they are.
    """

    def __init__(self, at_end: AtEnd | None = None) -> None:
        self._at_end = at_end
        self._death: Death | None = None
        self._end = b""
        """The last bytes that came, in which the report of a rank may begin."""
        self._held = b""
        self._begins_line = True
        """Whether the next bytes begin a line."""
        self._has_removed = False

    @property
    def holds(self) -> bool:
        """Whether bytes are held back, since a paragraph may have begun."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        """Add the next bytes; returns those that are to be printed now."""
        text, found = _PARAGRAPHS.subn(b"", self._held + data)
        self._has_removed |= found > 0
        if self._at_end is not None:
            recent = self._end + data
            if any(report in recent for report in REPORTS):
                self._at_end = None
            self._end = recent[-max(map(len, REPORTS)) :]
            if self._death is None and (death := _DEATH.search(text)):
                killed, host, ended, code = (each.decode() for each in death.groups(b""))
                self._death = Death(killed or ended, host, code)
        if self._has_removed:  # mpirun ends what it prints with a NUL
            text = text.replace(b"\0", b"")
        at = self._paragraph_in(text)
        return self._passed(text[:at], text[at:])

    def flush(self) -> bytes:
        """Return the bytes that are held back."""
        return self._passed(self._held, b"")

    def end(self) -> bytes:
        """Return the bytes that are held back, and what `at_end` adds. All ranks have ended."""
        text = self.flush()
        note = "" if self._at_end is None else self._at_end(self._death)
        begin = b"" if self._begins_line or not note else b"\n"
        return text + begin + note.encode()

    def _passed(self, ready: bytes, held: bytes) -> bytes:
        self._held = held
        if ready:
            self._begins_line = ready.endswith((b"\n", b"\0"))
        return ready

    def _paragraph_in(self, text: bytes) -> int:
        """The position of a paragraph that has begun and is not complete; the length of `text` without one."""
        starts = [0] if self._begins_line and text.startswith(b"-") else []
        for at in starts + [found.end() for found in _LINE_STARTS.finditer(text)]:
            rest = text[at:]
            if len(rest) < LONGEST and any(_may_become(rest, RULE + beginning) for beginning in BEGINNINGS):
                return at
        return len(text)


def _may_become(begun: bytes, wanted: bytes) -> bool:
    """Whether text that has begun so may start with `wanted`."""
    return begun.startswith(wanted) or wanted.startswith(begun)


def filter_stderr(at_end: AtEnd | None = None) -> None:
    """Have another process filter what this one, and the program that it becomes, write to stderr.

    The process ends when all writers have ended. It is no child of this one, which may become mpirun. If it
    cannot be started, stderr stays as it is.

    Args:
        at_end: See `Filter`.
    """
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.fork() == 0:
                os.close(sink)
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)  # mpirun and its ranks may write after these
                copy(source, 2, Filter(at_end))
            code = 0
        finally:
            os._exit(code)
    os.close(source)
    if os.waitpid(child, 0)[1] == 0:
        os.dup2(sink, 2)
    os.close(sink)


def copy(source: int, sink: int, texts: Filter) -> None:
    """Copy what comes from one file descriptor to another one through a `Filter`, until the first ends."""
    while True:
        if not select.select([source], [], [], HOLD_S if texts.holds else None)[0]:
            _write(sink, texts.flush())
            continue
        data = os.read(source, 1 << 16)
        _write(sink, texts.feed(data) if data else texts.end())
        if not data:
            return


def _write(sink: int, data: bytes) -> None:
    while data:
        select.select([], [sink], [])  # a terminal that another program has set to non-blocking mode
        with suppress(BlockingIOError):
            data = data[os.write(sink, data) :]
