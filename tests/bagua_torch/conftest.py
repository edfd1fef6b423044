import pytest


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    """Gloo connects on this host alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
