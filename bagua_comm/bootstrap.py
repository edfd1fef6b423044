"""Setting up the world: `connect()`. Environment variables are read here.

A process started by mpirun (or srun, or whatever speaks PMI) joins the MPI world; any other is a world
of one rank, and needs no MPI. A process started by torchrun calls `bagua_torch.connect`, which brings a
transport.

If every rank has a GPU, a second transport is set up, for device arrays. It is NCCL if each rank has a GPU of its
own, or if the ranks that share one use one of the two ways in which NCCL allows it; else arrays are copied
through host memory. The ranks tell each other what they have, so all come to the same decision.

Under MPI this module also handles the end of the process. Whatever ends a rank (an exception in any of its
threads, a signal, `sys.exit`), the others learn of it and don't wait for it; see `_Ending`.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import functools
import importlib.util
import io
import os
import signal
import site
import socket
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from . import cuda
from .comm import Communicator
from .cuda import STREAMS_PER_THREAD, has_streams_per_thread
from .errors import BaguaError, BootstrapError, CommError, CommTimeout, RankFailed
from .files import private_folder
from .processes import state_of
from .trace import NULL, Recorder
from .transports import LocalTransport, Transport, base

GPU: TypeAlias = Literal["auto", "nccl", "staged", "none"]
"""What carries device arrays; see `connect`."""

MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")
"""Set by the launchers of Open MPI, MPICH, Intel MPI and Slurm."""

MPI_SETTINGS = {"OMPI_MCA_btl_tcp_eager_limit": str(320 << 10)}
"""Environment variables that `connect` sets before MPI starts, unless the user has set them. Open MPI then sends
the pieces of our collectives without asking the receiver first: on a busy link the question would wait behind
data."""

TIMEOUT_S = 300.0
"""How long a call waits for its peers, unless told otherwise."""

TURN_S, LAST_TURN_S = 0.3, 3.0
"""Ranks that may have the same error report it in turn: each this much later than the one before it, and at most
the second number later than rank 0."""

_NAP_S = 0.001
"""How long `connect` sleeps between two looks at whether its peers have come."""

LATE_S, START_S = 3.0, 30.0
"""How much longer than `timeout_s` a rank waits in `connect`: the first for a rank that runs but has not called
it, since ranks don't start at the same time; the second for MPI once all have called it, since MPI needs a second
to start, and more on a busy machine."""

_LOOK_S = 0.5
"""How often a rank whose time is over checks again who is missing."""

SHARED_GPU_NCCL = 23000
"""From this version on (2.30), NCCL can be told to accept several ranks on one GPU, and distinguishes the slices
of a GPU (MIG). Earlier versions know a GPU by its bus id alone."""

ADVICE = (
    "NCCL needs one GPU for each rank: start no more ranks on a machine than it has GPUs. (Ranks can share a GPU "
    "if each gets an NCCL_HOSTID of its own; they then talk over the network. From NCCL 2.30 on, two ranks can "
    "also share one with NCCL_MULTI_RANK_GPU_ENABLE=1, and more of them with a small NCCL_MAX_CTAS as well.)"
)

_default: Communicator | None = None


def connect(
    *,
    timeout_s: float = TIMEOUT_S,
    check: bool = False,
    trace: bool = True,
    node: str | int | None = None,
    transport: Transport | None = None,
    gpu: GPU = "auto",
) -> Communicator:
    """Join the world: all ranks that mpirun started, or one rank if mpirun did not start this process.

    Collective. The result is also the default communicator, until it is closed.

    Under MPI `timeout_s` bounds the start of MPI as well. If a rank does not come in time, one rank prints a
    message that names it, and the job ends with exit code 1.

    Under MPI an exception that nobody catches ends all ranks, with exit code 1. In a rank's main thread any
    exception does so. In another thread it does so if the thread is not a daemon, if the error is one of this
    library's, or if the code that failed refers to a communicator. One rank prints an error of this library, as a
    short message with the line of the program where it happened; set BAGUA_TRACEBACK=1 for the whole traceback.
    Any other error is printed at once, with its traceback. SIGTERM ends a rank and its child processes, unless
    the program handles it. A rank that ends with an open communicator leaves it: ranks that wait for it get an
    error.

    This library ends MPI when the process ends. If the program imports `mpi4py.MPI` before it connects, mpi4py
    does: then a child that was made by `os.fork` and ends by `sys.exit` may wait for ever, and so may the
    survivors of a rank that died. Set `mpi4py.rc.finalize = False` before that import to avoid this.

    If all ranks have a CUDA device, each makes one its current device: local rank i takes device i, modulo their
    number. Connect before you put anything on a device.

    Args:
        timeout_s: How long a call may wait for its peers before it raises `CommTimeout`, in seconds: above 0, at
            most 1e9, and not infinite.
        check: Compare every call among the ranks first, messages between two ranks included, and raise a
            `CommMismatch` that names both calls if they differ.
        trace: Keep the latest spans, for `Communicator.trace`.
        node: A label for this rank's node. By default ranks that can share memory share a node; give
            labels to try out `Hierarchical` on one machine.
        transport: Use this transport instead of looking for a world; its ranks share a node if they share a host
            name.
        gpu: What carries device arrays. "auto": NCCL where it is possible, else copies through host memory, with
            a warning that says why; nothing if a rank has no CUDA device. "nccl" or "staged" (through host
            memory): this one, or an error. "none": nothing, and CuPy is not imported.

    Raises:
        BootstrapError: A launcher started this process, but the world cannot be set up; or the transport that
            `gpu` asks for cannot, on all ranks alike; or `timeout_s` is not such a number.
        CommTimeout: MPI had started on all ranks, but one did not come in time.
        RankFailed: A rank died meanwhile, and mpirun let the others go on.

    >>> with connect() as comm:
    ...     comm.rank, comm.size
    (0, 1)
    """
    global _default
    check_timeout(timeout_s)
    if gpu not in get_args(GPU):
        raise BootstrapError(f"connect: gpu is {gpu!r}, expected one of {', '.join(get_args(GPU))}")
    machines: Sequence[object] = [0]
    ending: _Ending | None = None
    if transport is not None:
        machines = Communicator([transport], tracer=NULL).allgather_object(socket.gethostname())
    elif _under_mpi():
        transport, machines, ending = _mpi_world(timeout_s)
    else:
        transport = LocalTransport(timeout_s=timeout_s)
    setup = Communicator([transport], nodes=machines, tracer=NULL)
    nodes = machines if node is None else setup.allgather_object(node)
    device, beside = _device_side(setup, gpu)
    comm = _World(
        [transport, *beside],
        nodes=nodes,
        device=device,
        check=check,
        tracer=Recorder() if trace else NULL,
        ending=ending,
    )
    _default = comm
    return comm


def default() -> Communicator:
    """The communicator that `connect` made last; connects if there is none.

    Collective, if it connects.
    """
    return _default if _default is not None else connect()


def current() -> Communicator | None:
    """The communicator that `connect` made last, unless it is closed."""
    return _default


def check_timeout(timeout_s: object) -> None:
    """Raise `BootstrapError` unless `timeout_s` is a time that calls can wait."""
    base.check_timeout("connect", timeout_s)


def under_torchrun() -> bool:
    """Whether torchrun started this process, or something else that sets RANK and WORLD_SIZE.

    Not if they are what mpirun says: `python -m bagua_comm run` and Accelerate give its numbers these names, too.

    Raises:
        BootstrapError: These are not the numbers of a rank and of ranks.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return False
    mine = os.environ["RANK"], os.environ["WORLD_SIZE"]
    mpirun = os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("OMPI_COMM_WORLD_SIZE")
    if mine == mpirun and "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    size = _number("WORLD_SIZE", "a number of ranks", 1)
    _number("RANK", f"a rank from 0 to {size - 1}", 0, size - 1)
    return True


