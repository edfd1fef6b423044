"""PyTorch's process group beside bagua_comm's world, over the same processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from bagua_comm import Communicator
from bagua_comm.system.processes import this_host


@contextmanager
def gloo(comm: Communicator) -> Iterator[None]:
    """In the body of `with`, torch.distributed has a gloo group of the ranks of `comm`.

    Collective. The rendezvous is at MASTER_ADDR and MASTER_PORT, or without these at a free port of rank 0.
    """
    one_node = len({*comm.allgather_object(this_host())}) == 1  # the labels of nodes may differ from hosts
    if one_node and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mine = "127.0.0.1" if one_node else socket.getfqdn()
    host = comm.broadcast_object(os.environ.get("MASTER_ADDR", mine), root=0)
    port = int(os.environ.get("MASTER_PORT", 0)) if "MASTER_ADDR" in os.environ else 0
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False) if comm.rank == 0 else None
    port = comm.broadcast_object(store and store.port, root=0)
    if store is None:
        store = dist.TCPStore(host, port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    try:
        yield
    finally:
        dist.destroy_process_group()
    comm.barrier()  # rank 0 holds the store until all ranks have left it
