"""The facts of one rank and its host. Nothing is sent here."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

from ... import net
from ...bootstrap import environment
from ...bootstrap.gpu import provide_cupy_cache
from ...comm import Communicator
from ...execution import cuda
from ...launch.cli import cores
from ...launch.mpirun import OPEN_MPI
from ...logs import library_name
from ...net import choosing
from ...system import infiniband
from ...system.processes import this_host
from ..info import NOT_INSTALLED, Facts, installed, mpi_facts, plugin_facts, versions

LIMITS = {"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}

_SIOCGIFADDR = 0x8915


def collect() -> Facts:
    """Return all facts, as plain data for JSON."""
    return {
        "host": socket.gethostname(),
        "machine": this_host(),
        "pid": os.getpid(),
        "versions": versions(),
        "MPI": mpi(),
        "cores": cores(),
        "cores of the host": os.cpu_count() or 1,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "limits": {name: _limit(number) for name, number in LIMITS.items()},
        "shared memory": shared_memory(),
        "interfaces": interfaces(),
        "InfiniBand": infiniband.devices(),
        "gpu": gpu(),
        "plugin": plugin(),
        "torch.distributed": torch_distributed(),
    }


def shared_memory() -> dict[str, int] | None:
    """Return the size and the free space of /dev/shm, in bytes; None if there is none."""
    with suppress(OSError):
        usage = shutil.disk_usage("/dev/shm")
        return {"total": usage.total, "free": usage.free}
    return None


def interfaces() -> dict[str, Facts]:
    """Return the network interfaces with an IPv4 address, without the loopback."""
    found = {}
    for _, name in socket.if_nameindex():
        address = _address(name)
        if address is not None and not address.startswith("127."):
            found[name] = {"address": address, "Mbit/s": _number_in(f"/sys/class/net/{name}/speed")}
    return found


def gpu() -> Facts:
    """Return the GPUs of this host, as CuPy reports them; without a driver, CuPy is not imported."""
    driver = Path("/proc/driver/nvidia/version").exists()
    if not driver and "cupy" not in sys.modules:
        return {"driver": False, "count": 0}
    provide_cupy_cache()
    return {"driver": driver, "count": cuda.device_count(), **cuda.device_facts()}


def plugin() -> Facts:
    """Return the facts of `info` about NCCL's network plugin, and the network that is chosen."""
    return {**plugin_facts(), "built": net.path() is not None, "net": choosing.asked_for(None)}


def torch_distributed() -> Facts | None:
    """Return by what the backend "bagua" of torch.distributed would connect the ranks; None without PyTorch."""
    if installed("torch") == NOT_INSTALLED:
        return None
    by_mpi = environment.torch_ranks_by_mpi()
    return {"by": "MPI" if by_mpi else "gloo", "variables": sorted(environment.torchrun_rendezvous())}


def mpi() -> Facts:
    """Return the MPI that runs, and the network that it was told to use; else the MPI that could."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized():
        if environment.under_torchrun():
            return {"running": False, "network chosen": os.environ.get("GLOO_SOCKET_IFNAME")}
        return {"running": False, **mpi_facts()}
    library = library_name(module.Get_library_version())
    # The second is of libfabric, which MPICH and Intel MPI use.
    network = "OMPI_MCA_btl_tcp_if_include" if library.startswith(OPEN_MPI) else "FI_TCP_IFACE"
    return {
        "running": True,
        "library": library,
        "thread level": module.Query_thread(),
        "threads": module.Query_thread() == module.THREAD_MULTIPLE,
        "ulfm": environment.has_ulfm(),
        "network chosen": os.environ.get(network),
        "InfiniBand": infiniband.why_unused(infiniband.MAPS.read_text()),
    }


def mpi_nodes(comm: Communicator) -> list[int]:
    """For each rank, return the first one that shares memory with it according to MPI; empty without MPI.

    Collective. The nodes of the communicator may differ: it joins ranks of one host that MPI separates.
    """
    if comm.transports[0].name != "mpi":
        return []
    from mpi4py import MPI

    from ...transports.mpi.time_limit import in_time
    from ...transports.mpi.world import first_beside

    call = "doctor's split of the world by host"
    return comm.allgather_object(in_time(lambda: first_beside(MPI.COMM_WORLD), comm.timeout_s, call))


def _limit(number: int) -> int | None:
    """The soft limit; None if there is none."""
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft


def _address(interface: str) -> str | None:
    """The IPv4 address of an interface."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        answer = fcntl.ioctl(one, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def _number_in(file: str) -> int | None:
    with suppress(OSError, ValueError):
        return max(0, int(Path(file).read_text())) or None
    return None
