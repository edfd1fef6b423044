"""The exit of a rank: no other rank waits for one that has ended, whatever ended it.

`ExitHandler` handles

    an uncaught exception    print it, then end all ranks (MPI_Abort)
    SIGTERM                  write the flight record, report a rank that has died, and end child processes as
                             well; mpirun then ends the other ranks
    the end of the program   leave the open worlds; then call MPI_Finalize, unless it could hang
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import functools
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, suppress
from types import FrameType, ModuleType, TracebackType
from typing import Any, TypeVar

from ..comm import Communicator
from ..comm.arguments import hint_of
from ..errors import BaguaError, CommAborted, CommError, RankFailed, causes, uncaught_error
from ..execution.futures import TaskProblem, end_lanes
from ..flight import explain
from ..flight.entries import LEFT_WELL, file_name
from ..flight.requests import answer_requests
from ..flight.stacks import LIBRARY, is_installed
from ..live import writer as live
from ..live.status import SIGTERM
from ..system.processes import mapped_files
from .environment import has_ulfm, job, own_variables
from .rendezvous import Deadline, JoinLog, Wait

T = TypeVar("T")

EXIT_TIMEOUT_S = 10.0
"""The time limit of MPI_Finalize where ranks may have died; after it, the process ends without MPI."""

REPORT_DELAY_S, MAX_REPORT_DELAY_S = 0.3, 3.0
"""Ranks that may have the same error report it one after the other: rank r waits r times the first number, and at
most the second."""

RECORDS_S = 1.0
"""The time limit of the rank that reports an error for the flight records of the other ranks."""


@functools.lru_cache(maxsize=1)
def exit_handler() -> ExitHandler:
    """Return the exit handler of this process, which has one MPI and one set of hooks."""
    return ExitHandler()


class Abort:
    """Ends all ranks of the job, after one of them has printed the reason."""

    def __init__(self) -> None:
        self.log = JoinLog(own_variables())
        self.mpi: Any = None
        """The module `mpi4py.MPI`, once it is imported."""
        self.notify: Callable[[str], None] | None = None
        """Called first, with the reason: the other processes of a fleet may survive MPI_Abort."""

    def prepare(self, mpi: ModuleType, log: JoinLog) -> None:
        """Use this module `mpi4py.MPI`, and this log of the ranks that connect."""
        self.mpi, self.log = mpi, log

    def with_message(self, message: str) -> None:
        """Print a message, unless another rank has, and end all ranks."""
        self.wait_for_turn()
        self.print_once(message)
        self.end_all(1, message)

    def rank_name(self) -> str:
        """Return the name of this rank in messages; its launcher may know of ranks that MPI does not find."""
        if self.mpi is None or self._is_alone():
            return self.log.name()
        world = self.mpi.COMM_WORLD
        return f"rank {world.Get_rank()} of {world.Get_size()}"

    def wait_for_turn(self) -> None:
        """Wait until it is this rank's turn to report an error."""
        time.sleep(min(REPORT_DELAY_S * self.log.rank, MAX_REPORT_DELAY_S))

    def print_once(self, message: str) -> None:
        """Print a message, unless another rank of this host has."""
        if self.log.is_reporter():
            print(message, file=sys.stderr, flush=True)
        else:
            time.sleep(MAX_REPORT_DELAY_S)  # the reporter is about to end all ranks

    def end_all(self, exit_code: int, reason: str = "an error") -> None:
        """End all ranks, this one with `exit_code`."""
        _flush()
        if self.notify is not None:
            with suppress(Exception):
                self.notify(reason)
        mpi = self.mpi
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and not self._is_alone():
            mpi.COMM_WORLD.Abort(exit_code)
        os._exit(exit_code)  # MPI has not started; mpirun ends the other ranks

    def _is_alone(self) -> bool:
        """Whether this process is the only one of the job that MPI knows of."""
        alone: bool = self.mpi.COMM_WORLD.Get_size() == 1
        return alone


