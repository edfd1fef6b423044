"""The network that NCCL uses: all ranks make the same choice, or raise the same error, which names a rank."""

import json

import pytest
from support.device_ranks import connect_all
from support.launch import run_python

from bagua_comm import BootstrapError, net
from bagua_comm.bootstrap.gpu import nccl_start
from bagua_comm.net import choosing
from bagua_comm.net.choosing import Facts, agree, decide

LIBRARY = "/home/me/.cache/bagua_comm/net/libnccl-net-bagua-0123456789abcdef.so"
ONE = Facts("node1", "0123", LIBRARY)
TWO = Facts("node2", "0123", LIBRARY.replace("me", "you"))
OURS = {"NCCL_NET_PLUGIN": LIBRARY, "NCCL_NET": "bagua"}


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    """Nothing is set, NCCL has not started, and what a test sets is removed."""
    for name in (choosing.PLUGIN, choosing.NETWORK, choosing.VARIABLE, "NCCL_HOSTID", *choosing.ALIKE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(nccl_start, "variables", None)


# Decisions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["bagua", "auto"])
def test_each_rank_is_given_the_plugin_of_its_host_and_no_silent_way_around(choice):
    made = [decide(choice, [ONE, TWO], rank) for rank in (0, 1)]
    assert made[0].variables == OURS
    assert made[1].variables == {**OURS, "NCCL_NET_PLUGIN": TWO.library}
    assert "without effect" not in made[0].why


def test_the_own_network_of_nccl_is_one_without_plugins():
    made = decide("nccl", [ONE._replace(variables=OURS), TWO], 0)
    assert made.variables == {"NCCL_NET_PLUGIN": "none", "NCCL_NET": None}


def test_on_one_host_it_is_said_that_there_is_no_effect():
    assert "without effect: all ranks are on one host" in decide("bagua", [ONE, ONE], 0).why
    made = decide("auto", [ONE, ONE], 0)
    assert made.variables == {}
    assert "all ranks are on one host, where NCCL uses shared memory" in made.why


@pytest.mark.parametrize(
    ("rank", "why"),
    [
        (TWO._replace(library="", problem="no compiler"), "rank 1 on node2 has no plugin: no compiler"),
        (TWO._replace(infiniband=True), "rank 1 on node2 has InfiniBand"),
        (TWO._replace(variables={"NCCL_NET": "Socket"}), "rank 1 on node2 has NCCL_NET=Socket set"),
        (TWO._replace(source="4567"), "another plugin"),
    ],
)
def test_auto_takes_nccls_own_on_all_ranks_if_one_cannot(rank, why):
    for number in (0, 1):
        made = decide("auto", [ONE, rank], number)
        assert made.variables == {}
        assert why in made.why


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (TWO._replace(library="", problem="no compiler"), "rank 1 on node2 has no plugin: no compiler"),
        (TWO._replace(source="4567"), r"rank 1 on node2 has another plugin \(source 4567\) than rank 0 on node1"),
        (TWO._replace(variables={"BAGUA_NET_FLOWS": "2"}), "BAGUA_NET_FLOWS is 2 on rank 1 on node2"),
        (TWO._replace(variables={"NCCL_NET": "Socket"}), "rank 1 on node2 has NCCL_NET=Socket"),
        (TWO._replace(variables={"NCCL_NET_PLUGIN": "aws-ofi"}), "rank 1 on node2 has NCCL_NET_PLUGIN=aws-ofi"),
        (
            TWO._replace(started={"NCCL_NET_PLUGIN": None, "NCCL_NET": None}),
            "neither NCCL_NET_PLUGIN nor NCCL_NET",
        ),
    ],
)
def test_a_rank_that_cannot_is_named_in_the_error_of_all(rank, message):
    for number in (0, 1):
        with pytest.raises(BootstrapError, match=message):
            decide("bagua", [ONE, rank], number)


def test_settings_of_an_earlier_connect_are_no_obstacle():
    again = ONE._replace(variables=OURS, started=OURS)
    assert decide("bagua", [again], 0).variables == OURS
    before = ONE._replace(variables={"NCCL_NET_PLUGIN": "none"})
    assert decide("bagua", [before], 0).variables == OURS