def torchrun_local_rank() -> int:
    """The number that torchrun gave this process on its machine; 0 if none.

    Raises:
        BootstrapError: LOCAL_RANK is not a number.
    """
    return _number("LOCAL_RANK", "a number from 0 on", 0) if "LOCAL_RANK" in os.environ else 0


def _number(name: str, meaning: str, least: int, most: int | None = None) -> int:
    """The number in an environment variable."""
    text = os.environ[name]
    with suppress(ValueError):
        number = int(text)
        if number >= least and (most is None or number <= most):
            return number
    raise BootstrapError(
        f"connect: the environment variable {name} is {text!r}, expected {meaning}; unset it, or start this "
        "program with torchrun or with mpirun"
    )


class _World(Communicator):
    """The communicator that `connect` makes; it is the default until it is closed."""

    def __init__(self, transports: Sequence[Transport], *, ending: _Ending | None, **settings: Any) -> None:
        super().__init__(transports, **settings)
        self._ending = ending
        if ending is not None:
            ending.worlds.append(self)

    def shrink(self) -> Communicator:
        """See `Communicator.shrink`; the result takes this one's place."""
        global _default
        comm = super().shrink()
        survivors = _World(
            comm.transports,
            nodes=comm._labels,
            device=comm.device,
            check=comm.check,
            tracer=comm.tracer,
            ending=self._ending,
        )
        if self._ending is not None and self in self._ending.worlds:
            self._ending.worlds.remove(self)
        if _default is self:
            _default = survivors
        return survivors

    def close(self) -> None:
        """Free what this communicator holds. Collective."""
        global _default
        if self.turn.closed or not self.turn.is_of_this_process:
            return
        if _default is self:
            _default = None
        if self._ending is not None and self in self._ending.worlds:
            self._ending.leave(self)
        super().close()


