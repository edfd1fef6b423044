"""The start of MPI within a time limit, and the world of its ranks."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import secrets
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from ..comm import Communicator
from ..errors import BootstrapError, CommError, CommTimeout, RankFailed
from ..system.processes import this_host
from ..topology import hosts
from ..trace import NULL
from ..transports import Transport
from . import launchers, segments, tcp_links
from .environment import number_of_links, own_variables, ranks_on_other_hosts, set_mpi_variables
from .rank_exit import ExitHandler, exit_handler
from .rendezvous import LOOK_S, JoinLog, Wait

if TYPE_CHECKING:
    from mpi4py import MPI


T = TypeVar("T")

_POLL_S = 0.001
"""The interval between two checks whether other ranks have come."""


def mpi_world(timeout_s: float, comm: MPI.Comm | None) -> tuple[Transport, list[int], str, ExitHandler]:
    """Start MPI, and return a transport, the host label of each rank, a name for the records, the exit handler.

    Collective.

    Args:
        timeout_s: The time limit of the start, and of later calls.
        comm: The ranks of the world; if None, all that were started.

    Raises:
        BootstrapError: MPI cannot start, or finds fewer ranks than were started.
        CommTimeout: MPI had started on all ranks, but one did not come in time.
        RankFailed: A rank died meanwhile.
    """
    handler = exit_handler()

    def gather_ranks() -> tuple[Transport, list[tuple[int, str, str]]]:
        from mpi4py import MPI

        from ..transports.mpi import MPITransport
        from ..transports.mpi.world import first_beside

        duplicate = _duplicate(comm or MPI.COMM_WORLD, Wait(handler.abort.log, timeout_s))
        first = first_beside(duplicate)
        transport = MPITransport(duplicate, timeout_s=timeout_s)
        facts = Communicator([transport], tracer=NULL).allgather_object((first, this_host(), new_name()))
        return transport, facts

    transport, facts = start(timeout_s, gather_ranks, comm)
    # The label of a node is the number of its first rank.
    firsts, machines, names = zip(*facts, strict=True)
    return transport, hosts(firsts, machines), names[0], handler


def new_name() -> str:
    """Return a unique name for the folder of a job's flight records."""
    run = os.environ.get("BAGUA_RUN")
    return time.strftime(f"%Y%m%d-%H%M%S-{secrets.token_hex(3)}") + (f"-run{run}" if run else "")


def start(timeout_s: float, first: Callable[[], T], comm: MPI.Comm | None = None) -> T:
    """Start MPI, and return the result of `first`, which all processes call once it has started.

    Collective. If a process does not come in time, one prints a message that names it, and the job ends.

    Args:
        timeout_s: The time limit.
        first: The first call.
        comm: The ranks that call it; if None, all that were started.

    Raises:
        BootstrapError: The world cannot be set up; see `connect`.
        CommTimeout: MPI had started on all ranks, but one did not come in time.
        RankFailed: A process died before the others could continue without it.
    """
    handler, log = _start_mpi(timeout_s, comm)
    from mpi4py import MPI

    try:
        return handler.limit(Wait(log, timeout_s + LOOK_S), first)
    except CommTimeout:
        raise
    except (MPI.Exception, CommError) as exc:  # MPI's own error does not always name the rank
        text = f"connect: {log.location()} lost another rank: {log.missing()} ({exc})"
        raise RankFailed(text) from exc


def _start_mpi(timeout_s: float, comm: MPI.Comm | None) -> tuple[ExitHandler, JoinLog]:
    """Start MPI, unless it runs, and check that it has found all ranks of the job. Collective."""
    set_mpi_variables()
    handler = exit_handler()
    if handler.process != os.getpid():
        raise BootstrapError(
            f"connect: this process was forked from process {handler.process}, which is a rank; a forked child "
            "cannot be a rank: start ranks with mpirun"
        )
    variables = own_variables()
    log = JoinLog(variables, None if comm is None else _members(comm))
    log.check_in()
    launch = launchers.find(variables)
    try:
        mpi = _import_and_initialize(handler, log, timeout_s)
    except (ImportError, RuntimeError) as exc:
        raise BootstrapError(_why_there_is_no_mpi(launch, exc)) from exc
    if comm is None and launch is not None:
        complaint = launchers.complaint(launch, mpi.COMM_WORLD.Get_size(), _name_of(mpi))
        if complaint:
            raise BootstrapError(complaint)
    return handler, log


