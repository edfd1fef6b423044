"""Which interfaces the network plugin uses, in which order; what happens when it is unloaded, and over IPv6."""

import _ctypes
import shutil
import socket
import sys
from pathlib import Path

import pytest
from support.net_builds import built

from bagua_comm import net
from bagua_comm.net import binding
from bagua_comm.net.binding import Plugin, PluginError
from benchmarks.net_traffic import connect_pair, exchange, make_pool

MACHINE = Path(__file__).parents[1] / "support" / "interfaces.h"


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    """A build on a machine that is made up."""
    return built(tmp_path_factory.mktemp("net"), "interfaces", header=MACHINE.read_text())


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in ("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"):
        monkeypatch.delenv(name, raising=False)


def unload(plugin):
    _ctypes.dlclose(plugin.library._handle)


def names(library):
    """The devices of a library that is loaded anew."""
    plugin = Plugin(library)
    try:
        plugin.start()
        return [plugin.properties(device).name.decode() for device in range(plugin.count())]
    finally:
        unload(plugin)


@pytest.mark.parametrize(
    ("chosen", "family", "found"),
    [
        (None, None, ["eth0", "eth10"]),
        ("", None, ["eth0", "eth10"]),
        (None, "AF_INET", ["eth0"]),
        (None, "AF_INET6", ["eth0", "eth10"]),
        (None, "IPv6", ["eth0", "eth10"]),  # unknown speeds do not count
        ("eth", None, ["eth0", "eth10"]),
        ("eth1", None, ["eth10"]),  # the beginning of a name; eth1 itself has no cable
        ("=eth0,docker0", None, ["eth0", "docker0"]),
        ("docker0,eth0", None, ["eth0", "docker0"]),
        ("^eth", None, ["lo", "docker0", "virbr0"]),
        ("^=eth0,lo", None, ["docker0", "virbr0", "eth10"]),
        ("lo", "AF_INET6", ["lo"]),
    ],
)
def test_interfaces_are_chosen_as_nccl_chooses_its_own(made_up, monkeypatch, chosen, family, found):
    for name, value in (("NCCL_SOCKET_IFNAME", chosen), ("NCCL_SOCKET_FAMILY", family)):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert names(made_up) == found


@pytest.mark.parametrize("chosen", ["ib", "=eth", "=eth1", "eth2"])
def test_where_no_interface_fits_init_fails(made_up, monkeypatch, chosen):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", chosen)
    with pytest.raises(PluginError) as raised:
        names(made_up)
    assert raised.value.code == binding.SYSTEM_ERROR


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
def test_it_is_unloaded_and_loaded_again_over_both_families(tmp_path, monkeypatch, family):
    library = Path(shutil.copy(net.build(), tmp_path / "again.so"))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_FAMILY", family)
    pool = make_pool(1 << 20)
    for _ in range(2):
        plugin = Plugin(library)
        plugin.start()
        handle, listener = plugin.listener(0)
        assert int.from_bytes(bytes(handle)[8:10], sys.byteorder) == getattr(socket, family)
        plugin.closeListen(listener)
        pair = connect_pair(plugin)
        exchange(pair, [0, 1, 70_000, 1 << 20] * 4, pool)
        pair.close()
        unload(plugin)
        assert str(library) not in Path("/proc/self/maps").read_text()