# ---------------------------------------------------------------------------------------------------
# The start of MPI
# ---------------------------------------------------------------------------------------------------


def _under_mpi() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.Get_size() > 1:
        return True
    if any(name in os.environ for name in MPI_VARIABLES):
        return True
    if under_torchrun() and int(os.environ["WORLD_SIZE"]) > 1:
        raise BootstrapError(
            "connect: torchrun started this process, and torchrun sets up no MPI world; call "
            "bagua_torch.connect() instead, or start the program with mpirun -n N python script.py, or with "
            "python -m bagua_comm run -n N script.py"
        )
    return False


def _mpi_world(timeout_s: float) -> tuple[Transport, list[int], _Ending]:
    for name, value in MPI_SETTINGS.items():
        os.environ.setdefault(name, value)
    roll, ending = _Roll(), _this_process()
    if ending.process != os.getpid():
        raise BootstrapError(
            f"connect: this process was forked from process {ending.process}, which is a rank; a forked child "
            "cannot be a rank: start ranks with mpirun"
        )
    roll.sign()
    try:
        ending.start_mpi(roll, timeout_s)
    except (ImportError, RuntimeError) as exc:
        raise BootstrapError(
            f"connect: mpirun started this process, but mpi4py cannot load an MPI library: {exc}; "
            "pip install 'bagua-comm[mpi]' brings one"
        ) from exc
    from mpi4py import MPI

    from .transports.mpi import MPITransport

    try:
        with ending.limit(_Wait(roll, timeout_s + _LOOK_S)):
            transport = MPITransport(_duplicate_world(_Wait(roll, timeout_s)), timeout_s=timeout_s)
            here = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
            # The label of a node is the number of its first rank in the world.
            (first,) = here.Get_group().Translate_ranks([0], MPI.COMM_WORLD.Get_group())
            here.Free()
            machines = Communicator([transport], tracer=NULL).allgather_object(first)
    except CommTimeout:
        raise
    except (MPI.Exception, CommError) as exc:
        # With ULFM: a rank died while MPI started, or just after. MPI's error does not always name it.
        raise RankFailed(f"connect: {roll.me()} lost another rank: {roll.missing()} ({exc})") from exc
    return transport, machines, ending


def _duplicate_world(wait: _Wait) -> Any:
    """A duplicate of MPI's world. Collective."""
    from mpi4py import MPI

    comm, request = MPI.COMM_WORLD.Idup()
    while not request.Test():
        complaint = wait.complaint()
        if complaint is not None:
            # MPI may still write the new communicator into this memory: never free it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((comm, request)))
            raise CommTimeout(complaint)
        time.sleep(_NAP_S)
    return comm


class _Limit:
    """While the body of `with` runs, another thread polls `is_over`.

    Once that returns a message, it calls `act` with it, which ends the process.
    """

    def __init__(self, is_over: Callable[[], str | None], act: Callable[[str], None]) -> None:
        self._is_over, self._act = is_over, act
        self._done, self._acts = threading.Event(), threading.Lock()

    def __enter__(self) -> None:
        threading.Thread(target=self._watch, name="limit", daemon=True).start()

    def __exit__(self, *error: object) -> None:
        with self._acts:
            self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(_LOOK_S / 10):
            message = self._is_over()
            if message is not None:
                with self._acts:
                    if not self._done.is_set():
                        self._act(message)


