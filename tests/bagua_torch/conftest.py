import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    """Gloo connects on this host alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def gloo():
    """torch.distributed with one rank, which all threads use."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
