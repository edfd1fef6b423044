"""How `init_process_group("bagua")` and `new_group` find their ranks, and make a group of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeAlias
from urllib.parse import parse_qs, urlparse
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers

import bagua_comm
from bagua_comm import ArrayError, BootstrapError, Communicator, RankFailed
from bagua_comm.bootstrap import environment
from bagua_comm.bootstrap.world import current, default_or
from bagua_comm.execution.lane import InlineLane, Lane, ThreadLane

from ..process_group import ProcessGroupTransport, RendezvousInfo
from ..process_group.bootstrap import BACKEND, serve_store, use_device
from ..process_group.store import Store
from ..process_group.transport import count
from ..process_group.waiter import CHECK_S
from .alone import warn_if_alone
from .averaging import BackendOptions
from .group import BaguaGroup

_POLL_S = 0.001
"""How long a rank waits at first before it asks again whether all have come; later, longer."""

World: TypeAlias = "tuple[Store, int, int]"
"""A store, this rank, and the number of ranks."""

_connected: WeakSet[Communicator] = WeakSet()
"""The worlds that a rendezvous has connected, which the end of the group closes."""


def register_backend() -> None:
    """Register the backend "bagua", once, and let programs for torchrun find the ranks that MPI has started."""
    if BACKEND.upper() in dist.Backend._plugins:
        return
    backend: Any = dist.Backend  # torch leaves it untyped
    devices = ["cpu", "cuda"] if torch.cuda.device_count() else ["cpu"]  # ShardedTensor uses the last of them
    backend.register_backend(BACKEND, _make_group, extended_api=True, devices=devices)
    handlers: dict[str, Callable[..., Iterator[World]]] = _rendezvous_handlers
    handlers["env"] = _EnvironmentOrMPI(handlers["env"])
    environment.copy_numbers_for_torch()
    warn_if_alone()


class _EnvironmentOrMPI:
    """The rendezvous "env://": of MPI, or of the world that is connected, if no variable names another one."""

    def __init__(self, without_mpi: Callable[..., Iterator[World]]) -> None:
        self._without_mpi = without_mpi

    def __call__(
        self, url: str, timeout: timedelta = dist.default_pg_timeout, **options: object
    ) -> Iterator[World]:
        before = current()
        if environment.names_rendezvous() or (before is None and not environment.under_mpi()):
            yield from self._without_mpi(url, timeout=timeout, **options)
            return
        world = default_or(lambda: bagua_comm.connect(timeout_s=timeout.total_seconds()))
        if world is not before:
            _connected.add(world)
        query = parse_qs(urlparse(url).query)
        for name, mine in (("rank", world.rank), ("world_size", world.size)):
            asked = query.get(name, [str(mine)])[0]
            if asked != str(mine):
                raise BootstrapError(
                    f"init_process_group: {name} is {asked}, but this process is connected with {mine}; leave it "
                    "out, or set MASTER_ADDR and MASTER_PORT to use the ranks of your own"
                )
        yield serve_store(world), world.rank, world.size


def _make_group(opts: torch._C._distributed_c10d._DistributedBackendOptions, options: object) -> BaguaGroup:
    """Make a group of the ranks that call this. Collective."""
    if options is not None and not isinstance(options, BackendOptions):
        raise ArrayError(f"pg_options is {options!r}, expected bagua_torch.BackendOptions for the backend bagua")
    rank, size, timeout_s = opts.group_rank, opts.group_size, opts.timeout.total_seconds()
    name, store = f"{opts.group_id}-{count(opts.store, 'bagua', rank)}", opts.store
    ranks = list(opts.global_ranks_in_group) or list(range(size))
    default = dist.group.WORLD
    parent = default.parent if isinstance(default, BaguaGroup) else None
    wait_for_ranks(store, name, rank, ranks, timeout_s, parent or current())
    if parent is not None:
        made = parent.subgroup(ranks, name)
        return BaguaGroup(lane_of(made, timeout_s), made, options=options)
    if default is not None and ranks != list(range(default.size())):
        raise BootstrapError(
            f"new_group: the backend bagua makes a group of ranks {ranks} only of a default group with the same "
            "backend; call init_process_group('bagua')"
        )
    before = current()
    server = None if environment.torchrun_serves() else 0
    world = default_or(lambda: _connect(RendezvousInfo(store, f"bagua/{name}", rank, size, server), timeout_s))
    if (world.rank, world.size) != (rank, size):
        raise BootstrapError(
            f"the backend bagua: the group has rank {rank} of {size}, but this process is connected as rank "
            f"{world.rank} of {world.size}; give init_process_group these numbers, or neither"
        )
    use_device(world)
    close = None if world is before and world not in _connected else world.close
    return BaguaGroup(lane_of(world.dup(), timeout_s), world, close, options)


def wait_for_ranks(
    store: Store, name: str, rank: int, ranks: Sequence[int], timeout_s: float, parent: Communicator | None = None
) -> None:
    """Wait until all ranks of a group have called this.

    Collective.

    Args:
        store: A store that they share.
        name: A name for the group, used once.
        rank: This rank in the group.
        ranks: The ranks of the group in the default group.
        timeout_s: How long to wait.
        parent: A communicator of all ranks of the default group, if there is one.

    Raises:
        BootstrapError: Some have not called it. It names them.
        RankFailed: Some cannot call it any more.
    """
    keys, whole = [f"bagua/{name}/{each}" for each in range(len(ranks))], f"bagua/{name}/all"
    group, start_s = f"to make the group of ranks {list(ranks)}", time.monotonic()
    checked_s = start_s

    def missing() -> list[int]:
        return [each for each, key in zip(ranks, keys, strict=True) if not store.check([key])]

    try:
        store.set(keys[rank], "here")
        if store.add(f"{whole}/count", 1) == len(ranks):
            store.set(whole, "here")
        # `store.wait` with a short timeout would print a warning of PyTorch's each time.
        while not store.check([whole]):
            now_s = time.monotonic()
            if now_s - start_s > timeout_s:
                text = f"has waited {timeout_s:g} s for ranks {missing()} {group}"
                raise BootstrapError(f"the backend bagua: rank {ranks[rank]} {text}")
            if parent is not None and now_s - checked_s > CHECK_S:
                checked_s, closed = now_s, _lost_among(parent, ranks)
                if lost := [each for each in (missing() if closed else ()) if each in closed]:
                    text = f"waited for ranks {missing()} {group}, but has lost ranks {lost}: they died or left"
                    raise RankFailed(f"the backend bagua: rank {ranks[rank]} {text}", lost)
            time.sleep(min(max((now_s - start_s) / 8, _POLL_S), CHECK_S / 4))
    except dist.DistError as exc:
        raise BootstrapError(f"the backend bagua: rank {ranks[rank]} has lost the store, {group}") from exc


def _lost_among(comm: Communicator, ranks: Sequence[int]) -> list[int]:
    """Those of these ranks that have died or left."""
    host = comm.host
    if isinstance(host, ProcessGroupTransport):
        return host.lost_among(ranks)
    error = host.poll_failures(())
    return [each for each in ranks if each in getattr(error, "ranks", ())]


def lane_of(comm: Communicator, timeout_s: float) -> Lane[Communicator]:
    """Return a lane whose tasks use this communicator itself."""
    comm.timeout_s = timeout_s
    concurrent = all(transport.concurrent for transport in comm.transports)
    lane = ThreadLane(comm) if concurrent else InlineLane(comm)
    comm.flight.lanes.add(lane)
    return lane


def _connect(info: RendezvousInfo, timeout_s: float) -> Communicator:
    """Connect the ranks of the default process group. Collective."""
    if not environment.under_torchrun() and environment.under_mpi():
        return bagua_comm.connect(timeout_s=timeout_s)
    return bagua_comm.connect(
        timeout_s=timeout_s, transport=ProcessGroupTransport(timeout_s=timeout_s, rendezvous=info)
    )
