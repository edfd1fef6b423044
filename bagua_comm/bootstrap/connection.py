"""Setting up the world: `connect()`. Environment variables are read here.

A process started by mpirun (or srun, or whatever speaks PMI) joins the MPI world; any other is a world
of one rank, and needs no MPI. A process started by torchrun calls `bagua_torch.connect`, which brings a
transport. A process that was started as one of many (`launchers` tells) never becomes a world of one by mistake.

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
import logging
import os
import secrets
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
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, get_args

from .. import cuda
from ..arrays import OpOrder
from ..comm import Communicator
from ..cuda import STREAMS_PER_THREAD, has_streams_per_thread
from ..errors import BaguaError, BootstrapError, CommError, CommTimeout, RankFailed
from ..files import private_folder
from ..flight import explain
from ..flight.recorder import FlightRecorder, default_folder, forget_old_jobs
from ..logs import tell, tell_world
from ..net import choosing
from ..net.choosing import Net
from ..processes import mapped_files, slurm_step, this_host
from ..topology import hosts
from ..trace import NULL, Recorder, listen
from ..transports import LocalTransport, Transport, base
from . import launchers
from . import tcp_links as links
from .gpu_facts import GpuFacts, nccl_obstacle
from .job import Job
from .rendezvous import LOOK_S, Limit, Roll, Wait

if TYPE_CHECKING:
    from mpi4py import MPI


class _Fails(Protocol):
    def fail(self, reason: str) -> None:
        """Tell the others that the program has failed here."""


F = TypeVar("F", bound=_Fails)
T = TypeVar("T")

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

LAST_S = 10.0
"""How long MPI_Finalize may take where ranks may have died; then the process ends without it."""

TURN_S, LAST_TURN_S = 0.3, 3.0
"""Ranks that may have the same error report it in turn: each this much later than the one before it, and at most
the second number later than rank 0."""

RECORDS_S = 1.0
"""How long the rank that reports an error waits, at most, for the other ranks to write what they did last."""

_NAP_S = 0.001
"""How long `connect` sleeps between two looks at whether its peers have come."""

_log = logging.getLogger(__name__)

_nccl_started_with: dict[str, str | None] | None = None
"""The variables by which NCCL chose its network in this process; None if this library has not started it."""

_default: Communicator | None = None
_unasked: Communicator | None = None
"""The communicator that `default` made, if it made one."""


def connect(
    *,
    timeout_s: float = TIMEOUT_S,
    check: bool = False,
    trace: bool = True,
    node: str | int | None = None,
    alone: bool = False,
    comm: MPI.Comm | None = None,
    transport: Transport | None = None,
    gpu: GPU = "auto",
    net: Net | None = None,
    record: str | Path | None = None,
    op_order: OpOrder = "rank",
) -> Communicator:
    """Join the world: all ranks that mpirun started, or one rank if no launcher started this process.

    Collective. The result is also the default communicator, until it is closed. Until then a second `connect`
    raises an error, unless `comm` or `transport` says which world to make: `default` returns the open one, and
    `Communicator.dup` makes another communicator of the same ranks. Where `default` itself has connected, no
    program has asked for that communicator, and `connect` takes its place.

    A process that a launcher started as one of many, but that finds itself alone, or among too few, gets an error
    which says what to do; its launcher and MPI do not understand each other.

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

    The logger "bagua_comm" says at INFO what was chosen. With BAGUA_NVTX=1 and CuPy, calls are NVTX ranges.

    Args:
        timeout_s: How long a call may wait for its peers before it raises `CommTimeout`, in seconds: above 0, at
            most 1e9, and not infinite.
        check: Compare every call among the ranks first, messages between two ranks included, and raise a
            `CommMismatch` that names both calls if they differ.
        trace: Keep the latest spans, for `Communicator.trace`.
        node: A label for this rank's node. By default ranks on one host share a node: those whose host has the
            same name and was started at the same time, or that share memory, as MPI says. Give labels to try out
            `Hierarchical` on one machine.
        alone: Be a world of one rank, whatever started this process, and without MPI.
        comm: Make the ranks of this communicator of mpi4py the world, instead of all that mpirun started. Its
            ranks call this; it is duplicated, and remains the caller's. Ranks outside need not connect, or may do
            so with a communicator of their own. They belong to the same job: an exception that nobody catches
            ends them, too, and messages about the end of a rank count ranks in MPI's world.
        transport: Use this transport instead of looking for a world; its ranks share a node if they share a host.
        gpu: What carries device arrays. "auto": NCCL where it is possible, else copies through host memory, with
            a warning that says why; nothing if a rank has no CUDA device. "nccl" or "staged" (through host
            memory): this one, or an error. "none": nothing, and CuPy is not imported.
        net: What NCCL sends with between hosts, in this library and in PyTorch. "bagua": this library's plugin,
            which uses many TCP connections; it is built once on each host, and needs a C compiler there. "auto":
            the plugin if there are several hosts, all can build it, none has InfiniBand, and no variable asks for
            something else; else NCCL's own. "nccl": NCCL's own network. It is settled by NCCL_NET_PLUGIN and
            NCCL_NET, which this sets, on all ranks alike. If None, what BAGUA_NET says, which `run --net` sets;
            without it, these variables stay as they are. On one host NCCL uses shared memory, whatever this is.
        record: A folder. When a call fails, each rank writes what it did last to a file there, in a folder of
            this job's, for `python -m bagua_comm diagnose`. If None, the folder that BAGUA_FLIGHT_FOLDER names,
            else one of this user's under the folder of temporary files, on each host.
        op_order: "rank": floats are added in the order of the ranks, and a run repeats its bits. "any": host
            arrays are reduced by MPI's own calls where it can; see `Communicator.op_order`. The same on all
            ranks.

    Raises:
        BootstrapError: A launcher started this process, but the world cannot be set up, or has too few ranks; or
            what `gpu` or `net` asks for cannot be set up, on all ranks alike; or an argument is not what it
            should be; or the communicator that was made last is open.
        CommTimeout: MPI had started on all ranks, but one did not come in time.
        RankFailed: A rank died meanwhile, and mpirun let the others go on.

    >>> with connect() as comm:
    ...     comm.rank, comm.size
    (0, 1)
    """
    check_timeout(timeout_s)
    for name_of, value, choices in (("gpu", gpu, get_args(GPU)), ("op_order", op_order, get_args(OpOrder))):
        if value not in choices:
            raise BootstrapError(f"connect: {name_of} is {value!r}, expected one of {', '.join(choices)}")
    _check_choice(alone=alone, comm=comm, transport=transport)
    machines: Sequence[object] = [0]
    name = ""
    ending: _Ending | None = None
    if transport is not None:
        facts = Communicator([transport], tracer=NULL).allgather_object((this_host(), _new_name()))
        machines, name = [machine for machine, _ in facts], facts[0][1]
    elif not alone and (comm is not None or _under_mpi()):
        transport, machines, name, ending = _mpi_world(timeout_s, comm)
    else:
        transport = LocalTransport(timeout_s=timeout_s)
    flight = _flight_recorder(transport, name, record)
    return open_world(
        transport,
        machines,
        ending=ending,
        node=node,
        gpu=gpu,
        net=net,
        check=check,
        trace=trace,
        flight=flight,
        op_order=op_order,
    )


def open_world(
    transport: Transport,
    machines: Sequence[object],
    *,
    ending: _Ending | None = None,
    node: str | int | None = None,
    gpu: GPU = "auto",
    net: Net | None = None,
    check: bool = False,
    trace: bool = True,
    flight: FlightRecorder | None = None,
    op_order: OpOrder = "rank",
) -> Communicator:
    """A communicator over `transport`, and over one for device arrays; it is the default until it is closed.

    Collective.

    Args:
        transport: Moves host arrays.
        machines: A label for the machine of every rank.
        ending: What ends this process, if the world is to be left then.
        node: See `connect`; so are the others.
        gpu: What carries device arrays.
        net: What NCCL sends with between hosts.
        check: Compare every call among the ranks.
        trace: Keep the latest spans.
        flight: Its flight recorder; if None, a new one, which writes if the job has a name.
        op_order: The order of reductions.

    Raises:
        BootstrapError: `op_order` is not the same on all ranks; on all of them alike.
    """
    global _default
    setup = Communicator([transport], nodes=machines, tracer=NULL)
    _check_order(setup.allgather_object(op_order))
    nodes = machines if node is None else setup.allgather_object(node)
    _choose_net(setup, net)
    device, beside = _device_side(setup, gpu)
    world = _World(
        [transport, *beside],
        nodes=nodes,
        device=device,
        check=check,
        tracer=Recorder() if trace else NULL,
        op_order=op_order,
        ending=ending,
    )
    world.flight = flight or _flight_recorder(transport, job().name)
    if os.environ.get("BAGUA_NVTX", "") not in ("", "0"):
        listen(cuda.NvtxRanges())
    tell_world(_log, world, nodes)
    _default = world
    return world


def _check_order(orders: Sequence[OpOrder]) -> None:
    """Raise unless all ranks give the same order of reductions."""
    if len(set(orders)) > 1:
        ranks = {
            order: [rank for rank, each in enumerate(orders) if each == order] for order in get_args(OpOrder)
        }
        raise BootstrapError(
            "connect: op_order differs between ranks: "
            + "; ".join(f"ranks {members} give {order!r}" for order, members in ranks.items())
            + "; give the same on all"
        )


def _new_name() -> str:
    """A name for the folder of this job's records, if this is rank 0; no other job has it."""
    return time.strftime(f"%Y%m%d-%H%M%S-{secrets.token_hex(3)}")