class _Wait:
    """A wait in `connect`, which begins now, and tells who is missing once it has lasted too long."""

    def __init__(self, roll: _Roll, timeout_s: float) -> None:
        self._roll, self._timeout_s = roll, timeout_s
        self._start_s = time.monotonic()
        self._look_s = self._start_s + timeout_s

    def complaint(self) -> str | None:
        """The message if this has lasted too long; None if not."""
        now = time.monotonic()
        if now < self._look_s:
            return None
        self._look_s = now + _LOOK_S
        late_s = now - self._start_s - self._timeout_s
        missing = self._roll.missing()
        if missing.gone or (missing.late and late_s > LATE_S) or late_s > START_S:
            return (
                f"connect: {self._roll.me()} waited {now - self._start_s:.0f} s for the other ranks: {missing}. "
                "Give a longer timeout_s if they are only late"
            )
        return None


class _Missing(NamedTuple):
    """The ranks that have not come to `connect`."""

    gone: list[str]
    """Sentences about those that have ended, or are stopped."""
    late: list[str]
    """About those that run, but have not called it."""
    unseen: list[str]
    """About those of whom nothing is known."""

    def __str__(self) -> str:
        found = "; ".join([*self.gone, *self.late, *self.unseen])
        return found or "all of them have called connect"