def test_ranks_must_ask_for_the_same():
    assert agree([None, None]) is None
    assert agree(["auto", "auto"]) == "auto"
    with pytest.raises(BootstrapError, match="differs between ranks: 'bagua' on rank 0, None on rank 2"):
        agree(["bagua", "bagua", None])
    with pytest.raises(BootstrapError, match="is 'sockets', expected one of 'bagua', 'auto', 'nccl', or None"):
        agree(["sockets", "sockets"])


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, []),
        (OURS, []),
        ({"NCCL_NET_PLUGIN": "none"}, ["NCCL_NET_PLUGIN=none: NCCL loads no plugin"]),
        ({"NCCL_NET_PLUGIN": "aws-ofi"}, ["NCCL_NET_PLUGIN=aws-ofi names another plugin"]),
        ({"NCCL_NET": "Socket"}, ["NCCL_NET=Socket: NCCL uses that network"]),
        (
            {"NCCL_NET_PLUGIN": LIBRARY},
            ["NCCL_NET is not set: where the plugin fails, NCCL takes sockets without a word"],
        ),
    ],
)
def test_variables_that_break_it_are_found(variables, found):
    assert choosing.breaks(variables) == found


# connect ------------------------------------------------------------------------------------------------


def test_connect_builds_the_plugin_and_sets_the_variables_before_nccl_starts(device, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device.count = 2
    seen = connect_all(2, lambda comm: (comm.transports[1].name, choosing.current()), net="bagua")
    assert seen == [("nccl", {choosing.PLUGIN: str(net.path()), choosing.NETWORK: "bagua"})] * 2
    assert net.path().is_relative_to(tmp_path)
    assert nccl_start.variables == choosing.current()
    assert connect_all(2, net="bagua") == [None, None]
    first, second = connect_all(2, net="nccl")
    assert first == second
    assert "has started NCCL with NCCL_NET_PLUGIN=" in first


def test_connect_without_a_word_leaves_the_variables_as_they_are(device, monkeypatch):
    device.count = 2
    monkeypatch.setenv(choosing.PLUGIN, "mine")
    left = {choosing.PLUGIN: "mine", choosing.NETWORK: None}
    assert connect_all(2, lambda comm: choosing.current()) == [left] * 2


def test_a_host_without_a_compiler_is_an_error_that_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(net.building, "compilers", lambda: iter(()))
    first, second = connect_all(2, net="bagua", gpu="none")
    assert first == second
    assert "rank 0 on " in first
    assert "pip install ziglang" in first
    assert choosing.current() == {choosing.PLUGIN: None, choosing.NETWORK: None}


def test_an_error_on_one_rank_is_raised_on_all_and_none_waits(tmp_path, monkeypatch):
    def gone():
        raise PermissionError("plugin.c cannot be read")

    monkeypatch.setattr(choosing, "source_hash", gone)
    first, second = connect_all(2, net="bagua", gpu="none")
    assert first == second
    assert "has no plugin: plugin.c cannot be read" in first


def test_an_unknown_network_is_refused():
    assert connect_all(1, net="sockets", gpu="none") == [
        "connect: net (or BAGUA_NET) is 'sockets', expected one of 'bagua', 'auto', 'nccl', or None"
    ]


SCRIPT = """
    import json, os
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        os.environ["NCCL_HOSTID"] = "elsewhere"
    import bagua_comm
    with bagua_comm.connect(gpu="none") as comm:
        mine = {name: os.environ.get(name) for name in ("NCCL_NET_PLUGIN", "NCCL_NET")}
        every = comm.allgather_object(mine)
        if comm.rank == 0:
            print(json.dumps(every))
"""


@pytest.mark.slow
def test_run_net_sets_the_network_of_the_ranks(tmp_path):
    result = run_python(2, script=(tmp_path / "script.py", SCRIPT), flags=["--net", "auto"])
    assert result.returncode == 0, result.stderr
    expected = {choosing.PLUGIN: str(net.build()), choosing.NETWORK: "bagua"}
    assert json.loads(result.stdout) == [expected] * 2