def _flight_recorder(transport: Transport, job: str, record: str | Path | None = None) -> FlightRecorder:
    """The flight recorder of a new world, which writes to a folder called `job`; nowhere without a name."""
    rank, size = transport.rank, transport.size
    if size == 1 or not job:
        return FlightRecorder(rank, size)
    given = record or os.environ.get("BAGUA_FLIGHT_FOLDER")
    if given:
        return FlightRecorder(rank, size, folder=Path(given) / job, job=job)
    folder = default_folder()
    if folder is not None:
        forget_old_jobs(folder)
    return FlightRecorder(rank, size, folder=folder and folder / job, job=job)


def _check_choice(*, alone: bool, comm: MPI.Comm | None, transport: Transport | None) -> None:
    """Raise unless these arguments of `connect` go together, and it may make a world now."""
    choices = {"alone=True": alone, "comm=": comm is not None, "transport=": transport is not None}
    given = [name for name, is_given in choices.items() if is_given]
    if len(given) > 1:
        raise BootstrapError(f"connect: {' and '.join(given)} exclude each other; give one of them")
    if comm is None and transport is None:
        refuse_a_second_world()


def refuse_a_second_world() -> None:
    """Raise `BootstrapError` if the communicator that `connect` made last is open."""
    if _default is not None and _default.guard.is_of_this_process and _default is not _unasked:
        raise BootstrapError(
            "connect: this process is connected already. bagua_comm.default() returns the communicator, and its "
            "dup() makes another one of the same ranks; close() it, or leave its `with` block, to connect anew. "
            "connect(comm=mpi4py.MPI.COMM_WORLD) makes another world with other settings"
        )


