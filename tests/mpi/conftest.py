import os
import tempfile

import pytest

import bagua_comm


@pytest.fixture(scope="session")
def comm():
    with bagua_comm.connect(timeout_s=30) as comm:
        yield comm


@pytest.fixture
def shared_folder(comm):
    """A new folder that all ranks see, and its path on all of them."""
    folder = tempfile.TemporaryDirectory() if comm.rank == 0 else None
    yield comm.broadcast_object(folder.name if folder else None, root=0)
    comm.barrier()
    if folder:
        folder.cleanup()


@pytest.fixture
def gloo(comm, shared_folder):
    """PyTorch's own process group over the same processes, for comparison."""
    import torch

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{shared_folder}/store", rank=comm.rank, world_size=comm.size
    )
    yield
    torch.distributed.destroy_process_group()