class _Roll:
    """Which ranks have called `connect`, as far as this host can tell before MPI has started.

    mpirun keeps a folder for its job on every host. Each rank signs there when it connects: it adds a line with
    its process id to a file of its own. /proc tells what the processes of other ranks do.
    """

    def __init__(self) -> None:
        self.rank = _first_number("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK") or 0
        self.size = _first_number("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
        self._local_size = _first_number("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
        self._job = os.environ.get("PMIX_NAMESPACE", "")
        self._folder = self._find_folder()
        self._times = 0

    def _find_folder(self) -> Path | None:
        """The folder of this job, if it is this user's alone."""
        name = os.environ.get("PMIX_SERVER_TMPDIR")
        if not name or not self._job:
            return None
        try:
            status = os.stat(name)
        except OSError:
            return None
        return Path(name) if status.st_uid == os.geteuid() and not status.st_mode & 0o022 else None

    def _file(self, name: object) -> str:
        return f"{self._folder}/bagua-{self._job.replace('/', '_')}-{name}"

    def sign(self) -> None:
        """Sign, once more, that this rank has called `connect`."""
        if self._folder is None:
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            file = os.open(self._file(self.rank), flags, 0o600)
            try:
                os.write(file, b"%d\n" % os.getpid())
            finally:
                os.close(file)
        except OSError:
            self._folder = None
            return
        self._times = len(self._signatures(self.rank))

    def may_speak(self) -> bool:
        """Whether this rank is the first on this host that asks to report an error, as far as that is known."""
        if self._folder is None:
            return True
        try:
            os.close(os.open(self._file("error"), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return False
        except OSError:
            return True
        return True

    def remark(self, timeout_s: float) -> str:
        """The message of a rank that has ended but goes on waiting for others: which of them still run here."""
        processes = sorted(self.processes().items()) if self._job else []
        others = [f"rank {rank} (process {pid}, {state_of(pid)})" for rank, pid in processes if rank != self.rank]
        return (
            f"{self.me()} has ended, and has waited {timeout_s:g} s for the other ranks to end; it goes on "
            f"waiting. On this host: {', '.join(others) or 'none can be seen'}"
        )

    def me(self) -> str:
        """This rank, and where it is."""
        size = "" if self.size is None else f" of {self.size}"
        return f"rank {self.rank}{size} on {socket.gethostname()}"

    def missing(self) -> _Missing:
        """The ranks that have not called `connect`."""
        missing = _Missing([], [], [])
        if self._folder is None or self.size is None:
            missing.unseen.append("this launcher does not show which of them have not called connect")
            return missing
        processes, unseen = self.processes(), []
        for rank in range(self.size):
            signatures = self._signatures(rank)
            process = int(signatures[-1]) if signatures else processes.get(rank)
            if rank == self.rank:
                continue
            if process is None:
                unseen.append(rank)
            elif (state := state_of(process)) not in ("running", ""):
                missing.gone.append(
                    f"rank {rank} (process {process}) {'is' if state == 'stopped' else 'has'} {state}"
                )
            elif len(signatures) < self._times:
                missing.late.append(f"rank {rank} (process {process}) runs, but has not called connect")
        if unseen and self._local_size == self.size:
            missing.gone.append(f"{_ranks(unseen)} ended without calling connect")
        elif unseen:
            missing.unseen.append(f"{_ranks(unseen)} cannot be seen from here: on another host, or ended")
        return missing

    def _signatures(self, rank: int) -> list[str]:
        """The process ids that a rank has signed, one for each time that it connected."""
        try:
            return Path(self._file(rank)).read_text().split()
        except OSError:
            return []

    def processes(self) -> dict[int, int]:
        """The process of each rank that runs on this host."""
        found: dict[int, list[int]] = {}
        wanted = f"PMIX_NAMESPACE={self._job}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if wanted in variables:
                for variable in variables:
                    name, _, value = variable.partition(b"=")
                    if name == b"PMIX_RANK" and value.isdigit():
                        found.setdefault(int(value), []).append(int(folder.name))
        # A rank's children have the same variables: take a process that is stopped, if any, else the oldest.
        return {
            rank: min(same, key=lambda process: (state_of(process) != "stopped", process))
            for rank, same in found.items()
        }


def _first_number(*names: str) -> int | None:
    """The number in the first of these environment variables that holds one."""
    return next((int(text) for text in map(os.environ.get, names) if text is not None and text.isdigit()), None)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


# ---------------------------------------------------------------------------------------------------
# The end of a rank
# ---------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _this_process() -> _Ending:
    """The one `_Ending` of this process, which has one MPI and one set of hooks."""
    return _Ending()


class _Ending:
    """Starts MPI, and ends this rank so that no other rank waits for it, whatever ends it.

    an exception that nobody catches    print it, then end all ranks (MPI_Abort)
    SIGTERM                             end child processes as well; mpirun then ends the other ranks
    the end of the program              leave the open worlds; then call MPI_Finalize, unless it could hang
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self.worlds: list[_World] = []
        """The open ones."""
        self._orderly = True
        """Whether all ranks have left, without an error, each world that this rank has left."""
        self._roll = _Roll()
        self._timeout_s = TIMEOUT_S
        self._mpi: Any = None
        self._library: Any = None
        """MPI's C interface, if this library started MPI and must end it."""
        self._hook: Callable[..., Any] = sys.__excepthook__
        self._thread_hook: Callable[..., Any] = threading.__excepthook__
        self._hooked_in = False
        self._earlier_error = _last_error()

    def start_mpi(self, roll: _Roll, timeout_s: float) -> None:
        """Start MPI, unless it runs already, and hook into the end of this process."""
        import mpi4py

        self._roll, self._timeout_s = roll, timeout_s
        ours = "mpi4py.MPI" not in sys.modules
        if ours:
            # mpi4py would start MPI here without letting other threads run, so that none could end a start that
            # hangs.
            settings = {"initialize": mpi4py.rc.initialize, "finalize": mpi4py.rc.finalize}
            mpi4py.rc(initialize=False, finalize=False)
            try:
                from mpi4py import MPI
            finally:
                mpi4py.rc(**settings)
            ours = settings["finalize"] is not False
        from mpi4py import MPI

        self._mpi = MPI
        if not MPI.Is_initialized():
            with self.limit(_Wait(roll, timeout_s)):
                library = _initialize(MPI)
            self._library = library if ours else None
        self._hook_in()

    def limit(self, wait: _Wait) -> _Limit:
        """In the body of `with`, end all ranks with a message once `wait` has lasted too long."""
        return _Limit(wait.complaint, self.give_up)

    def give_up(self, message: str) -> None:
        """Print a message, unless another rank has, and end all ranks."""
        self._wait_for_turn()
        self._print_once(message)
        self._end_all(1)

    def _wait_for_turn(self) -> None:
        time.sleep(min(TURN_S * self._roll.rank, LAST_TURN_S))

    def _print_once(self, message: str) -> None:
        if self._roll.may_speak():
            print(message, file=sys.stderr, flush=True)
        else:
            time.sleep(LAST_TURN_S)  # another rank has printed it, and is about to end all ranks

    def _end_all(self, exit_code: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        mpi = self._mpi
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.COMM_WORLD.Abort(exit_code)
        os._exit(exit_code)  # MPI has not started; mpirun ends the other ranks

    # Exceptions and signals -------------------------------------------------------------------------

    def _hook_in(self) -> None:
        """Install the hooks for exceptions in threads, for SIGTERM, and for the end of the program."""
        if sys.excepthook != self._on_exception:
            self._hook, sys.excepthook = sys.excepthook, self._on_exception
        if threading.excepthook != self._on_thread_exception:
            self._thread_hook, threading.excepthook = threading.excepthook, self._on_thread_exception
        if self._hooked_in:
            return
        self._hooked_in = True
        atexit.register(self._on_exit)
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            os.register_at_fork(after_in_child=self._forget_sigterm)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self.process:
            self._hook(kind, error, trace)
            return
        # torch.distributed's hook, which calls this one, keeps what is printed for later: none comes.
        lasting = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) else sys.stderr
        with redirect_stderr(lasting):
            self._report(error, trace, lambda: self._hook(kind, error, trace), self._hook is sys.__excepthook__)
            self._end_all(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        error, trace, thread = args.exc_value, args.exc_traceback, args.thread
        harmless = thread is not None and thread.daemon and not isinstance(error, BaguaError)
        if (
            os.getpid() != self.process
            or error is None
            or isinstance(error, SystemExit)
            or (harmless and not _refers_to_a_communicator(trace))
        ):
            self._thread_hook(args)
            return
        self._report(error, trace, lambda: self._thread_hook(args), self._thread_hook is threading.__excepthook__)
        self._end_all(1)

    def _report(
        self, error: BaseException, trace: TracebackType | None, show: Callable[[], object], is_default: bool
    ) -> None:
        """Print an error of this library briefly and once; print any other by `show`."""
        who = f"rank {self._mpi.COMM_WORLD.Get_rank()} of {self._mpi.COMM_WORLD.Get_size()}"
        if isinstance(error, BaguaError) and is_default and os.environ.get("BAGUA_TRACEBACK", "") in ("", "0"):
            self._wait_for_turn()
            self._print_once(
                f"{who} on {socket.gethostname()}: {type(error).__name__}: {error}\n{_where(trace)}"
                "  (BAGUA_TRACEBACK=1 shows the traceback)"
            )
            return
        print(f"{who}:", file=sys.stderr, flush=True)
        show()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """End this process as if nobody had handled the signal, and its children with it."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # mpirun gives each rank a process group of its own.
        if os.getpgrp() == self.process == os.getpid():
            os.killpg(self.process, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    def _forget_sigterm(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            with suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    # The end of the program -------------------------------------------------------------------------

    def _on_exit(self) -> None:
        """Leave the worlds that are open, and end MPI if it is ours."""
        if os.getpid() != self.process or self._mpi.Is_finalized():
            return
        error = _last_error()
        if error is not None and error is not self._earlier_error and sys.excepthook != self._on_exception:
            # Another hook has printed it without calling ours.
            who = f"rank {self._mpi.COMM_WORLD.Get_rank()} of {self._mpi.COMM_WORLD.Get_size()}"
            print(f"{who} ended with {type(error).__name__}, and all ranks with it", file=sys.stderr, flush=True)
            self._end_all(1)
        start_s = time.monotonic()
        for world in list(self.worlds):
            with suppress(CommError):
                self.leave(world)
        from .transports.mpi.blocking import BlockedCall

        if any(isinstance(thread, BlockedCall) for thread in threading.enumerate()):
            # A call that timed out still waits inside MPI, which cannot end before it returns.
            self._print_once(
                f"{self._roll.me()} ended while a call of MPI waits for another rank, so all ranks end"
            )
            self._end_all(1)
        self._forget_sigterm()  # Python calls no signal handler while MPI ends
        if self._library is None or _has_ulfm():
            # With ULFM, MPI_Finalize may hang once a rank has died, and mpirun does not require it.
            return
        if self._orderly:
            self._library.MPI_Finalize()
        elif time.monotonic() - start_s >= self._timeout_s:
            # The others may compute for as long as they like, but the user should know who is waited for.
            print(self._roll.remark(self._timeout_s), file=sys.stderr, flush=True)
            self._library.MPI_Finalize()
        else:
            self._finalize_after_an_error()

    def leave(self, world: _World) -> None:
        """Leave a world, and let the other ranks know. Collective."""
        self.worlds.remove(world)
        if self._mpi.Is_finalized():
            return
        orderly, self._orderly = self._orderly, False
        for transport in world.transports:
            orderly &= transport.leave()
        self._orderly = orderly

    def _finalize_after_an_error(self) -> None:
        message = (
            f"{self._roll.me()}: MPI did not end within {self._timeout_s:g} s after a call had failed; this "
            "process ends without it"
        )
        deadline_s = time.monotonic() + self._timeout_s
        limit = _Limit(lambda: message if time.monotonic() > deadline_s else None, self.give_up)
        try:
            limit.__enter__()
        except RuntimeError:  # from Python 3.12 on, no thread can be started at this point
            faulthandler.dump_traceback_later(self._timeout_s, exit=True)
        self._library.MPI_Finalize()


def _initialize(mpi: Any) -> Any:
    """Start MPI as mpi4py would, but let other threads run meanwhile; returns MPI's C interface."""
    import mpi4py

    settings = mpi4py.rc
    level = getattr(mpi, f"THREAD_{settings.thread_level.upper()}") if settings.threads else mpi.THREAD_SINGLE
    library = ctypes.CDLL(mpi.__file__)
    granted = ctypes.c_int()
    if library.MPI_Init_thread(None, None, level, ctypes.byref(granted)) != mpi.SUCCESS:
        raise RuntimeError("MPI_Init_thread failed")
    for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):
        comm.Set_errhandler(mpi.ERRORS_RETURN)
    return library


def _has_ulfm() -> bool:
    """Whether mpirun was told --with-ft ulfm."""
    setting = os.environ.get("OMPI_MCA_mpi_ft_enable", "0").lower()  # noqa: SIM112 - as Open MPI writes it
    return setting not in ("", "0", "f", "false", "disabled", "no", "n")


def _last_error() -> BaseException | None:
    """The exception that ended the main thread, if one has."""
    error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error


def _refers_to_a_communicator(trace: TracebackType | None) -> bool:
    """Whether a name in the code that failed stands for a communicator."""
    for frame, _ in traceback.walk_tb(trace):
        code = frame.f_code
        for name in (*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars):
            if isinstance(frame.f_locals.get(name, frame.f_globals.get(name)), Communicator):
                return True
    return False


def _where(trace: TracebackType | None) -> str:
    """The line of the user's program where an error happened."""
    installed = tuple(
        {site.getusersitepackages(), *sysconfig.get_paths().values()} - {sysconfig.get_path("data")}
    )
    frames = [
        (frame.f_code.co_filename.startswith(("<frozen", *installed)), summary)
        for (frame, _), summary in zip(traceback.walk_tb(trace), traceback.extract_tb(trace), strict=True)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("bagua_comm", "bagua_torch")
    ]
    if not frames:
        return ""
    # The deepest frame of the program itself; if it has none, the deepest of whatever called us.
    _, line = max(enumerate(frames), key=lambda item: (not item[1][0], item[0]))[1]
    return f"  {line.filename}:{line.lineno}, in {line.name}: {line.line}\n"


# ---------------------------------------------------------------------------------------------------
# The device side
# ---------------------------------------------------------------------------------------------------


class GpuFacts(NamedTuple):
    """What a rank tells the others about its GPU, and about NCCL."""

    machine: str
    """The machine's name for NCCL; ranks with different names in NCCL_HOSTID count as on different machines."""
    bus_id: str | None
    """The id of its GPU; None without a GPU. (Numbers will not do: processes may number GPUs differently.)"""
    uuid: str
    """NVIDIA's id of its GPU, or of its slice of a GPU (MIG)."""
    nccl: int
    """NCCL's version, 23203 for 2.32.3; 0 if it cannot be loaded."""
    problem: str
    """Why it cannot be loaded."""
    shares: bool
    """Whether NCCL was told that ranks may share a GPU."""


def make_room_for_cupy() -> None:
    """Give CuPy another cache folder if it cannot write to its own; without one it cannot be imported."""
    if "cupy" in sys.modules or importlib.util.find_spec("cupy") is None:
        return
    folder = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
    with suppress(OSError):
        if not folder.startswith("~"):  # else there is no home
            os.makedirs(folder, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        with suppress(OSError):  # no folder for temporary files either: then there are no GPUs
            os.environ["CUPY_CACHE_DIR"] = str(private_folder() / "cupy")


def _device_side(setup: Communicator, gpu: GPU) -> tuple[int | None, list[Transport]]:
    """Choose this rank's device, make it the current one, and make its transport. Collective."""
    if gpu == "none":
        return None, []
    make_room_for_cupy()
    count = cuda.device_count()
    device = setup.local_rank % count if count else None
    if device is not None and has_streams_per_thread():
        warnings.warn(f"connect: {STREAMS_PER_THREAD}.", RuntimeWarning, stacklevel=3)
    facts: list[Any] = setup.allgather_object(tuple(my_gpu(device)))
    gpus = [GpuFacts(*each) for each in facts]
    without = [rank for rank, each in enumerate(gpus) if each.bus_id is None]
    if without and gpu == "auto":
        return None, []
    if without:
        raise BootstrapError(f"connect: gpu is {gpu!r}, but ranks {without} have no CUDA device")
    (host,) = setup.transports
    if isinstance(host, LocalTransport):
        return device, []  # the local transport carries device arrays as well
    if gpu != "staged":
        obstacle = nccl_obstacle(gpus)
        if obstacle is None:
            made, failure = _connect_nccl(host)
            obstacle = next((text for text in setup.allgather_object(failure) if text), None)
            if made is not None and obstacle is None:
                return device, [made]
        if gpu == "nccl":
            raise BootstrapError(f"connect: gpu is 'nccl', but {obstacle}")
        if setup.rank == 0:
            warnings.warn(
                f"connect: device arrays go through host memory, since {obstacle}. "
                "Pass gpu='staged' to choose that without this warning.",
                RuntimeWarning,
                stacklevel=3,
            )
    from .transports.staged import StagedTransport

    return device, [StagedTransport(host.dup())]


def my_gpu(device: int | None) -> GpuFacts:
    """The facts about this process and its device, which becomes the current one."""
    bus_id, uuid, version, problem = None, "", 0, ""
    if device is not None:
        cuda.use_device(device)
        bus_id = cuda.bus_id(device)
        try:
            from .transports.nccl import transport as nccl

            version, uuid = nccl.version(), cuda.uuid(device)
        except (ImportError, CommError) as exc:
            problem = str(exc)
    machine = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    return GpuFacts(machine, bus_id, uuid, version, problem, os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1")


def nccl_obstacle(gpus: Sequence[GpuFacts]) -> str | None:
    """Why NCCL cannot serve ranks with these GPUs; None if it can."""
    ranks_at: dict[tuple[str, str | None, str], list[int]] = {}
    for rank, gpu in enumerate(gpus):
        if not gpu.nccl:
            return f"rank {rank} cannot load NCCL ({gpu.problem})"
        if gpu.nccl != gpus[0].nccl:
            return f"rank 0 has version {gpus[0].nccl} of NCCL, but rank {rank} has {gpu.nccl}"
        slice_of_it = gpu.uuid if gpu.nccl >= SHARED_GPU_NCCL else ""
        ranks_at.setdefault((gpu.machine, gpu.bus_id, slice_of_it), []).append(rank)
    if all(gpu.shares for gpu in gpus) and gpus[0].nccl >= SHARED_GPU_NCCL:
        return None
    for (machine, bus_id, _), ranks in ranks_at.items():
        if len({gpus[rank].uuid for rank in ranks}) > 1:
            return (
                f"ranks {ranks} have slices (MIG) of the GPU {bus_id} of {machine}, which NCCL tells apart from "
                f"version 2.30 on; this is {gpus[0].nccl}"
            )
        if len(ranks) > 1:
            return f"ranks {ranks} share the GPU {bus_id} of {machine}; {ADVICE}"
    return None


def _connect_nccl(host: Transport) -> tuple[Transport | None, str]:
    """The transport over NCCL, or why there is none on this rank. Collective."""
    from .transports.nccl import NcclTransport

    try:
        return NcclTransport.connect(host), ""
    except CommError as exc:
        return None, str(exc)