def default() -> Communicator:
    """The communicator that `connect` made last; connects if there is none.

    Collective, if it connects.
    """
    return _default if _default is not None else connected_by_default(connect)


def connected_by_default(connect: Callable[[], Communicator]) -> Communicator:
    """The result of `connect`, which no program has asked for, so that a later `connect` may take its place.

    Collective.
    """
    global _unasked
    _unasked = connect()
    return _unasked


def current() -> Communicator | None:
    """The communicator that `connect` made last, unless it is closed."""
    return _default


def job() -> Job:
    """The job that this process belongs to, as its environment variables tell; see `job.Job`.

    Raises:
        BootstrapError: One of the variables holds no number.
    """
    return Job.of(os.environ)


def variables_of_the_job() -> dict[str, str]:
    """This process's environment variables, without those that a launcher has given to this process alone."""
    own = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "BAGUA_RECRUITER", "PWD", "OLDPWD"}
    prefixes = ("OMPI_", "PMIX_", "PMI_", "PRTE_")
    return {
        name: value for name, value in os.environ.items() if name not in own and not name.startswith(prefixes)
    }


def code_of_a_process(source: str) -> str:
    """The code of a process that gives its variables to `main` of `source`, which needs Python's own modules."""
    own = "import os, sys; sys.path[:] = filter(None, sys.path)"  # the current folder may hold their names
    return f"{own}\n{source}\nmain(dict(os.environ))\n"


