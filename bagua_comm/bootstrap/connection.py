"""Connecting the ranks of a job: `connect()`.

A process started by mpirun, srun or another launcher with PMI joins the world of MPI. Any other process is a
world of one rank, which needs no MPI. Under torchrun, `bagua_torch.connect` brings a transport. A process that
was started as one of many never becomes a world of one rank by mistake; see `launchers`.

If every rank has a GPU, a second transport moves device arrays; see `gpu`. Under MPI, the exit handler of
`rank_exit` keeps the other ranks from waiting for a rank that has ended.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from .._version import __version__
from ..arrays import OpOrder
from ..comm import Communicator
from ..errors import BootstrapError
from ..execution import cuda
from ..flight.entries import LEFT_WELL
from ..flight.recorder import JOBS, FlightRecorder, default_folder
from ..flight.requests import answer_requests
from ..live import writer as live
from ..logs import log_world
from ..net.choosing import Net
from ..system.files import keep_latest
from ..system.processes import ProcessId, this_host
from ..topology import ranks_by
from ..trace import NULL, Recorder, listen
from ..transports import LocalTransport, Transport, call_state
from .environment import job, number_from_torchrun, torchrun_job, under_mpi
from .gpu import GPU, choose_net, connect_device
from .mpi_start import mpi_world, new_name
from .rank_exit import ExitHandler
from .rank_exit import exit_handler as handler_of_this_process
from .world import World, current, default_or, refuse_a_second_world, set_default

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

    Collective. The result is the default communicator until it is closed. Until then, a second `connect` raises
    an error, unless `comm` or `transport` names another world: `default` returns the open communicator, and
    `Communicator.dup` makes another one of the same ranks. A communicator that `default` itself has made does not
    count: `connect` replaces it.

    A process that was started as one of many, but finds no other ranks, or too few, gets an error with advice:
    its launcher and its MPI do not match.

    Under MPI, `timeout_s` limits the start of MPI as well. If a rank does not come in time, one rank prints a
    message that names it, and the job ends with exit code 1.

    Under MPI, an uncaught exception ends all ranks, with exit code 1: any exception in the main thread of a rank;
    in another thread, an exception of this library, of a thread that is not a daemon, or of code that refers to a
    communicator. One rank prints an exception of this library, as a short message with the line of the program
    where it was raised; BAGUA_TRACEBACK=1 shows the whole traceback. Any other exception is printed at once, with
    its traceback. SIGTERM ends a rank and its child processes, unless the program handles it. A rank that ends
    with an open communicator leaves it: ranks that wait for it get an error. If it has tasks of lanes or requests
    that failed or have not ended, and whose results nobody has asked for, it names them and ends with code 1.

    This library finalizes MPI when the process ends, unless the program has done so. If the program imports
    `mpi4py.MPI` before it connects, mpi4py finalizes MPI: then a child of `os.fork` that calls `sys.exit` may
    wait forever, and so may the survivors of a rank that died. Set `mpi4py.rc.finalize = False` before that
    import, and this library does it.

    If all ranks have a CUDA device, each makes one its current device: local rank i uses device i, modulo their
    number. Connect before you create arrays on a device.

    The logger "bagua_comm" logs these choices at INFO. With BAGUA_NVTX=1 and CuPy, calls are NVTX ranges.

    Args:
        timeout_s: The time limit of a call that waits for other ranks, in seconds: above 0, at most 1e9; math.inf
            for none. After it, the call raises `CommTimeout`.
        check: Compare every call among the ranks first, messages between two ranks included, and raise a
            `CommMismatch` that names both calls if they differ.
        trace: Keep the latest spans, for `Communicator.trace`.
        node: A label for this rank's node. By default, ranks on one host share a node: those whose host has the
            same name and boot time, or that share memory according to MPI. Set labels to try out `Hierarchical`
            on one machine.
        alone: Make a world of one rank, without MPI, whatever started this process.
        comm: Make the ranks of this communicator of mpi4py the world, in place of all that mpirun started. Its
            ranks call `connect`; it is duplicated, and the caller keeps it. Ranks outside of it need not connect,
            or may connect with another communicator. They belong to the same job: an uncaught exception ends
            them, too, and messages about the exit of a rank count ranks in MPI's world.
        transport: Use this transport, and look for no launcher. Its ranks share a node if they share a host.
        gpu: The transport of device arrays. "auto": NCCL where possible, else copies through host memory, with a
            warning that gives the reason; none if a rank has no CUDA device. "nccl" or "staged" (through host
            memory): this one, or an error. "none": none, and CuPy is not imported.
        net: The network of NCCL between hosts, in this library and in PyTorch. "bagua": the plugin of this
            library, which uses many TCP connections; it is built once on each host, which needs a C compiler.
            "auto": the plugin if there are several hosts, all of them can build it, none has InfiniBand, and no
            variable asks for another network; else NCCL's own. "nccl": NCCL's own network. The choice is set by
            NCCL_NET_PLUGIN and NCCL_NET, on all ranks. If None, the value of BAGUA_NET, which `run --net`
            sets; without it, these variables are not changed. On one host, NCCL uses shared memory in any case.
        record: A folder for flight records. When a call fails, each rank writes its last calls to a file there,
            in a subfolder of this job, for `python -m bagua_comm diagnose`. If None, the folder in
            BAGUA_FLIGHT_FOLDER, or one of this user in the folder of temporary files, on each host.
        op_order: "rank": floats are added in the order of the ranks, and repeated runs give the same bits. "any":
            host arrays are reduced by MPI's own calls where possible; see `Communicator.op_order`. The same on
            all ranks.

    Raises:
        BootstrapError: A launcher started this process, but the world cannot be set up, or has too few ranks; or
            `gpu` or `net` cannot be set up, on all ranks; or an argument is invalid; or the communicator
            that was made last is open.
        CommTimeout: MPI had started on all ranks, but one did not come in time.
        RankFailed: A rank died meanwhile, and mpirun kept the others.

    >>> with connect() as comm:
    ...     comm.rank, comm.size
    (0, 1)
    """
    timeout_s = check_timeout(timeout_s)
    with _reported_once():
        for name_of, value, choices in (("gpu", gpu, get_args(GPU)), ("op_order", op_order, get_args(OpOrder))):
            if value not in choices:
                raise BootstrapError(f"connect: {name_of} is {value!r}, expected one of {', '.join(choices)}")
        if not isinstance(record, str | Path | None):
            raise BootstrapError(f"connect: record is {record!r}, expected the path of a folder")
        _check_choice(alone=alone, comm=comm, transport=transport)
    machines: Sequence[object] = [0]
    name, peers = "", list[ProcessId]()
    exit_handler: ExitHandler | None = None
    if transport is not None:
        mine = this_host(), new_name(), ProcessId.mine()
        facts = Communicator([transport], tracer=NULL).allgather_object(mine)
        machines, name = [machine for machine, _, _ in facts], facts[0][1]
        peers = [process for rank, (_, _, process) in enumerate(facts) if rank != transport.rank]
    elif not alone and (comm is not None or under_mpi()):
        transport, machines, name, exit_handler = mpi_world(timeout_s, comm)
    else:
        transport = LocalTransport(timeout_s=timeout_s)
    flight = _flight_recorder(transport, name, record)
    if exit_handler is None and flight.folder is not None:
        transport.on_slow_leave = functools.partial(flight.write, left=LEFT_WELL)
        flight.peers = peers
        answer_requests(_write_record)
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
        BootstrapError: `op_order` differs between ranks, or `gpu` or `net` cannot be set up; on all ranks.
    """
    setup = Communicator([transport], nodes=machines, tracer=NULL)
    mine = op_order, socket.gethostname(), _job_under_torchrun()
    orders, hosts, jobs = zip(*setup.allgather_object(mine), strict=True)
    _check_order(orders)
    nodes = machines if node is None else setup.allgather_object(node)
    choose_net(setup, net)
    device, for_device = connect_device(setup, gpu)
    world = World(
        [transport, *for_device],
        nodes=nodes,
        device=device,
        check=check,
        tracer=Recorder() if trace else NULL,
        op_order=op_order,
        exit_handler=exit_handler,
    )
    world.flight = flight or _flight_recorder(transport, job().name)
    world.flight.counters[world.group] = world.counters
    if world.host.plan is not None:
        world.flight.plans[world.group] = world.host.plan
    if os.environ.get("BAGUA_NVTX", "") not in ("", "0"):
        listen(cuda.NvtxRanges())
    log_world(_log, world, nodes, version=__version__)
    set_default(world)
    _, name, attempt = min(jobs)
    shown = world.flight.job or name
    if shown and os.environ.get("BAGUA_LIVE", "") != "0":
        live.show(shown, world.flight, hosts, attempt)
    return world


def _job_under_torchrun() -> tuple[bool, str, int]:
    """Whether this process is new, the name of its job, "" without torchrun, and the restarts of the job before.

    The least one is that of all ranks: a process that joins others belongs to their job and attempt.
    """
    name, attempt = torchrun_job(), job().attempt + number_from_torchrun("TORCHELASTIC_RESTART_COUNT")
    shown = live.shown() if name else None
    return (True, name, attempt) if shown is None else (False, *shown)


def default() -> Communicator:
    """Return the communicator that `connect` made last; connect if there is none.

    Collective, if it connects.
    """
    return default_or(connect)


def check_timeout(timeout_s: object) -> float:
    """Return `timeout_s`, which must be a valid time limit of calls; else raise `BootstrapError`."""
    with _reported_once():
        return call_state.check_timeout("connect", timeout_s)


@contextmanager
def _reported_once() -> Iterator[None]:
    """Have one rank of MPI print an error of the body in short, as later ones, unless the program handles it."""
    try:
        yield
    except BootstrapError:
        if under_mpi():
            handler_of_this_process().report_exceptions()
        raise


def _check_order(orders: Sequence[OpOrder]) -> None:
    """Raise `BootstrapError` unless all ranks give the same order of reductions."""
    if len(ranks := ranks_by(orders)) > 1:
        raise BootstrapError(
            "connect: op_order differs between ranks: "
            + "; ".join(f"ranks {members} give {order!r}" for order, members in ranks.items())
            + "; give the same on all"
        )


def _flight_recorder(transport: Transport, job: str, record: str | Path | None = None) -> FlightRecorder:
    """A flight recorder for a new world, which writes to a folder named `job`; without a name, to none."""
    rank, size = transport.rank, transport.size
    if size == 1 or not job:
        return FlightRecorder(rank, size, job=job)
    given = record or os.environ.get("BAGUA_FLIGHT_FOLDER")
    if given:
        return FlightRecorder(rank, size, folder=Path(given) / job, job=job)
    folder = default_folder()
    if folder is not None:
        keep_latest(folder, JOBS)
    return FlightRecorder(rank, size, folder=folder and folder / job, job=job)


def _write_record() -> None:
    """Write the flight record of the default world, if there is one."""
    world = current()
    if world is not None:
        world.flight.write()


def _check_choice(*, alone: bool, comm: MPI.Comm | None, transport: Transport | None) -> None:
    """Raise `BootstrapError` if these arguments of `connect` exclude each other, or a world is open already."""
    choices = {"alone=True": alone, "comm=": comm is not None, "transport=": transport is not None}
    given = [name for name, is_given in choices.items() if is_given]
    if len(given) > 1:
        raise BootstrapError(f"connect: {' and '.join(given)} exclude each other; give one of them")
    if transport is not None and not isinstance(transport, Transport):
        raise BootstrapError(
            f"connect: transport is {transport!r}, expected a Transport, such as LocalTransport(); without it, "
            "connect finds the one of the launcher"
        )
    mpi = sys.modules.get("mpi4py.MPI")
    if comm is not None and (mpi is None or not isinstance(comm, mpi.Comm)):
        raise BootstrapError(
            f"connect: comm is of type {type(comm).__name__}, expected a communicator of mpi4py (mpi4py.MPI.Comm)"
        )
    if comm is None and transport is None:
        refuse_a_second_world()
