"""`bagua_torch.connect`: the world of torchrun, of mpirun, or of one rank."""

from __future__ import annotations

import functools
import socket
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import bagua_comm
from bagua_comm import BootstrapError, Communicator
from bagua_comm.arrays import OpOrder
from bagua_comm.bootstrap import GPU, environment
from bagua_comm.bootstrap.connection import TIMEOUT_S, check_timeout
from bagua_comm.bootstrap.world import default_or, refuse_a_second_world
from bagua_comm.comm.outcomes import on_all_ranks
from bagua_comm.net.choosing import Net
from bagua_comm.system.processes import this_network
from bagua_comm.transports import Transport

from . import serving
from .children import kept_in_children
from .store import Store
from .transport import ProcessGroupTransport, RendezvousInfo, count

BACKEND = "bagua"
"""The name of this library's backend of torch.distributed."""

_CANNOT_CONNECT = "torch.distributed cannot connect the ranks"
_CANNOT_JOIN = "connect: torchrun started this process, but torch.distributed cannot join its world"

_CONNECT_S = 2.0
"""The time limit of an attempt to connect to a store: PyTorch tries again until then, also if its server died."""

_joined: tuple[Store, int, int] | None = None
"""What `torchrun_store` returned first."""

_RELEASE_S = 0.001
"""Time for threads of gloo to release the tensors of finished calls."""


def connect(
    *,
    timeout_s: float = TIMEOUT_S,
    check: bool = False,
    trace: bool = True,
    node: str | int | None = None,
    alone: bool = False,
    gpu: GPU = "auto",
    net: Net | None = None,
    record: str | Path | None = None,
    op_order: OpOrder = "rank",
    process_group: bool | Literal["bagua"] = False,
) -> Communicator:
    """Join the world that torchrun or mpirun has started; a world of one rank without a launcher.

    Collective. The result is also the default communicator, until it is closed; until then a second `connect` is
    refused. Its device, if it has one, becomes PyTorch's current device, so that `module.cuda()` uses it.

    The ranks are those of torch.distributed's default process group, if there is one. Under torchrun, or
    where RANK and WORLD_SIZE say so, `connect` makes that group (gloo for host tensors, NCCL for CUDA tensors),
    and `close` destroys it. Anywhere else this is `bagua_comm.connect`, which raises an error if a launcher
    started this process as one of many, but it finds itself alone.

    Args:
        timeout_s: How long a call may wait for its peers before it raises `CommTimeout`. Under torchrun also how
            long this one may wait for them.
        check: Compare every call among the ranks first, messages between two ranks included, and raise a
            `CommMismatch` that names both calls if they differ.
        trace: Record the latest spans, for `Communicator.trace`.
        node: A label for this rank's node, the host name by default; see `bagua_comm.connect`.
        alone: Be a world of one rank, even under a launcher.
        gpu: The transport of CUDA tensors; see `bagua_comm.connect`.
        net: The network plugin of NCCL between hosts, also in torch.distributed; see `bagua_comm.connect`.
        record: A folder for the last calls of each rank, written when a call fails; see `bagua_comm.connect`.
        op_order: The order in which host tensors are added over MPI, "rank" or "any"; see `bagua_comm.connect`.
        process_group: Under mpirun or without a launcher, also initialize torch.distributed's default process
            group with these ranks, which `DeviceMesh` and `fully_shard` need. `close` destroys it. "bagua": make
            it of the backend "bagua", also under torchrun, so that its calls are those of this library.

    Raises:
        BootstrapError: A launcher started this process, but the world cannot be set up, or has too few ranks; or
            what `gpu` or `net` asks for cannot be set up; or the communicator that was made last is open; or
            `process_group` is invalid, or asks for another backend than the group has that exists.

    >>> with connect() as comm:
    ...     comm.rank, comm.size
    (0, 1)
    """
    timeout_s = check_timeout(timeout_s)
    _check_group(process_group)
    refuse_a_second_world()
    transport: Transport | None = None
    store: Store | None = None
    given = default_group()
    if alone:
        pass
    elif given is not None:
        transport = ProcessGroupTransport(timeout_s=timeout_s)
    elif environment.under_torchrun() and process_group == BACKEND:
        store, rank, size = _torchrun_store_of_a_world(timeout_s)
        info = RendezvousInfo(store, "bagua/connect", rank, size, None if environment.torchrun_serves() else 0)
        transport = ProcessGroupTransport(timeout_s=timeout_s, rendezvous=info)
    elif environment.under_torchrun():
        _init_process_group(timeout_s)
        transport = ProcessGroupTransport(timeout_s=timeout_s)
    comm = bagua_comm.connect(
        timeout_s=timeout_s,
        check=check,
        trace=trace,
        node=node,
        alone=alone,
        transport=transport,
        gpu=gpu,
        net=net,
        record=record,
        op_order=op_order,
    )
    use_device(comm)
    if process_group and not dist.is_initialized():
        init_group(comm, store or serve_store(comm), BACKEND if process_group == BACKEND else None)
    made = default_group()
    if made is not None and made is not given:
        comm.at_close = functools.partial(_destroy, weakref.ref(made))
    return comm