def check_timeout(timeout_s: object) -> None:
    """Raise `BootstrapError` unless `timeout_s` is a time that calls can wait."""
    base.check_timeout("connect", timeout_s)


def under_torchrun() -> bool:
    """Whether torchrun started this process; see `launchers.under_torchrun`."""
    return launchers.under_torchrun(os.environ)


def torchrun_local_rank() -> int:
    """The number that torchrun gave this process on its machine; 0 if none.

    Raises:
        BootstrapError: LOCAL_RANK is not a number.
    """
    return _number_from_torchrun("LOCAL_RANK")


def where_torchrun_meets() -> dict[str, str]:
    """The environment variables by which processes that torchrun started find each other; so may any others."""
    names = "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"
    return {name: os.environ[name] for name in names if name in os.environ}


def keep_gloo_on_this_host() -> None:
    """Have gloo listen on 127.0.0.1, unless the user has chosen an interface."""
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def torchrun_restarts() -> int:
    """How often torchrun starts its processes again, at most, when one of them dies; 0 without torchrun.

    Raises:
        BootstrapError: TORCHELASTIC_MAX_RESTARTS is not a number.
    """
    return _number_from_torchrun("TORCHELASTIC_MAX_RESTARTS")


def _number_from_torchrun(name: str) -> int:
    if name not in os.environ:
        return 0
    return launchers.checked_number(os.environ, name, "a number from 0 on", 0)


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
        survivors = super().shrink()
        if self._ending is not None and self in self._ending.worlds:
            self._ending.worlds.remove(self)
        if _default is self:
            _default = survivors
        return survivors

    def _survivors(self, transports: Sequence[Transport], **settings: Any) -> Communicator:
        return _World(transports, ending=self._ending, **settings)

    def close(self) -> None:
        """Free what this communicator holds. Collective."""
        global _default
        if self.guard.closed or not self.guard.is_of_this_process:
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
    """Whether this process is to join a world of MPI.

    Raises:
        BootstrapError: Others were started with it, but it can join no world of theirs.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.Get_size() > 1:
        return True
    variables = _own_variables()
    launch = launchers.find(variables)
    if launch is not None and launch.launcher in (launchers.ELASTIC, launchers.TORCHRUN):
        if under_torchrun() and launch.is_one_of_many:
            raise BootstrapError(
                "connect: torchrun started this process, and torchrun sets up no MPI world; call "
                "bagua_torch.connect() instead, or start the program with mpirun -n N python script.py, or with "
                "python -m bagua_comm run -n N script.py"
            )
        return False
    # Slurm's own PMI sets no variables: MPI itself finds out whether there are others.
    return any(name in variables for name in MPI_VARIABLES) or (launch is not None and launch.is_one_of_many)


def _own_variables() -> dict[str, str]:
    """The environment variables that tell how this process itself was started."""
    return launchers.own(os.environ, slurm_step())


def _mpi_world(timeout_s: float, comm: MPI.Comm | None) -> tuple[Transport, list[int], str, _Ending]:
    """The world of the ranks of `comm`, or of all that were started, and the name of its records. Collective."""
    ending, roll = _start_mpi(timeout_s, comm)
    from mpi4py import MPI

    from ..transports.mpi import MPITransport
    from ..transports.mpi.world import first_beside

    def gather_ranks() -> tuple[MPITransport, list[tuple[int, str, str]]]:
        duplicate = _duplicate(comm or MPI.COMM_WORLD, Wait(roll, timeout_s))
        first = first_beside(duplicate)
        transport = MPITransport(duplicate, timeout_s=timeout_s)
        facts = Communicator([transport], tracer=NULL).allgather_object((first, this_host(), _new_name()))
        return transport, facts

    try:
        transport, facts = ending.limit(Wait(roll, timeout_s + LOOK_S), gather_ranks)
    except CommTimeout:
        raise
    except (MPI.Exception, CommError) as exc:
        raise _lost_at_the_start(roll, exc) from exc
    # The label of a node is the number of its first rank.
    firsts, machines, names = zip(*facts, strict=True)
    return transport, hosts(firsts, machines), names[0], ending


def _lost_at_the_start(roll: Roll, error: Exception) -> RankFailed:
    """With ULFM: a rank died while MPI started, or just after. MPI's error does not always name it."""
    return RankFailed(f"connect: {roll.me()} lost another rank: {roll.missing()} ({error})")