def _import_and_initialize(handler: ExitHandler, log: JoinLog, timeout_s: float) -> ModuleType:
    """Start MPI, unless it runs, and install the exit handler; returns `mpi4py.MPI`."""
    import mpi4py

    is_first = "mpi4py.MPI" not in sys.modules
    if is_first:
        # mpi4py would hold the GIL while MPI starts here, so that no thread could end a start that hangs.
        settings = {"initialize": mpi4py.rc.initialize, "finalize": mpi4py.rc.finalize}
        mpi4py.rc(initialize=False, finalize=False)
        try:
            from mpi4py import MPI
        finally:
            mpi4py.rc(**settings)
    from mpi4py import MPI

    handler.prepare(MPI, log, timeout_s)
    must_start = not MPI.Is_initialized()
    if must_start:
        handler.limit(Wait(log, timeout_s), lambda: _initialize(MPI))
    # mpi4py finalizes MPI as `rc` said when mpi4py.MPI was imported; None means as for `initialize`.
    finalizes = mpi4py.rc.initialize if mpi4py.rc.finalize is None else mpi4py.rc.finalize
    if (must_start and (is_first or not finalizes)) or mpi4py.rc.finalize is False:
        handler.library = ctypes.CDLL(MPI.__file__)
    handler.install()
    return MPI


def _initialize(mpi: ModuleType) -> None:
    """Start MPI as mpi4py would, but let other threads run meanwhile."""
    import mpi4py

    settings = mpi4py.rc
    level = getattr(mpi, f"THREAD_{settings.thread_level.upper()}") if settings.threads else mpi.THREAD_SINGLE
    library = ctypes.CDLL(mpi.__file__)
    granted = ctypes.c_int()
    with segments.kept_apart():
        code = library.MPI_Init_thread(None, None, level, ctypes.byref(granted))
    if code != mpi.SUCCESS:
        raise RuntimeError("MPI_Init_thread failed")
    for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):
        comm.Set_errhandler(mpi.ERRORS_RETURN)
    if number_of_links() > 1 and ranks_on_other_hosts():
        tcp_links.open_in_order(mpi.COMM_WORLD, number_of_links(), _POLL_S)


def _why_there_is_no_mpi(launch: launchers.Launch | None, error: Exception) -> str:
    """The message for an MPI that cannot be loaded."""
    if launch is not None and importlib.util.find_spec("mpi4py") is None:
        complaint = launchers.complaint(launch, 1, "")
        if complaint:
            return complaint
    launcher = "mpirun" if launch is None else launch.launcher.name
    return (
        f"connect: {launcher} started this process, but mpi4py cannot load an MPI library: {error}; pip install "
        "'bagua-comm[mpi]' brings one, or, at a site with an MPI of its own, "
        f"{launchers.BUILD.format('that')}"
    )


def _name_of(mpi: ModuleType) -> str:
    """The name and version of an MPI library, as "Open MPI 5.0.11"."""
    name, version = mpi.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def _members(comm: MPI.Comm) -> list[int]:
    """The ranks in MPI's world of a communicator's ranks.

    Raises:
        BootstrapError: `comm` cannot be a world.
    """
    mpi = sys.modules["mpi4py.MPI"]
    if not mpi.Is_initialized() or mpi.Is_finalized():
        when = "has ended" if mpi.Is_finalized() else "has not started (call mpi4py.MPI.Init_thread before)"
        raise BootstrapError(f"connect: comm is a communicator of mpi4py, but MPI {when}")
    if comm == mpi.COMM_NULL:
        raise BootstrapError(
            "connect: comm is MPI.COMM_NULL: this rank is outside of that communicator, or it was freed; only "
            "its ranks may connect"
        )
    if comm.Is_inter():
        raise BootstrapError(
            "connect: comm is an inter-communicator, expected one whose ranks form one group; Merge() makes one"
        )
    everyone = comm.Get_group().Translate_ranks(None, mpi.COMM_WORLD.Get_group())
    return [rank for rank in everyone if rank != mpi.UNDEFINED]


def _duplicate(original: MPI.Comm, wait: Wait) -> Any:
    """A duplicate of a communicator. Collective."""
    comm, request = original.Idup()
    while not request.Test():
        complaint = wait.complaint()
        if complaint is not None:
            # MPI may still write the new communicator into this memory: never free it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((comm, request)))
            raise CommTimeout(complaint)
        time.sleep(_POLL_S)
    return comm
