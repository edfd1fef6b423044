"""Connecting the ranks of a job: `connect()`.

A process started by mpirun, srun or another launcher with PMI joins the world of MPI. Any other process is a
world of one rank, which needs no MPI. Under torchrun, `bagua_torch.connect` brings a transport. A process that
was started as one of many never becomes a world of one rank by mistake; see `launchers`.

If every rank has a GPU, a second transport moves device arrays; see `gpu`. Under MPI, the exit handler of
`rank_exit` keeps the other ranks from waiting for a rank that has ended.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from .. import cuda
from .._version import __version__
from ..arrays import OpOrder
from ..comm import Communicator
from ..errors import BootstrapError
from ..flight.recorder import FlightRecorder, default_folder, forget_old_jobs
from ..logs import log_world
from ..net.choosing import Net
from ..processes import this_host
from ..trace import NULL, Recorder, listen
from ..transports import LocalTransport, Transport, base
from .environment import job, under_mpi
from .gpu import GPU, choose_net, connect_device
from .mpi_start import mpi_world, new_name
from .rank_exit import ExitHandler
from .world import World, default_or, refuse_a_second_world, set_default

if TYPE_CHECKING:
    from mpi4py import MPI

TIMEOUT_S = 300.0
"""The default time limit of a call that waits for other ranks."""

_log = logging.getLogger(__name__)


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
    exit_handler: ExitHandler | None = None
    if transport is not None:
        facts = Communicator([transport], tracer=NULL).allgather_object((this_host(), new_name()))
        machines, name = [machine for machine, _ in facts], facts[0][1]
    elif not alone and (comm is not None or under_mpi()):
        transport, machines, name, exit_handler = mpi_world(timeout_s, comm)
    else:
        transport = LocalTransport(timeout_s=timeout_s)
    flight = _flight_recorder(transport, name, record)
    return open_world(
        transport,
        machines,
        exit_handler=exit_handler,
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
    exit_handler: ExitHandler | None = None,
    node: str | int | None = None,
    gpu: GPU = "auto",
    net: Net | None = None,
    check: bool = False,
    trace: bool = True,
    flight: FlightRecorder | None = None,
    op_order: OpOrder = "rank",
) -> Communicator:
    """Make a communicator over `transport` and, with GPUs, over one for device arrays; it becomes the default.

    Collective.

    Args:
        transport: The transport for host arrays.
        machines: A label for the host of each rank.
        exit_handler: Leaves the world at the end of the program; None if nothing does.
        node: See `connect`.
        gpu: See `connect`.
        net: See `connect`.
        check: See `connect`.
        trace: See `connect`.
        flight: The flight recorder; if None, a new one, which writes if the job has a name.
        op_order: See `connect`.

    Raises:
        BootstrapError: `op_order` differs between ranks, or `gpu` or `net` cannot be set up; on all ranks alike.
    """
    setup = Communicator([transport], nodes=machines, tracer=NULL)
    _check_order(setup.allgather_object(op_order))
    nodes = machines if node is None else setup.allgather_object(node)
    choose_net(setup, net)
    device, beside = connect_device(setup, gpu)
    world = World(
        [transport, *beside],
        nodes=nodes,
        device=device,
        check=check,
        tracer=Recorder() if trace else NULL,
        op_order=op_order,
        exit_handler=exit_handler,
    )
    world.flight = flight or _flight_recorder(transport, job().name)
    if os.environ.get("BAGUA_NVTX", "") not in ("", "0"):
        listen(cuda.NvtxRanges())
    log_world(_log, world, nodes, version=__version__)
    set_default(world)
    return world


def default() -> Communicator:
    """Return the communicator that `connect` made last; connect if there is none.

    Collective, if it connects.
    """
    return default_or(connect)


def check_timeout(timeout_s: object) -> None:
    """Raise `BootstrapError` unless `timeout_s` is a valid time limit of calls."""
    base.check_timeout("connect", timeout_s)


def _check_order(orders: Sequence[OpOrder]) -> None:
    """Raise `BootstrapError` unless all ranks give the same order of reductions."""
    if len(set(orders)) > 1:
        ranks = {
            order: [rank for rank, each in enumerate(orders) if each == order] for order in get_args(OpOrder)
        }
        raise BootstrapError(
            "connect: op_order differs between ranks: "
            + "; ".join(f"ranks {members} give {order!r}" for order, members in ranks.items())
            + "; give the same on all"
        )


def _flight_recorder(transport: Transport, job: str, record: str | Path | None = None) -> FlightRecorder:
    """A flight recorder for a new world, which writes to a folder named `job`; without a name, to none."""
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
    """Raise `BootstrapError` if these arguments of `connect` exclude each other, or a world is open already."""
    choices = {"alone=True": alone, "comm=": comm is not None, "transport=": transport is not None}
    given = [name for name, is_given in choices.items() if is_given]
    if len(given) > 1:
        raise BootstrapError(f"connect: {' and '.join(given)} exclude each other; give one of them")
    if comm is None and transport is None:
        refuse_a_second_world()