def default_group() -> dist.ProcessGroup | None:
    """The default process group of torch.distributed; None without one."""
    return dist.group.WORLD if dist.is_available() else None


def _check_group(process_group: object) -> None:
    """Raise `BootstrapError` unless `connect` can make, or leave, such a default process group."""
    if not isinstance(process_group, bool) and process_group != BACKEND:
        raise BootstrapError(f"connect: process_group is {process_group!r}, expected True, False or {BACKEND!r}")
    if process_group == BACKEND and dist.is_initialized() and dist.get_backend() != BACKEND:
        raise BootstrapError(
            f"connect: process_group is {BACKEND!r}, but the default process group of torch.distributed exists, "
            f"of {dist.get_backend()}; connect before it is made, or give its init_process_group {BACKEND!r}"
        )


@contextmanager
def reported(text: str) -> Iterator[None]:
    """Raise errors of torch.distributed in a `with` block, or a function, as `BootstrapError`, after `text`."""
    try:
        yield
    except (RuntimeError, ValueError) as exc:
        raise BootstrapError(f"{text}: {exc}") from exc


def _initialize(backend: str, store: Store, rank: int, size: int, timeout_s: float) -> None:
    """Make the default process group of torch.distributed."""
    wait = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
    kept_in_children(dist.group.WORLD)


def _destroy(group: weakref.ref[dist.ProcessGroup]) -> None:
    """Destroy the default process group, if it is still this one. A weak reference lets it go then."""
    if (mine := group()) is not None and default_group() is mine:
        destroy_process_group()


def destroy_process_group() -> None:
    """Destroy the default process group, once the threads of gloo have released the tensors of finished calls.

    They need the GIL for that. The destructor of a process group holds the GIL while it waits for its threads
    (PyTorch 2.13), so a thread that comes late would wait forever.
    """
    time.sleep(_RELEASE_S)
    dist.destroy_process_group()


def use_device(comm: Communicator) -> None:
    """Make the device of this rank, if it has one, PyTorch's current device."""
    if comm.device is not None and torch.cuda.is_available():
        torch.cuda.set_device(comm.device)


def default() -> Communicator:
    """The communicator that `connect` made last; connects with default settings if there is none.

    Collective, if it connects.
    """
    return default_or(connect)


def provide_group(comm: Communicator) -> None:
    """Initialize the default process group of torch.distributed with the ranks of `comm`, unless there is one.

    Collective. Rank 0 serves its store, on a free port of one address: 127.0.0.1 if all ranks share a host and
    its network, else that of the host of rank 0. In the first case gloo listens at 127.0.0.1 too, unless
    GLOO_SOCKET_IFNAME is set. This library itself does not use that group.

    Raises:
        BootstrapError: The ranks cannot connect; on all ranks, if rank 0 cannot serve the store.
    """
    if comm.size == 1 or not dist.is_available() or dist.is_initialized():
        return
    init_group(comm, serve_store(comm))


def renew_group(comm: Communicator) -> None:
    """Make the default process group of torch.distributed of the ranks of `comm`, in place of a former one.

    Collective. Call it in the function of `elastic.run`, before `fully_shard` or `init_device_mesh`. The group
    has the backend "bagua": its calls are those of this library, and raise `RankFailed` when a rank has died. All
    former groups are aborted.

    Raises:
        BootstrapError: A former group cannot be aborted, or rank 0 cannot serve the store; on all ranks. Or the
            ranks cannot connect.
        CommError: A rank died.
    """

    def abort() -> None:
        if default_group() is None:
            return
        if dist.get_backend() == BACKEND:
            dist.distributed_c10d._abort_process_group()  # to shut it down would wait for dead ranks
        else:
            destroy_process_group()

    on_all_ranks(comm, "renew_group", abort, BootstrapError)
    init_group(comm, serve_store(comm), BACKEND)


def init_group(comm: Communicator, store: Store, backend: str | None = None) -> None:
    """Initialize the default process group with the ranks of `comm`.

    Collective.

    Args:
        comm: The communicator.
        store: A store that its ranks share.
        backend: Its backend; gloo if None, and NCCL for CUDA tensors.

    Raises:
        BootstrapError: The ranks cannot connect.
    """
    if backend is None:
        cuda = comm.device is not None and dist.is_nccl_available()
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    with reported(_CANNOT_CONNECT):
        _initialize(backend, store, comm.rank, comm.size, comm.timeout_s)


