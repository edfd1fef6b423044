"""Setting up the world: `connect()`. Environment variables are read here.

A process started by mpirun (or srun, or whatever speaks PMI) joins the MPI world; any other is a world
of one rank, and needs no MPI. What torchrun starts goes through `bagua_torch.connect`, which brings a transport.
"""

from __future__ import annotations

import os
import socket
import sys
from types import TracebackType

from . import arrays
from .comm import Communicator
from .errors import BootstrapError
from .trace import NULL, Recorder
from .transports import LocalTransport, Transport

MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")
"""Set by the launchers of Open MPI, MPICH, Intel MPI and Slurm."""

TIMEOUT_S = 300.0
"""How long a call waits for its peers, unless told otherwise."""

_default: Communicator | None = None


def connect(
    *,
    timeout_s: float = TIMEOUT_S,
    check: bool = False,
    trace: bool = True,
    node: str | int | None = None,
    transport: Transport | None = None,
) -> Communicator:
    """Join the world: all ranks that mpirun started; a world of one rank if it did not start this process.

    Collective. The result is also the default communicator, until it is closed.

    Under MPI an exception that nobody catches, in any rank's main thread, ends all ranks: `sys.excepthook`
    first prints its traceback and then aborts the job with exit code 1.

    Args:
        timeout_s: How long a call may wait for its peers before it raises `CommTimeout`.
        check: Compare every collective call among the ranks first, and raise `CommMismatch` naming both
            calls where they differ.
        trace: Keep the latest spans, for `Communicator.trace`.
        node: A label for this rank's node. By default ranks that can share memory share a node; give
            labels to try out `Hierarchical` on one machine.
        transport: Use this one instead of finding a world; its ranks share a node if they share a host name.

    Raises:
        BootstrapError: A launcher started this process, but no world can be made of it.

    >>> with connect() as comm:
    ...     comm.rank, comm.size
    (0, 1)
    """
    global _default
    check_timeout(timeout_s)
    labels: list[int] | None = None
    if transport is not None:
        node = socket.gethostname() if node is None else node
    elif _under_mpi():
        transport, labels = _mpi_world(timeout_s)
    else:
        transport = LocalTransport(timeout_s=timeout_s)
    tracer = Recorder() if trace else NULL
    comm = _World([transport], nodes=labels, tracer=tracer)
    if node is not None:
        comm = _World([transport], nodes=comm.allgather_object(node), tracer=tracer)
    comm.device = _device(comm.local_rank)
    comm.check = check
    _default = comm
    return comm


def default() -> Communicator:
    """The communicator that `connect` made last; connects if there is none.

    Collective, if it connects.
    """
    return _default if _default is not None else connect()


def check_timeout(timeout_s: float) -> None:
    """Raise `BootstrapError` unless calls can wait that long."""
    if timeout_s <= 0:
        raise BootstrapError(f"connect: timeout_s is {timeout_s}, expected a positive number")


def under_torchrun() -> bool:
    """Whether torchrun started this process, or something else that sets RANK and WORLD_SIZE."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def torchrun_local_rank() -> int:
    """The number that torchrun gave this process on its machine; 0 if none."""
    return int(os.environ.get("LOCAL_RANK", "0"))


class _World(Communicator):
    """The communicator of `connect`: closing it ends its time as the default."""

    def close(self) -> None:
        """Free what this communicator holds. Collective."""
        global _default
        if _default is self:
            _default = None
        super().close()


def _under_mpi() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.Get_size() > 1:
        return True
    if any(name in os.environ for name in MPI_VARIABLES):
        return True
    if under_torchrun() and int(os.environ["WORLD_SIZE"]) > 1:
        raise BootstrapError(
            "connect: torchrun started this process, which sets up no MPI world; call bagua_torch.connect() "
            "instead, or start it with mpirun -n N python script.py, or python -m bagua_comm run -n N script.py"
        )
    return False


def _mpi_world(timeout_s: float) -> tuple[Transport, list[int]]:
    try:
        from mpi4py import MPI

        from .transports.mpi import MPITransport
    except (ImportError, RuntimeError) as exc:
        raise BootstrapError(
            f"connect: mpirun started this process, but mpi4py cannot load an MPI library: {exc}; "
            "pip install 'bagua-comm[mpi]' brings one"
        ) from exc
    sys.excepthook = _abort_after(sys.excepthook, MPI)
    transport = MPITransport(MPI.COMM_WORLD.Dup(), timeout_s=timeout_s)
    here = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    first = MPI.COMM_WORLD.Get_rank()
    first = here.bcast(first, root=0)
    here.Free()
    return transport, MPI.COMM_WORLD.allgather(first)


def _abort_after(hook: object, mpi: object) -> _AbortAfter:
    """`hook`, followed by the end of all ranks; not twice if `hook` already is that."""
    return hook if isinstance(hook, _AbortAfter) else _AbortAfter(hook, mpi)


class _AbortAfter:
    """An exception hook that ends all ranks once the exception is printed."""

    def __init__(self, hook: object, mpi: object) -> None:
        self._hook, self._mpi = hook, mpi

    def __call__(
        self,
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        world = self._mpi.COMM_WORLD  # type: ignore[attr-defined]
        print(f"rank {world.Get_rank()} of {world.Get_size()}:", file=sys.stderr)
        self._hook(kind, error, traceback)  # type: ignore[operator]
        sys.stderr.flush()
        sys.stdout.flush()
        world.Abort(130 if issubclass(kind, KeyboardInterrupt) else 1)


def _device(local_rank: int) -> int | None:
    """The GPU of this rank: number `local_rank`, shared in turn if there are fewer; None without one."""
    count = arrays.device_count()
    return local_rank % count if count else None
