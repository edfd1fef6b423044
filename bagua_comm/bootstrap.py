"""Setting up the world: `connect()`. Environment variables are read here.

A process started by mpirun (or srun, or whatever speaks PMI) joins the MPI world; any other is a world
of one rank, and needs no MPI. What torchrun starts goes through `bagua_torch.connect`, which brings a transport.

Where every rank has a GPU, a transport of device arrays is set up over the one of host arrays: NCCL if each rank
has a GPU of its own, or the ranks that share one have taken one of the two ways in which NCCL allows it; else
copies through host memory. All ranks find out together, and come to the same.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import sys
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Literal, NamedTuple, TypeAlias, get_args

from . import arrays
from .comm import Communicator
from .errors import BootstrapError, CommError
from .files import private_folder
from .trace import NULL, Recorder
from .transports import LocalTransport, Transport

GPU: TypeAlias = Literal["auto", "nccl", "staged", "none"]
"""What carries device arrays; see `connect`."""

MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")
"""Set by the launchers of Open MPI, MPICH, Intel MPI and Slurm."""

MPI_SETTINGS = {"OMPI_MCA_btl_tcp_eager_limit": str(320 << 10)}
"""What MPI is told before it starts, unless it was told otherwise. Open MPI then sends the pieces of our
collectives without asking the receiver first: on a busy link the question waits behind the data."""

TIMEOUT_S = 300.0
"""How long a call waits for its peers, unless told otherwise."""

SHARED_GPU_NCCL = 23000
"""From this version on (2.30), NCCL can be told to have several ranks on one GPU."""

ADVICE = (
    "NCCL wants one for each rank: start no more ranks on a machine than it has GPUs. (Ranks that share one can "
    "be given an NCCL_HOSTID each, and then use the network between them; from NCCL 2.30 on two of them can "
    "share with NCCL_MULTI_RANK_GPU_ENABLE=1, more with a small NCCL_MAX_CTAS as well.)"
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
    """Join the world: all ranks that mpirun started; a world of one rank if it did not start this process.

    Collective. The result is also the default communicator, until it is closed.

    Under MPI an exception that nobody catches, in any rank's main thread, ends all ranks: `sys.excepthook`
    first prints its traceback and then aborts the job with exit code 1.

    Where all ranks have a CUDA device, each makes one its current device, in turn by its number on the machine:
    connect before anything is put on a device.

    Args:
        timeout_s: How long a call may wait for its peers before it raises `CommTimeout`.
        check: Compare every collective call among the ranks first, and raise `CommMismatch` naming both
            calls where they differ.
        trace: Keep the latest spans, for `Communicator.trace`.
        node: A label for this rank's node. By default ranks that can share memory share a node; give
            labels to try out `Hierarchical` on one machine.
        transport: Use this one instead of finding a world; its ranks share a node if they share a host name.
        gpu: What carries device arrays. "auto": NCCL where it can, else copies through host memory, with a
            warning that says why; nothing if a rank has no CUDA device. "nccl" or "staged" (through host memory):
            that and no other. "none": nothing, and CuPy is not imported.

    Raises:
        BootstrapError: A launcher started this process, but no world can be made of it, or `gpu` asks for what
            cannot be; alike on all ranks.

    >>> with connect() as comm:
    ...     comm.rank, comm.size
    (0, 1)
    """
    global _default
    check_timeout(timeout_s)
    if gpu not in get_args(GPU):
        raise BootstrapError(f"connect: gpu is {gpu!r}, expected one of {', '.join(get_args(GPU))}")
    machines: Sequence[object] = [0]
    if transport is not None:
        machines = Communicator([transport], tracer=NULL).allgather_object(socket.gethostname())
    elif _under_mpi():
        transport, machines = _mpi_world(timeout_s)
    else:
        transport = LocalTransport(timeout_s=timeout_s)
    setup = Communicator([transport], nodes=machines, tracer=NULL)
    nodes = machines if node is None else setup.allgather_object(node)
    device, beside = _device_side(setup, gpu)
    comm = _World([transport, *beside], nodes=nodes, device=device, tracer=Recorder() if trace else NULL)
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
    for name, value in MPI_SETTINGS.items():
        os.environ.setdefault(name, value)
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


# ---------------------------------------------------------------------------------------------------
# The device side
# ---------------------------------------------------------------------------------------------------


class GpuFacts(NamedTuple):
    """What a rank tells the others about its GPU, and about NCCL."""

    machine: str
    """As NCCL names it: ranks that give themselves different names in NCCL_HOSTID share none."""
    bus_id: str | None
    """Where its GPU is plugged in; None without one. (Its number says little: each process may see others.)"""
    nccl: int
    """NCCL's version, 23203 for 2.32.3; 0 if it cannot be loaded."""
    problem: str
    """Why it cannot."""
    shares: bool
    """Whether NCCL was told that ranks may share a GPU."""


def make_room_for_cupy() -> None:
    """Tell CuPy of another folder, if it cannot write to its own: without one it cannot be imported."""
    if "cupy" in sys.modules or importlib.util.find_spec("cupy") is None:
        return
    folder = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
    with contextlib.suppress(OSError):
        if not folder.startswith("~"):  # else there is no home
            os.makedirs(folder, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        with contextlib.suppress(OSError):  # no folder for temporary files either: then there are no GPUs
            os.environ["CUPY_CACHE_DIR"] = str(private_folder() / "cupy")


def _device_side(setup: Communicator, gpu: GPU) -> tuple[int | None, list[Transport]]:
    """This rank's device, now its current one, and the transport of device arrays. Collective."""
    if gpu == "none":
        return None, []
    make_room_for_cupy()
    count = arrays.device_count()
    device = setup.local_rank % count if count else None
    gpus = [GpuFacts(*each) for each in setup.allgather_object(tuple(my_gpu(device)))]
    without = [rank for rank, each in enumerate(gpus) if each.bus_id is None]
    if without and gpu == "auto":
        return None, []
    if without:
        raise BootstrapError(f"connect: gpu is {gpu!r}, but ranks {without} have no CUDA device")
    (host,) = setup.transports
    if isinstance(host, LocalTransport):
        return device, []  # carries device arrays as well
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
                "gpu='staged' asks for that, and silences this.",
                RuntimeWarning,
                stacklevel=3,
            )
    from .transports.staged import StagedTransport

    return device, [StagedTransport(host.dup())]


def my_gpu(device: int | None) -> GpuFacts:
    """What there is to tell about this process and its device, which becomes the current one."""
    bus_id, version, problem = None, 0, ""
    if device is not None:
        arrays.use_device(device)
        bus_id = arrays.bus_id(device)
        try:
            from .transports import nccl

            version = nccl.version()
        except (ImportError, CommError) as exc:
            problem = str(exc)
    machine = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    return GpuFacts(machine, bus_id, version, problem, os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1")


def nccl_obstacle(gpus: Sequence[GpuFacts]) -> str | None:
    """Why NCCL cannot serve ranks with these GPUs; None if it can."""
    ranks_at: dict[tuple[str, str | None], list[int]] = {}
    for rank, gpu in enumerate(gpus):
        if not gpu.nccl:
            return f"rank {rank} cannot load NCCL ({gpu.problem})"
        if gpu.nccl != gpus[0].nccl:
            return f"rank 0 has version {gpus[0].nccl} of NCCL, but rank {rank} has {gpu.nccl}"
        ranks_at.setdefault((gpu.machine, gpu.bus_id), []).append(rank)
    if all(gpu.shares for gpu in gpus) and gpus[0].nccl >= SHARED_GPU_NCCL:
        return None
    for (machine, bus_id), ranks in ranks_at.items():
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