def starts_a_fleet() -> bool:
    """Whether this process was started with others that go on when one of them dies: by mpirun --with-ft ulfm."""
    return _under_mpi() and _has_ulfm()


def start_fleet(timeout_s: float, first: Callable[[], F]) -> F:
    """Start MPI, and return the result of `first`, which all processes call once it has started.

    Collective. If a process does not come in time, one prints a message that names it, and the job ends.

    Raises:
        BootstrapError: The world cannot be set up; see `connect`.
        RankFailed: A process died before the others could go on without it.
    """
    ending, roll = _start_mpi(timeout_s, None)
    try:
        # A newcomer waits for as long as the others train; see `elastic.recruits`.
        fleet = first() if job().recruiter else ending.limit(Wait(roll, timeout_s + LOOK_S), first)
    except CommError as exc:
        raise _lost_at_the_start(roll, exc) from exc
    ending.tell_failure = fleet.fail
    return fleet


def ends_with(everyone: MPI.Comm) -> None:
    """An error of this process that nobody catches ends all in this communicator, and not MPI's world alone."""
    _this_process().everyone = everyone


def _start_mpi(timeout_s: float, comm: MPI.Comm | None) -> tuple[_Ending, Roll]:
    """Start MPI, unless it runs, and check that it has found all ranks of the job. Collective."""
    _set_up_mpi()
    ending = _this_process()
    if ending.process != os.getpid():
        raise BootstrapError(
            f"connect: this process was forked from process {ending.process}, which is a rank; a forked child "
            "cannot be a rank: start ranks with mpirun"
        )
    variables = _own_variables()
    roll = Roll(variables, None if comm is None else _members(comm))
    roll.sign()
    launch = launchers.find(variables)
    try:
        ending.start_mpi(roll, timeout_s)
    except (ImportError, RuntimeError) as exc:
        raise BootstrapError(_why_there_is_no_mpi(launch, exc)) from exc
    from mpi4py import MPI

    if comm is None and launch is not None:
        complaint = launchers.complaint(launch, MPI.COMM_WORLD.Get_size(), _name_of(MPI))
        if complaint:
            raise BootstrapError(complaint)
    return ending, roll


def _set_up_mpi() -> None:
    """Set the environment variables that MPI reads when it starts, unless the user has set them.

    Raises:
        BootstrapError: There can be no connections of the kind that the user has asked for.
    """
    count, others = _number_of_links(), _ranks_elsewhere()
    complaint = links.complaint(count, others) if count > 1 else None
    if complaint is not None:
        raise BootstrapError(f"connect: {complaint}")
    for name, value in {**MPI_SETTINGS, **links.equal_links(count if others else 1)}.items():
        os.environ.setdefault(name, value)


def _number_of_links() -> int:
    """How many TCP connections Open MPI was told to make between two ranks."""
    text = os.environ.get(links.VARIABLE, "")
    return max(1, int(text)) if text.isdecimal() else 1


def _ranks_elsewhere() -> int:
    """How many ranks Open MPI has started on other hosts; 0 also if that is not known."""
    sizes = [os.environ.get(f"OMPI_COMM_WORLD_{which}", "") for which in ("SIZE", "LOCAL_SIZE")]
    whole, here = (int(text) if text.isdecimal() else 0 for text in sizes)
    return max(0, whole - here) if here else 0


