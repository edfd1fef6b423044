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
