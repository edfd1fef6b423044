import os
import tempfile
from contextlib import contextmanager

import pytest

import bagua_comm


@pytest.fixture(scope="session")
def comm():
    with bagua_comm.connect(timeout_s=30) as comm:
        yield comm


@contextmanager
def folder_of_all(comm):
    folder = tempfile.TemporaryDirectory() if comm.rank == 0 else None
    yield comm.broadcast_object(folder.name if folder else None, root=0)
    comm.barrier()
    if folder:
        folder.cleanup()


@pytest.fixture
def shared_folder(comm):
    """A new folder that all ranks see, and its path on all of them."""
    with folder_of_all(comm) as folder:
        yield folder


@pytest.fixture(scope="module")
def gloo(comm):
    """PyTorch's own process group over the same processes, for comparison."""
    from torch import distributed

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with folder_of_all(comm) as folder:
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=comm.rank, world_size=comm.size
        )
        yield
        distributed.destroy_process_group()