def _why_there_is_no_mpi(launch: launchers.Launch | None, error: Exception) -> str:
    if launch is not None and importlib.util.find_spec("mpi4py") is None:
        complaint = launchers.complaint(launch, 1, "")
        if complaint:
            return complaint
    who = "mpirun" if launch is None else launch.launcher.name
    return (
        f"connect: {who} started this process, but mpi4py cannot load an MPI library: {error}; pip install "
        "'bagua-comm[mpi]' brings one, or, at a site with an MPI of its own, "
        f"{launchers.BUILD.format('that')}"
    )


def _name_of(mpi: Any) -> str:
    """The name and version of an MPI library, as "Open MPI 5.0.11"."""
    name, version = mpi.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def _members(comm: Any) -> list[int]:
    """The ranks in MPI's world of a communicator's ranks.

    Raises:
        BootstrapError: `comm` is none that can be a world.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(comm, mpi.Comm):
        raise BootstrapError(
            f"connect: comm is of type {type(comm).__name__}, expected a communicator of mpi4py (mpi4py.MPI.Comm)"
        )
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


def _duplicate(original: Any, wait: Wait) -> Any:
    """A duplicate of a communicator. Collective."""
    comm, request = original.Idup()
    while not request.Test():
        complaint = wait.complaint()
        if complaint is not None:
            # MPI may still write the new communicator into this memory: never free it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((comm, request)))
            raise CommTimeout(complaint)
        time.sleep(_NAP_S)
    return comm


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
        self.everyone: MPI.Comm | None = None
        """All processes of the job, if others than those of MPI's world belong to it."""
        self._job = job()
        self._rank = 0
        self._orderly = True
        """Whether all ranks have left, without an error, each world that this rank has left."""
        self._roll = Roll(_own_variables())
        self._timeout_s = TIMEOUT_S
        self._mpi: Any = None
        self._library: Any = None
        """MPI's C interface, if this library started MPI and must end it."""
        self._hook: Callable[..., Any] = sys.__excepthook__
        self._thread_hook: Callable[..., Any] = threading.__excepthook__
        self._hooked_in = False
        self._failure = "an error"
        """Why all ranks end, in words."""
        self.tell_failure: Callable[[str], None] | None = None
        """Tells the others of a fleet, which may survive MPI_Abort."""
        self._earlier_error = _last_error()

    def start_mpi(self, roll: Roll, timeout_s: float) -> None:
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

            def begin_mpi() -> Any:
                library = _initialize(MPI)
                if _number_of_links() > 1 and _ranks_elsewhere():
                    links.open_in_order(MPI.COMM_WORLD, _number_of_links(), _NAP_S)
                return library

            library = self.limit(Wait(roll, timeout_s), begin_mpi)
            self._library = library if ours else None
        if not self._hooked_in:
            self._job.prepare()
            self._rank = MPI.COMM_WORLD.Get_rank()
            shared = mapped_files("/dev/shm/") if self._job.folder is not None else []
            self._job.record("start", rank=self._rank, size=MPI.COMM_WORLD.Get_size(), shared=shared)
        self._hook_in()

    def limit(self, wait: Wait, body: Callable[[], T]) -> T:
        """Return `body()`; meanwhile, end all ranks with a message once `wait` has lasted too long."""
        return Limit(wait.complaint, self.give_up).run(body)

    def give_up(self, message: str) -> None:
        """Print a message, unless another rank has, and end all ranks."""
        self._wait_for_turn()
        self._print_once(message)
        self._failure = message
        self._end_all(1)

    def _is_alone(self) -> bool:
        """Whether the job is this process, as far as MPI knows."""
        alone: bool = (self.everyone or self._mpi.COMM_WORLD).Get_size() == 1
        return alone

    def _name(self) -> str:
        """This rank, as messages call it; its launcher may know of ranks that MPI does not find."""
        world = self.everyone or self._mpi.COMM_WORLD
        return self._roll.name() if self._is_alone() else f"rank {world.Get_rank()} of {world.Get_size()}"

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
        if self.tell_failure is not None:
            with suppress(Exception):
                self.tell_failure(self._failure)
        mpi = self._mpi
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and not self._is_alone():
            (self.everyone or mpi.COMM_WORLD).Abort(exit_code)
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
        """Record an error. Print one of this library briefly and once, and any other by `show`."""
        self._record_error(error)
        who = self._name()
        if isinstance(error, BaguaError) and is_default and os.environ.get("BAGUA_TRACEBACK", "") in ("", "0"):
            self._wait_for_turn()
            self._print_once(
                f"{who} on {socket.gethostname()}: {type(error).__name__}: {error}\n{_where(trace)}"
                f"{self._explanation(error)}  (BAGUA_TRACEBACK=1 shows the traceback)"
            )
            return
        self._write_down(f"{type(error).__name__}: {error}")
        print(f"{who}:", file=sys.stderr, flush=True)
        show()

    def _explanation(self, error: BaseException) -> str:
        """What the ranks' records say of the error; nothing if it does not come from a call."""
        if not isinstance(error, CommError):
            self._write_down(f"{type(error).__name__}: {error}")
            return ""
        texts = [explain(world.flight, RECORDS_S) for world in self.worlds[-1:]]
        return "".join(f"  {line}\n" for text in texts for line in text.splitlines())

    def _write_down(self, reason: str) -> None:
        """Write what this rank did last, which leaves because of an error that is none of a call's."""
        for world in self.worlds[-1:]:
            world.flight.write(left=reason)

    def _record_error(self, error: BaseException) -> None:
        chain: list[BaseException] = []
        each: BaseException | None = error
        while each is not None and each not in chain:
            chain.append(each)
            each = each.__cause__ or each.__context__
        due_to_others = any(isinstance(each, CommError) for each in chain)
        facts = {"error": type(error).__name__, "text": str(error)[:500], "due_to_others": due_to_others}
        self._failure = f"{type(error).__name__}: {error}"
        self._job.record("error", rank=self._rank, **facts)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """End this process as if nobody had handled the signal, and its children with it."""
        for world in self.worlds[-1:]:
            world.flight.write()  # often mpirun has sent it, because another rank failed
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
        if os.getpid() != self.process:
            return
        error = _last_error()
        failed = error is not None and error is not self._earlier_error and sys.excepthook != self._on_exception
        if error is not None and failed:
            self._record_error(error)
        else:
            self._job.record("exit", rank=self._rank)
        if self._mpi.Is_finalized():
            return
        if error is not None and failed:
            # Another hook has printed it without calling ours.
            print(
                f"{self._name()} ended with {type(error).__name__}, and all ranks with it",
                file=sys.stderr,
                flush=True,
            )
            self._end_all(1)
        start_s = time.monotonic()
        for world in list(self.worlds):
            with suppress(CommError):
                self.leave(world)
        from ..transports.mpi.time_limit import BlockedCall

        if any(isinstance(thread, BlockedCall) for thread in threading.enumerate()):
            # A call that timed out still waits inside MPI, which cannot end before it returns.
            self._print_once(
                f"{self._roll.me()} ended while a call of MPI waits for another rank, so all ranks end"
            )
            self._end_all(1)
        self._forget_sigterm()  # Python calls no signal handler while MPI ends
        if _has_ulfm():
            # Once a rank has died, MPI_Finalize may hang, and so may MPI's destructors. mpirun requires neither.
            if self._library is None:  # the user's mpi4py would call it, and wait for ever
                self._finalize_within(ctypes.CDLL(self._mpi.__file__), LAST_S)
            _end_without_destructors()
            return
        if self._library is None:
            return
        if self._orderly:
            self._library.MPI_Finalize()
        elif time.monotonic() - start_s >= self._timeout_s:
            # The others may compute for as long as they like, but the user should know who is waited for.
            print(self._roll.remark(self._timeout_s), file=sys.stderr, flush=True)
            self._library.MPI_Finalize()
        else:
            self._finalize_within(self._library, self._timeout_s)

    def leave(self, world: _World) -> None:
        """Leave a world, and let the other ranks know. Collective."""
        self.worlds.remove(world)
        if self._mpi.Is_finalized():
            return
        orderly, self._orderly = self._orderly, False
        for transport in world.transports:
            orderly &= transport.leave()
        self._orderly = orderly
        if not orderly:
            world.flight.write(left="its program ended, or it closed its communicator")

    def _finalize_within(self, library: Any, limit_s: float) -> None:
        """End MPI, which may hang after an error; then this process ends without it."""
        message = (
            f"{self._roll.me()}: MPI did not end within {limit_s:g} s after a rank or a call had failed; "
            "this process ends without it"
        )
        deadline_s = time.monotonic() + limit_s
        limit = Limit(lambda: message if time.monotonic() > deadline_s else None, self.give_up)
        try:
            limit.start()
        except RuntimeError:  # from Python 3.12 on, no thread can be started at this point
            faulthandler.dump_traceback_later(limit_s, exit=True)
        library.MPI_Finalize()


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


