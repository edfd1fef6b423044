"""Process groups of torch.distributed for threads: each thread is a rank, and none communicates.

`fully_shard` needs ranks and sizes alone, where `bagua_torch.fsdp.attach` communicates.
"""

import threading

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg
from torch.testing._internal.distributed.fake_pg import FakeStore

LOCK = threading.Lock()
"""For PyTorch's generator and its registries, which all threads share."""


def install():
    """Let each thread of this process have a default process group of its own."""
    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)


def uninstall():
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    multi_threaded_pg._uninstall_threaded_pg()


def renew(comm):
    """Let the default process group of this thread have the ranks of `comm`."""
    with LOCK:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=comm.rank, world_size=comm.size)