def serve_store(comm: Communicator) -> Any:
    """Connect the ranks of `comm` to a store of torch.distributed, which rank 0 serves; see `provide_group`.

    Collective.

    Raises:
        BootstrapError: A rank cannot connect, or rank 0 cannot serve the store; on all ranks.
        CommError: A rank died.
    """
    if comm.size == 1:
        return serving.STORES.HashStore()
    rows = comm.allgather_object((this_network(), socket.gethostname()))
    others = [name for network, name in rows if network != rows[0][0]]
    store: Any = None
    address: Any = None
    if comm.rank == 0:
        try:
            store, address = _serve_group(others, comm.timeout_s)
        except (OSError, RuntimeError) as exc:
            address = f"rank 0 cannot serve a store: {exc}"
    address = comm.broadcast_object(address, root=0)
    if isinstance(address, str):
        raise BootstrapError(f"{_CANNOT_CONNECT}: {address}")
    if not others:
        environment.keep_gloo_on_this_host()
    return _connect_store(comm, store, address)


def _connect_store(comm: Communicator, store: Any, address: tuple[str, int]) -> Any:
    """Connect all ranks but rank 0 to its store; raises on all if one died.

    Collective.
    """
    started_s = time.monotonic()
    while True:
        problem = None
        if store is None:
            wait = timedelta(seconds=min(_CONNECT_S, comm.timeout_s))
            try:
                store = serving.STORES.TCPStore(*address, is_master=False, timeout=wait)
            except (RuntimeError, ValueError) as exc:
                problem = str(exc)
        rows = comm.allgather_object((problem, time.monotonic() - started_s > comm.timeout_s))
        problems = {rank: text for rank, (text, _) in enumerate(rows) if text is not None}
        if not problems:
            store.set_timeout(timedelta(seconds=comm.timeout_s))
            return store
        if any(is_late for _, is_late in rows):
            rank, text = next(iter(problems.items()))
            raise BootstrapError(f"{_CANNOT_CONNECT}: rank {rank} cannot reach {address[0]}:{address[1]}: {text}")


def _serve_group(others: Sequence[str], timeout_s: float) -> tuple[Store, tuple[str, int]]:
    """Serve a store for the ranks of this host and of `others`; returns it with its address and port."""
    wanted = environment.torchrun_rendezvous().get("MASTER_ADDR", "")
    address = serving.address_for(others, wanted) if others else serving.LOOPBACK
    if address is None:
        names = ", ".join(sorted(set(others)))
        raise OSError(
            f"{socket.gethostname()} has no address by which {names} reach it: neither its own name nor theirs "
            "lead to one; write them into /etc/hosts, or set MASTER_ADDR to an address of this host"
        )
    store = serving.serve(address, timeout_s=timeout_s)
    return store, (address, store.port)


def _init_process_group(timeout_s: float) -> None:
    backend = "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(environment.number_from_torchrun("LOCAL_RANK") % torch.cuda.device_count())
    with reported(_CANNOT_JOIN):
        _initialize(backend, *_torchrun_store_of_a_world(timeout_s), timeout_s)


@reported(_CANNOT_JOIN)
def _torchrun_store_of_a_world(timeout_s: float) -> tuple[Store, int, int]:
    """Like `torchrun_store`, with a new prefix: an earlier group may have left keys in the store."""
    store, rank, size = torchrun_store(timeout_s)
    number = count(store, "bagua/world", rank)
    return dist.distributed_c10d.PrefixStore(f"bagua/world-{number}", store), rank, size


def torchrun_store(timeout_s: float) -> tuple[Store, int, int]:
    """Torchrun's store, this rank, and the number of ranks; joined once, since rank 0 may be serving the store.

    Args:
        timeout_s: How long to wait for the store, and for the ranks if this one serves it.
    """
    global _joined
    if _joined is None:
        _joined = _join(timeout_s)
    return _joined


def _join(timeout_s: float) -> tuple[Store, int, int]:
    from torch.distributed.rendezvous import rendezvous

    variables = environment.torchrun_rendezvous()
    address = serving.master_address(variables)
    with suppress(OSError, ValueError, KeyError):  # PyTorch's rendezvous reports what is wrong with the variables
        if address is not None:
            port, size = int(variables["MASTER_PORT"]), int(variables["WORLD_SIZE"])
            return serving.serve(address, port, timeout_s=timeout_s, ranks=size), 0, size
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    return store, rank, size