def _end_without_destructors() -> None:
    """Have the process end as soon as Python has, with its exit code: no library's destructors run."""
    with suppress(AttributeError, OSError):  # not every C library has on_exit
        library = ctypes.CDLL(None)
        library.on_exit(library._exit, None)
        library.fflush(None)


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


def _choose_net(setup: Communicator, net: str | None) -> None:
    """Set the variables by which NCCL chooses its network, if somebody asks for one. Collective."""
    choice = choosing.agree(setup.allgather_object(choosing.asked_for(net)))
    if choice is None:
        return
    host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    several_hosts = len(set(setup.allgather_object(host))) > 1
    # The first rank of each host compiles, and the others find what it has made.
    mine = (
        None if setup.local_rank else choosing.look(choice, host, _nccl_started_with, several_hosts=several_hosts)
    )
    setup.barrier()
    mine = mine or choosing.look(choice, host, _nccl_started_with, several_hosts=several_hosts)
    gathered: list[Any] = setup.allgather_object(tuple(mine))
    everyone = [choosing.Facts(*facts) for facts in gathered]
    decision = choosing.decide(choice, everyone, setup.rank)
    choosing.apply(decision)
    tell(_log, setup.rank, "net %s: %s", choice, decision.why)


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
    for rank, each in enumerate(gpus):
        if each.broken:
            raise BootstrapError(f"connect: rank {rank} cannot use its GPU: {each.broken}; {_OTHER_GPU}")
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
            made, obstacle = _on_all_ranks(setup, lambda: _connect_nccl(host))
            if made is not None:
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
    from ..transports.staged import StagedTransport

    made, failure = _on_all_ranks(setup, lambda: StagedTransport(host.dup()))
    if made is None:
        raise BootstrapError(f"connect: {failure}; {_OTHER_GPU}")
    return device, [made]


