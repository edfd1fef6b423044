"""Ranks on the devices of the fixture `device`: each is a thread, over a host transport."""

import functools
import importlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cuda_on_cpu import machine

import bagua_comm
from bagua_comm import BootstrapError, Communicator
from bagua_comm.arrays import dtype_named
from bagua_comm.testing import Recording, run_ranks
from bagua_comm.testing.fleets import ThreadFleet, ThreadJob
from bagua_comm.transports.local import Hub, LocalTransport


def values(rank, size=5001, dtype="float32"):
    """Normal numbers of a rank, on the host."""
    return np.random.default_rng(rank).standard_normal(size).astype(np.float32).astype(dtype_named(dtype))


def up(x):
    """A copy on the device."""
    import cupy

    array = cupy.empty(x.shape, x.dtype)
    array.set(x)
    return array


class HostOnly(Recording):
    """Moves only host arrays, as MPI does."""

    def moves(self, x):
        return isinstance(x, np.ndarray)

    def split(self, color, key):
        return HostOnly(self.inner.split(color, key))

    def dup(self):
        return HostOnly(self.inner.dup())


def over(kind, host, **options):
    """A transport of device arrays on top of a transport of host arrays."""
    if kind == "nccl":
        return importlib.import_module("bagua_comm.transports.nccl").NcclTransport.connect(host, **options)
    return importlib.import_module("bagua_comm.transports.staged").StagedTransport(host.dup())


def run_on_devices(machine, ranks, kind, body, *, nodes=None, **options):
    """`run_ranks` with a `comm` that moves device arrays over `kind`; with "local" all ranks share a device."""
    import cupy

    def run(comm):
        device = 0 if kind == "local" else comm.rank
        cupy.cuda.Device(device).use()
        (host,) = comm.transports
        beside = [] if kind == "local" else [over(kind, host, **options)]
        with Communicator([host, *beside], device=device, nodes=nodes) as on_device:
            return body(on_device)

    machine.count = 1 if kind == "local" else ranks
    return run_ranks(ranks, run, wrap=Recording if kind == "local" else HostOnly)


class DeviceFleet(ThreadFleet):
    """A process whose communicators move device arrays over `kind`, like those of `MPIFleet`."""

    def __init__(self, job, number, kind):
        super().__init__(job, number)
        self._kind, self._comms = kind, []

    def rendezvous(self, cause=None):
        for comm in self._comms:
            for beside in comm.transports[1:]:
                beside.leave(f"a rendezvous started after {cause}")
        self._comms.clear()
        return super().rendezvous(cause)

    def connect(self, members, *, control=False):
        comm = super().connect(members, control=control)
        if control:
            return comm
        host = HostOnly(comm.transports[0])
        nodes = ["host"] * len(members)
        on_device = Communicator([host, over(self._kind, host)], device=self.me, nodes=nodes)
        self._comms.append(on_device)
        return on_device


def device_job(machine, kind, size, **options):
    """A job with a device for each process."""
    machine.count = size
    job = ThreadJob(size, **options)
    job.fleet = functools.partial(DeviceFleet, kind=kind)
    return job


run_over_nccl = functools.partial(run_on_devices, kind="nccl")


def policies_in_turn(names, cases):
    """Parametrize `names` by `cases`; the policies of streams rotate over the cases."""
    policies = list(machine.POLICIES)
    return pytest.mark.parametrize(
        ("device", *names),
        [(policies[(n + n // len(policies)) % len(policies)], *case) for n, case in enumerate(cases)],
        indirect=["device"],
        ids=lambda value: getattr(value, "__name__", None) or repr(value),
    )


def connect_all(ranks, body=lambda comm: None, *, timeout_s=30.0, **options):
    """Return `body(comm)` of each rank of a world of threads, or its error; the host transport is like MPI's."""
    hub = Hub(ranks)

    def run(rank):
        transport = HostOnly(LocalTransport(hub, rank, timeout_s=timeout_s))
        try:
            with bagua_comm.connect(transport=transport, **options) as comm:
                return body(comm)
        except BootstrapError as exc:
            return str(exc)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))
