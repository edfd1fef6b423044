"""InfiniBand: the devices, from a folder as Linux shows them, and what an MPI needs to use them."""

import pytest

from bagua_comm.net import choosing
from bagua_comm.system import infiniband

UCX, LIBFABRIC, VERBS = (
    f"7f00 r-xp 00 08:01 5   /opt/lib/{name}\n" for name in ("libucp.so.0", "libfabric-1.so", "libibverbs.so.1")
)
ACTIVE, DOWN = ("200 Gb/sec (4X HDR)", "4: ACTIVE"), ("10 Gb/sec (4X SDR)", "1: DOWN")


def test_devices_are_shown_with_the_rate_and_the_state_of_each_port(ports):
    ports(mlx5_1=DOWN, mlx5_0=ACTIVE + DOWN, mlx5_2=())
    assert infiniband.devices() == {
        "mlx5_0": "200 Gb/sec, ACTIVE; 10 Gb/sec, DOWN",
        "mlx5_1": "10 Gb/sec, DOWN",
        "mlx5_2": "no port",
    }


def test_a_port_that_cannot_be_read_is_shown(ports):
    (ports(mlx5_0=ACTIVE) / "mlx5_0/ports/1/rate").unlink()
    assert infiniband.devices() == {"mlx5_0": "port 1 cannot be read: No such file or directory"}


def test_a_host_without_devices_has_none_and_no_problem(ports):
    ports().rmdir()
    assert infiniband.devices() == {}
    assert infiniband.why_unused("") is None


@pytest.mark.parametrize(
    ("maps", "has"),
    [
        ("", "has neither UCX nor libfabric"),
        (UCX, "has UCX, but has not loaded libibverbs"),
        (UCX + LIBFABRIC, "has UCX and libfabric, but has not loaded libibverbs"),
        ("7f00 r-xp 00 08:01 5   /opt/libibverbs/libother.so\n", "has neither UCX nor libfabric"),
    ],
)
def test_an_mpi_without_libibverbs_uses_tcp_and_what_it_has_is_named(ports, maps, has):
    ports(mlx5_0=ACTIVE, mlx5_1=DOWN)
    said = f"this machine has mlx5_0 (200 Gb/sec, ACTIVE), and this MPI {has}: between nodes it uses TCP"
    assert infiniband.why_unused(maps) == said


@pytest.mark.parametrize(
    ("maps", "devices"), [(UCX + VERBS, {"mlx5_0": ACTIVE}), ("", {"mlx5_0": DOWN}), ("", {"hfi1_0": ACTIVE})]
)
def test_nothing_is_said_of_an_mpi_that_may_use_it_of_a_port_that_is_down_and_of_omni_path(ports, maps, devices):
    ports(**devices)
    assert infiniband.why_unused(maps) is None


def test_the_plugin_of_nccl_sees_the_same_devices(ports, monkeypatch):
    monkeypatch.setattr(choosing, "build", lambda: "library")
    for devices in ({}, {"mlx5_0": ACTIVE}):
        ports(**devices)
        assert choosing.look("auto", "node1", None, several_hosts=True).infiniband == bool(devices)