_OTHER_GPU = "free it, hide it by CUDA_VISIBLE_DEVICES, or pass gpu='none'"
"""What to do if a GPU cannot be used."""


def _on_all_ranks(setup: Communicator, make: Callable[[], Transport]) -> tuple[Transport | None, str | None]:
    """What `make` gives, if it gives something on all ranks; else None, and why not. Collective."""
    made, failure = None, None
    try:
        made = make()
    except CommError as exc:  # it names the rank
        failure = str(exc)
    except RuntimeError as exc:  # of CUDA
        failure = f"rank {setup.rank} cannot use its GPU: {exc}"
    failure = next((text for text in setup.allgather_object(failure) if text), None)
    return (made, None) if failure is None else (None, failure)


def my_gpu(device: int | None) -> GpuFacts:
    """The facts about this process and its device, which becomes the current one."""
    bus_id, uuid, version, problem, broken = None, "", 0, "", ""
    if device is not None:
        try:
            cuda.use_device(device)
            bus_id = cuda.bus_id(device)
            from ..transports.nccl import transport as nccl

            version, uuid = nccl.version(), cuda.uuid(device)
        except (ImportError, CommError) as exc:
            problem = str(exc)
        except RuntimeError as exc:  # of CUDA
            broken = f"device {device}: {exc}"
    machine = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return GpuFacts(machine, bus_id, uuid, version, problem, shares, broken)


def _connect_nccl(host: Transport) -> Transport:
    """The transport over NCCL. Collective."""
    global _nccl_started_with
    from ..transports.nccl import NcclTransport

    if _nccl_started_with is None:
        _nccl_started_with = choosing.current()
    return NcclTransport.connect(host)