class ExitHandler:
    """The hooks for the exit of this rank: for exceptions, SIGTERM and the end of the program."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.abort = Abort()
        self.library: ctypes.CDLL | None = None
        """MPI's C interface, if this library must end MPI at exit; else None: mpi4py does so."""
        self.advice = ""
        """Advice that the report of ranks that have died ends with."""
        self._timeout_s = 0.0
        self._worlds: list[Communicator] = []
        """The open ones."""
        self._job = job()
        self._rank = 0
        self._orderly = True
        """Whether all ranks have left, without an error, each world that this rank has left."""
        self._hook: Callable[..., object] = sys.__excepthook__
        self._thread_hook: Callable[..., object] = threading.__excepthook__
        self._problem: TaskProblem | None = None
        """The first error of a task or a request that nobody has seen before the program ended."""
        self._is_installed = False
        self._ending = threading.RLock()
        self._earlier_error = uncaught_error()

    def prepare(self, mpi: ModuleType, log: JoinLog, timeout_s: float) -> None:
        """Use this module `mpi4py.MPI`, this log of the ranks that connect, and this time limit at exit."""
        self.abort.prepare(mpi, log)
        self._timeout_s = timeout_s

    def limit(self, wait: Wait, body: Callable[[], T]) -> T:
        """Return `body()`. If that takes longer than `wait` allows, end all ranks with a message."""

        def end(message: str) -> None:
            for rank in wait.ended:
                dead = {"number": rank, "host": socket.gethostname()}
                self._job.record("death", dead=dead, reason="ended without calling connect")
            if self._job.attempt and not wait.ended:  # they have started before, so to start them again may help
                facts = {"error": "CommTimeout", "text": message, "due_to_others": True}
                self._job.record("error", rank=wait.rank, **facts)
            self.abort.with_message(message)

        return Deadline(wait.complaint, end).run(body)

    # The open worlds --------------------------------------------------------------------------------

    def add(self, world: Communicator) -> None:
        """Add a world, which this rank leaves at the end of the program."""
        self._worlds.append(world)

    def discard(self, world: Communicator) -> None:
        """Forget a world, if it is open."""
        if world in self._worlds:
            self._worlds.remove(world)

    def leave(self, world: Communicator) -> None:
        """Leave a world, if it is open, and notify the other ranks. Collective."""
        if world not in self._worlds:
            return
        self._worlds.remove(world)
        if self.abort.mpi.Is_finalized():
            return
        orderly, self._orderly = self._orderly, False
        write = functools.partial(world.flight.write, left=LEFT_WELL)
        for transport in world.transports:
            transport.on_slow_leave = write  # this process may be ended while it waits
            orderly &= transport.leave()
        self._orderly = orderly
        if not orderly:
            write()

    # Exceptions and signals -------------------------------------------------------------------------

    def install(self) -> None:
        """Install the hooks, and record the start of this rank. MPI has started."""
        if not self._is_installed:
            world = self.abort.mpi.COMM_WORLD
            self._job.prepare()
            self._rank = world.Get_rank()
            shared = mapped_files("/dev/shm/") if self._job.folder is not None else []
            self._job.record("start", rank=self._rank, size=world.Get_size(), shared=shared)
        self.report_exceptions()
        if threading.excepthook != self._on_thread_exception:
            self._thread_hook, threading.excepthook = threading.excepthook, self._on_thread_exception
        if self._is_installed:
            return
        self._is_installed = True
        atexit.register(self._on_exit)
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            os.register_at_fork(after_in_child=self._restore_sigterm)
        answer_requests(self._write_record)
        if hasattr(threading, "_register_atexit"):  # as concurrent.futures does, whose function is called later
            threading._register_atexit(self._before_threads_end)

    def report_exceptions(self) -> None:
        """Report an uncaught exception of the main thread from now on, and end all ranks."""
        if sys.excepthook != self._on_exception:
            self._hook, sys.excepthook = sys.excepthook, self._on_exception

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self.process:
            self._hook(kind, error, trace)
            return
        # torch.distributed's hook, which calls this one, redirects stderr to print the text after this returns.
        lasting = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) else sys.stderr
        with redirect_stderr(lasting):
            self._end_after(error, lambda: self._hook(kind, error, trace), self._hook is sys.__excepthook__)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        error, thread = args.exc_value, args.thread
        harmless = thread is not None and thread.daemon and not isinstance(error, BaguaError)
        if (
            os.getpid() != self.process
            or error is None
            or isinstance(error, SystemExit)
            or (harmless and not _refers_to_a_communicator(args.exc_traceback))
        ):
            self._thread_hook(args)
            return
        is_default = self._thread_hook is threading.__excepthook__
        self._end_after(error, lambda: self._thread_hook(args), is_default)

    def _end_after(self, error: BaseException, show: Callable[[], object], is_default: bool) -> None:
        """Report an error, complete the saves of checkpoints, and end all ranks.

        Another thread that fails meanwhile, perhaps since its checkpoints are closed now, waits for the end.
        """
        with self._ending:
            self._report(error, show, is_default)
            try:
                for world in tuple(self._worlds):
                    with suppress(Exception):  # the next one may have a save under way, too
                        world.leave_first(error)
            finally:
                self.abort.end_all(130 if isinstance(error, KeyboardInterrupt) else 1, _text(error))

    def _report(self, error: BaseException, show: Callable[[], object], is_default: bool) -> None:
        """Record an error. Print one of this library briefly and once, and any other by `show`."""
        self._record_error(error)
        name = self.abort.rank_name()
        if isinstance(error, BaguaError) and is_default and os.environ.get("BAGUA_TRACEBACK", "") in ("", "0"):
            self.abort.wait_for_turn()
            self.abort.print_once(
                f"{name} on {socket.gethostname()}: {_text(error)}\n{_where(error.__traceback__)}"
                f"{self._explanation(error)}  (BAGUA_TRACEBACK=1 shows the traceback)"
            )
            return
        self._write_record(left=_text(error))
        print(f"{name}:", file=sys.stderr, flush=True)
        show()
        if (hint := hint_of(error, Communicator)) and hint not in getattr(error, "__notes__", ()):
            print(f"  {hint}", file=sys.stderr, flush=True)

    def _explanation(self, error: BaseException) -> str:
        """The diagnosis of the error from all ranks' flight records; empty if no call has failed."""
        if not isinstance(error, CommError):
            self._write_record(left=_text(error))
            return ""
        texts = [explain(world.flight, RECORDS_S) for world in self._worlds[-1:]]
        lines = [line for text in texts for line in text.splitlines()]
        return "".join(f"  {line}\n" for line in lines if line.removeprefix("* ") not in str(error))

    def _record_error(self, error: BaseException) -> None:
        """Record an error, and whether it is due to other ranks, in the record of the job."""
        due_to_others = any(isinstance(each, CommError) for each in causes(error))
        facts = {"error": type(error).__name__, "text": str(error)[:500], "due_to_others": due_to_others}
        self._job.record("error", rank=self._rank, **facts)
        live.end("failed", _text(error))

    def _write_record(self, **left: str) -> None:
        """Write the flight record of this rank, for another one that waits for it, or since this one leaves."""
        for world in self._worlds[-1:]:
            world.flight.write(**left)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """End this process as the default action would, and its children with it."""
        died = {} if has_ulfm() else self._died_without_record()
        for world in self._worlds[-1:]:
            world.flight.died(died)
        self._write_record()  # often mpirun has sent it, because another rank failed
        live.end("failed", SIGTERM)
        self._report_deaths(died)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # mpirun gives each rank a process group of its own.
        if os.getpgrp() == self.process == os.getpid():
            os.killpg(self.process, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    def _died_without_record(self) -> dict[int, str]:
        """The ranks of this host that have ended without notice, as after SIGKILL, with a text for each.

        Where mpirun ends the ranks one after the other, those before this one have written their records.
        """
        log = self.abort.log
        with suppress(Exception):  # this rank ends in any case
            folder = self._worlds[-1].flight.folder
            if folder is not None:
                ranks = {log.number_in_world(rank): (rank, process) for rank, process in log.dead().items()}
                return {
                    number: f"rank {rank} of {log.size} on {socket.gethostname()} (process {process}) has died"
                    for number, (rank, process) in ranks.items()
                    if not (folder / file_name(number)).exists()
                }
        return {}

    def _report_deaths(self, died: Mapping[int, str]) -> None:
        """Print which ranks have died, and how to see what the others did, unless another rank has."""
        if not died or not self.abort.log.is_reporter():
            return
        text = (
            f"{'; '.join(died.values())}: it crashed, called os._exit, or was killed, perhaps by the kernel for "
            "want of memory; mpirun's message has the signal or the exit code\n"
            f"  for what the other ranks did: python -m bagua_comm diagnose {self._worlds[-1].flight.folder}\n"
        )
        text += f"  to let the others continue next time: {self.advice}\n" if self.advice else ""
        with suppress(OSError):
            os.write(2, text.encode())  # the signal may have come while Python writes to sys.stderr

    def _restore_sigterm(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            with suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    # The end of the program -------------------------------------------------------------------------

    def _before_threads_end(self) -> None:
        """End the tasks of lanes, whose threads Python waits for; print the errors that nobody has seen.

        With one, the program ends with exit code 1, unless it has survived a death or the abort of a rank.
        """
        if os.getpid() != self.process or self.abort.mpi.Is_finalized():
            return
        for world in list(self._worlds):
            for problem in end_lanes(world.flight.lanes, world.flight.unretrieved, world.group):
                if not isinstance(problem.error, RankFailed | CommAborted):
                    self._problem = self._problem or problem
                print(f"{self.abort.rank_name()}: {problem}", file=sys.stderr, flush=True)

    def _on_exit(self) -> None:
        """Leave the open worlds, and end MPI unless mpi4py does so."""
        if os.getpid() != self.process:
            return
        error = None if sys.excepthook == self._on_exception else uncaught_error(self._earlier_error)
        if error is not None:
            self._record_error(error)
        elif self._problem is not None:
            self._record_error(self._problem.error)
        else:
            self._job.record("exit", rank=self._rank)
        if self.abort.mpi.Is_finalized():
            return
        if error is not None:
            # Another hook has printed it without calling ours.
            text = f"{self.abort.rank_name()} ended with {type(error).__name__}, and all ranks with it"
            print(text, file=sys.stderr, flush=True)
            self.abort.end_all(1, _text(error))
        start_s = time.monotonic()
        for world in list(self._worlds):
            with suppress(CommError):
                self.leave(world)
        from ..transports.mpi.time_limit import BlockedCall

        if any(isinstance(thread, BlockedCall) for thread in threading.enumerate()):
            # A call that timed out still waits inside MPI, which cannot end before it returns.
            name = self.abort.log.location()
            self.abort.print_once(f"{name} ended while a call of MPI waits for another rank, so all ranks end")
            self.abort.end_all(1)
        self._restore_sigterm()  # Python calls no signal handler while MPI ends
        self._finalize(start_s)
        if self._problem is not None:
            _set_exit_code(1)

    def _finalize(self, start_s: float) -> None:
        """End MPI, within a time limit where MPI_Finalize may hang.

        Args:
            start_s: When this rank began to leave its worlds, by `time.monotonic`.
        """
        if has_ulfm():
            # Once a rank has died, MPI_Finalize may hang, and so may MPI's destructors. mpirun requires neither.
            if self.library is None:  # the user's mpi4py would call it, and wait forever
                self._finalize_within(ctypes.CDLL(self.abort.mpi.__file__), EXIT_TIMEOUT_S)
            _end_without_destructors()
        elif self.library is None:
            return
        elif self._orderly:
            self.library.MPI_Finalize()
        elif time.monotonic() - start_s >= self._timeout_s:
            # The other ranks may compute for as long as they like; the user should know which of them run.
            print(self.abort.log.note(self._timeout_s), file=sys.stderr, flush=True)
            self.library.MPI_Finalize()
        else:
            self._finalize_within(self.library, self._timeout_s)

    def _finalize_within(self, library: ctypes.CDLL, limit_s: float) -> None:
        """Call MPI_Finalize, and end the process if that takes longer than `limit_s`."""
        message = (
            f"{self.abort.log.location()}: MPI did not end within {limit_s:g} s after a rank or a call had "
            "failed; this process ends without it"
        )
        timer = threading.Timer(limit_s, self.abort.with_message, [message])
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # from Python 3.12 on, no thread can be started at this point
            faulthandler.dump_traceback_later(limit_s, exit=True)
        library.MPI_Finalize()


def _flush() -> None:
    """Write out what the program has printed, before the process ends."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _end_without_destructors() -> None:
    """Have the process end as soon as Python has, with its exit code: no library's destructors run."""
    with suppress(AttributeError, OSError):  # not every C library has on_exit
        library = ctypes.CDLL(None)
        library.on_exit(library._exit, None)
        library.fflush(None)


def _set_exit_code(code: int) -> None:
    """Have the process end with this exit code once Python has ended, with all that the program does at exit.

    The last function that C calls first ends the process anew; glibc then calls those that are left.
    """
    library = ctypes.CDLL(None)
    library.__cxa_atexit(library.exit, ctypes.c_void_p(code), None)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _refers_to_a_communicator(trace: TracebackType | None) -> bool:
    """Whether a name in the code that failed is bound to a communicator."""
    for frame, _ in traceback.walk_tb(trace):
        code = frame.f_code
        for name in (*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars):
            if isinstance(frame.f_locals.get(name, frame.f_globals.get(name)), Communicator):
                return True
    return False


def _where(trace: TracebackType | None) -> str:
    """The line of the user's program where an error happened."""
    frames = [
        (is_installed(frame.f_code.co_filename), summary)
        for (frame, _), summary in zip(traceback.walk_tb(trace), traceback.extract_tb(trace), strict=True)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in LIBRARY
    ]
    if not frames:
        return ""
    # The deepest frame of the program itself; if it has none, the deepest of its caller.
    _, line = max(enumerate(frames), key=lambda item: (not item[1][0], item[0]))[1]
    return f"  {line.filename}:{line.lineno}, in {line.name}: {line.line}\n"
