"""The GPU of each rank, the transport for device arrays, and the network of NCCL."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ..comm import Communicator
from ..errors import BootstrapError, CommError
from ..execution import cuda
from ..execution.cuda import STREAMS_PER_THREAD, has_streams_per_thread
from ..logs import log_on_root
from ..net import choosing
from ..system.files import private_folder
from ..topology import ranks_by
from ..transports import LocalTransport, Transport

GPU: TypeAlias = Literal["auto", "nccl", "staged", "none"]
"""The transport of device arrays; see `connect`."""

_log = logging.getLogger(__name__)

SHARED_GPU_NCCL = 23000
"""From this version on (2.30), NCCL can accept several ranks on one GPU, and distinguishes the slices of a GPU
(MIG). Earlier versions identify a GPU by its bus id alone."""

_OTHER_GPU = "free it, hide it by CUDA_VISIBLE_DEVICES, or pass gpu='none'"
"""The advice for a GPU that cannot be used."""

ADVICE = (
    "NCCL needs one GPU for each rank: start no more ranks on a machine than it has GPUs. (Ranks can share a GPU "
    "if each gets an NCCL_HOSTID of its own; they then use the network. From NCCL 2.30 on, two ranks can "
    "also share one with NCCL_MULTI_RANK_GPU_ENABLE=1, and more of them with a small NCCL_MAX_CTAS as well.)"
)


class GpuFacts(NamedTuple):
    """The GPU of a rank and its NCCL, as ranks exchange them."""

    machine: str
    """The name of the rank's host for NCCL, which NCCL_HOSTID overrides."""
    bus_id: str | None
    """The bus id of the GPU; None without a GPU. (Processes may number GPUs differently.)"""
    uuid: str
    """NVIDIA's id of the GPU, or of the slice of a GPU (MIG)."""
    nccl: int
    """The version of NCCL, 23203 for 2.32.3; 0 if it cannot be loaded."""
    problem: str
    """The reason why NCCL cannot be loaded."""
    shares: bool
    """Whether NCCL_MULTI_RANK_GPU_ENABLE allows ranks to share a GPU."""
    broken: str = ""
    """The reason why the GPU cannot be used; empty if it can."""


def nccl_obstacle(gpus: Sequence[GpuFacts]) -> str | None:
    """Return the reason why NCCL cannot serve ranks with these GPUs; None if it can."""
    for rank, gpu in enumerate(gpus):
        if gpu.broken:
            return f"rank {rank} cannot use its GPU ({gpu.broken})"
        if not gpu.nccl:
            return f"rank {rank} cannot load NCCL ({gpu.problem})"
        if gpu.nccl != gpus[0].nccl:
            return f"rank 0 has version {gpus[0].nccl} of NCCL, but rank {rank} has {gpu.nccl}"
    knows_slices = gpus[0].nccl >= SHARED_GPU_NCCL
    if knows_slices and all(gpu.shares for gpu in gpus):
        return None
    slices = ranks_by((gpu.machine, gpu.bus_id, gpu.uuid if knows_slices else "") for gpu in gpus)
    for (machine, bus_id, _), ranks in slices.items():
        if len({gpus[rank].uuid for rank in ranks}) > 1:
            return (
                f"ranks {ranks} have slices (MIG) of the GPU {bus_id} of {machine}, which NCCL distinguishes "
                f"from version 2.30 on; this is {gpus[0].nccl}"
            )
        if len(ranks) > 1:
            return f"ranks {ranks} share the GPU {bus_id} of {machine}; {ADVICE}"
    return None


@dataclass
class NcclStart:
    """The start of NCCL in this process, which reads its variables once."""

    variables: dict[str, str | None] | None = None
    """The variables by which NCCL chose its network; None if this library has not started NCCL."""


nccl_start = NcclStart()


def provide_cupy_cache() -> None:
    """Set another cache folder if CuPy cannot write to its own; without one it cannot be imported."""
    if "cupy" in sys.modules or importlib.util.find_spec("cupy") is None:
        return
    folder = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
    with suppress(OSError):
        if not folder.startswith("~"):  # else there is no home
            os.makedirs(folder, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        with suppress(OSError):  # without a folder for temporary files, CuPy cannot be imported
            os.environ["CUPY_CACHE_DIR"] = str(private_folder() / "cupy")


def choose_net(setup: Communicator, net: str | None) -> None:
    """Set the variables by which NCCL chooses its network, if `net` or BAGUA_NET asks for one. Collective."""
    choice = choosing.agree(setup.allgather_object(choosing.asked_for(net)))
    if choice is None:
        return
    host = _nccl_host()
    several_hosts = len(set(setup.allgather_object(host))) > 1

    def look() -> choosing.Facts:
        return choosing.look(choice, host, nccl_start.variables, several_hosts=several_hosts)

    # The first rank of each host compiles the plugin, and the others find it in the cache.
    mine = None if setup.local_rank else look()
    setup.barrier()
    mine = mine or look()
    everyone = [choosing.Facts._make(facts) for facts in setup.allgather_object(tuple(mine))]
    decision = choosing.decide(choice, everyone, setup.rank)
    choosing.apply(decision)
    log_on_root(_log, setup.rank, "net %s: %s", choice, decision.why)


def connect_device(setup: Communicator, gpu: GPU) -> tuple[int | None, list[Transport]]:
    """Choose the device of this rank, make it the current one, and connect its transport. Collective."""
    if gpu == "none":
        return None, []
    provide_cupy_cache()
    count = cuda.device_count()
    device = setup.local_rank % count if count else None
    if device is not None and has_streams_per_thread():
        warnings.warn(f"connect: {STREAMS_PER_THREAD}.", RuntimeWarning, stacklevel=3)
    gpus = [GpuFacts._make(facts) for facts in setup.allgather_object(tuple(describe_gpu(device)))]
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


def _nccl_host() -> str:
    """The name of this host for NCCL."""
    return os.environ.get("NCCL_HOSTID") or socket.gethostname()


def _on_all_ranks(setup: Communicator, make: Callable[[], Transport]) -> tuple[Transport | None, str | None]:
    """Return `make()` if it succeeds on all ranks; else None and the reason. Collective."""
    made, failure = None, None
    try:
        made = make()
    except CommError as exc:  # it names the rank
        failure = str(exc)
    except RuntimeError as exc:  # of CUDA
        failure = f"rank {setup.rank} cannot use its GPU: {exc}"
    failure = next((text for text in setup.allgather_object(failure) if text), None)
    return (made, None) if failure is None else (None, failure)


def describe_gpu(device: int | None) -> GpuFacts:
    """Return the facts about a device, which becomes the current one of this process."""
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
    shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return GpuFacts(_nccl_host(), bus_id, uuid, version, problem, shares, broken)


def _connect_nccl(host: Transport) -> Transport:
    """Connect the transport over NCCL. Collective."""
    from ..transports.nccl import NcclTransport

    if nccl_start.variables is None:
        nccl_start.variables = choosing.current()
    return NcclTransport.connect(host)
