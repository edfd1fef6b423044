"""`doctor`: what it finds, and what it says that one should do."""

import copy
import json
import subprocess
import sys
import threading

import pytest
from support.commands import output_of
from support.launch import run_python, torchrun

from bagua_comm import __main__ as cli
from bagua_comm import bootstrap
from bagua_comm.bootstrap import environment
from bagua_comm.commands import doctor
from bagua_comm.commands.doctor import facts, measure, report
from bagua_comm.commands.doctor.findings import World, examine
from bagua_comm.commands.doctor.measure import Pair
from bagua_comm.errors import CommTimeout
from bagua_comm.testing import run_ranks

HEALTHY = {
    "host": "node1",
    "machine": "node1 0",
    "pid": 7,
    "versions": {"bagua_comm": "1.2", "python": "3.12.1", "numpy": "2.3.0"},
    "MPI": {"running": True, "library": "Open MPI v5.0.11", "threads": True, "ulfm": True},
    "cores": [0, 1, 2, 3],
    "cores of the host": 4,
    "OMP_NUM_THREADS": "1",
    "limits": {"memlock": None, "nofile": 20000, "nproc": None},
    "shared memory": {"total": 8 << 30, "free": 7 << 30},
    "interfaces": {"eth0": {"address": "10.0.0.1", "Mbit/s": 10000}},
    "InfiniBand": {},
    "gpu": {"driver": False, "count": 0},
    "torch.distributed": {"by": "MPI", "variables": []},
    "plugin": {"built": True, "source": "01", "compilers": "/usr/bin/cc", "kept away by": "nothing", "net": None},
}


ACTIVE = "200 Gb/sec, ACTIVE"


def world(size=4, hosts=2, pairs=(), clocks=None, **changes):
    """Healthy ranks, in order over the hosts; `changes` are made to the facts of the last rank."""
    everyone = []
    for rank in range(size):
        host = rank * hosts // size
        one = copy.deepcopy(HEALTHY) | {"host": f"node{host + 1}", "machine": f"node{host + 1} {host}"}
        one["interfaces"]["eth0"]["address"] = f"10.0.0.{host + 1}"
        everyone.append(one)
    for name, value in changes.items():
        everyone[-1][name] = value
    together = [-(-(rank * hosts // size) * size // hosts) for rank in range(size)]
    return World(everyone, together, list(pairs), clocks or {})


def found(level, text, where):
    """The one finding of a level that has this text."""
    (finding,) = [each for each in examine(where) if each.level == level and text in each.what]
    return finding


def levels(where):
    return {finding.level for finding in examine(where)} - {"ok", "note"}


@pytest.mark.parametrize(
    ("change", "level", "text"),
    [
        ({}, "ok", "all hosts have NCCL's network plugin (source 01)"),
        ({"source": "02"}, "problem", "hosts have different sources of NCCL's network plugin: 01, 02"),
        ({"built": False, "compilers": "none; apt install gcc"}, "problem", "node2 cannot build NCCL"),
        ({"kept away by": "NCCL_NET_PLUGIN=none"}, "problem", "on node2, NCCL would not use"),
    ],
)
def test_obstacles_to_the_plugin_are_found_where_it_is_requested(change, level, text):
    plugin = HEALTHY["plugin"] | {"net": "bagua"}
    everyone = world(size=2, plugin=plugin | change)
    everyone.facts[0]["plugin"] = plugin
    assert found(level, text, everyone)


def test_the_plugin_has_no_effect_on_one_host_and_is_not_mentioned_without_gpus():
    one = world(size=2, hosts=1)
    one.facts[0]["plugin"] = HEALTHY["plugin"] | {"net": "bagua"}
    assert found("note", "BAGUA_NET=bagua has no effect: on one host, NCCL uses shared memory", one)
    assert not any("plugin" in each.what for each in examine(world()))


def test_how_the_backend_of_torch_distributed_connects_is_shown():
    found("ok", 'init_process_group("bagua") works over MPI', world())
    mixed = world(**{"torch.distributed": {"by": "gloo", "variables": ["MASTER_ADDR", "RANK"]}})
    assert found("problem", "some ranks would", mixed).do.startswith("set MASTER_ADDR, RANK on")
    without = {finding.what for finding in examine(world(**{"torch.distributed": None}))}
    assert not any("init_process_group" in what for what in without)


def test_healthy_hosts_have_nothing_to_be_done():
    assert levels(world()) == set()
    assert levels(world(size=1, hosts=1)) == set()


def test_another_version_on_one_rank_is_warned_of_and_a_problem_if_it_is_of_mpi():
    patched = world(versions=HEALTHY["versions"] | {"numpy": "2.2.6", "python": "3.12.2"})
    finding = found("warning", "numpy", patched)
    assert finding.what == "ranks have different versions of numpy: 2.3.0 on ranks 0-2; 2.2.6 on rank 3"
    assert "install the same on all hosts (node1, node2)" in finding.do
    assert levels(patched) == {"warning"}
    mpi = HEALTHY["MPI"] | {"library": "MPICH 5.0.2"}
    assert "MPICH 5.0.2 on rank 3" in found("problem", "versions of MPI", world(MPI=mpi)).what


def test_full_shared_memory_is_a_problem_that_names_containers():
    few = {"total": 64 << 20, "free": 20 << 20}
    finding = found("problem", "/dev/shm", shared(few))
    assert finding.what == "/dev/shm of node1 has 20 MiB free, and Open MPI needs 32 MiB for ranks 0, 1"
    assert "--shm-size" in finding.do
    assert "does not exist" in found("problem", "/dev/shm", shared(None)).what


@pytest.mark.parametrize(
    "mpi", [{"running": False}, HEALTHY["MPI"] | {"library": "MPICH Version:      5.0.2"}], ids=["gloo", "MPICH"]
)
def test_room_in_shared_memory_is_a_need_of_open_mpi_alone(mpi):
    without = shared(None)
    for each in without.facts:
        each["MPI"] = mpi
    assert levels(without) == set()
    one_rank = world(size=1, hosts=1)
    one_rank.facts[0]["shared memory"] = None
    assert levels(one_rank) == set()


def test_where_the_library_itself_differs_nothing_else_is_concluded():
    mixed = world(versions={"bagua_comm": "0.9"})
    del mixed.facts[3]["limits"]
    (finding,) = [each for each in examine(mixed) if "versions of bagua_comm" in each.what]
    assert "1.2 on ranks 0-2; 0.9 on rank 3" in finding.what
    assert all("ranks have different versions" in each.what for each in examine(mixed))
    assert levels(mixed) == {"problem", "warning"}
    assert "  node2: ranks 2, 3" in list(report.lines(mixed, examine(mixed), "doctor"))


def shared(memory):
    """Two ranks on a host with this room."""
    both = world(size=2, hosts=1)
    for each in both.facts:
        each["shared memory"] = memory
    return both


def test_low_limits_are_named_with_the_flag_of_ulimit():
    low = world(size=100, hosts=100, limits={"memlock": 65536, "nofile": 256, "nproc": 50})
    files = found("warning", "ulimit nofile", low)
    assert files.what.startswith("ulimit nofile on node100 is 256 ")
    assert files.do.startswith("ulimit -n 464,")
    assert found("warning", "ulimit nproc", low).do.startswith("ulimit -u 64,")
    assert "memlock" not in "".join(
        finding.what for finding in examine(low)
    )  # without InfiniBand, it is no limit
    infiniband = world(InfiniBand={"mlx5_0": ACTIVE}, limits={"memlock": 65536, "nofile": 20000, "nproc": None})
    infiniband.facts[2] = infiniband.facts[3]
    assert found("problem", "ulimit memlock on node2 is 64 KiB", infiniband).do.startswith("ulimit -l unlimited")


def test_infiniband_that_mpi_cannot_use_is_a_warning_where_there_are_several_hosts():
    unused = "this machine has mlx5_0, and this MPI has neither UCX nor libfabric"
    for hosts, level in ((2, "warning"), (1, "note")):
        ranks = world(hosts=hosts)
        for each in ranks.facts:
            each["InfiniBand"] = {"mlx5_0": ACTIVE}
            each["MPI"] = HEALTHY["MPI"] | {"InfiniBand": unused}
        finding = found(level, "mlx5_0", ranks)
        assert finding.what == f"{', '.join(ranks.hosts)}: {unused}"
        assert "docs/clusters/hpc.md" in finding.do


def test_infiniband_that_mpi_may_use_is_shown_by_host_and_none_where_there_is_none():
    one = world(InfiniBand={"mlx5_0": ACTIVE, "mlx5_1": "10 Gb/sec, DOWN"})
    one.facts[2] = one.facts[3]
    shown = "node2: InfiniBand or RoCE by mlx5_0 (200 Gb/sec, ACTIVE), mlx5_1 (10 Gb/sec, DOWN)"
    assert found("note", "InfiniBand", one).what == shown
    assert not any("InfiniBand" in finding.what for finding in examine(world()))


def test_more_ranks_than_cores_and_bound_ranks_are_warned_of():
    assert "5 ranks share 4 cores of node1" in found("warning", "share", world(size=5, hosts=1)).what
    bound = found("warning", "bound to one core", world(cores=[2]))
    assert bound.what.startswith("rank 3 on node2 ")
    assert "--bind-to none" in bound.do
    threads = world(size=2, hosts=1)
    threads.facts[0]["OMP_NUM_THREADS"] = None
    assert found("warning", "OMP_NUM_THREADS is not set on node1", threads).do.startswith("OMP_NUM_THREADS=2")


def test_ranks_of_one_host_that_mpi_takes_apart_are_warned_of():
    apart = world(size=2, hosts=1)
    apart.together[:] = [0, 1]
    assert "slurm.conf" in found("warning", "ranks 0, 1 run on node1, but MPI treats them", apart).do
    apart.together[:] = []  # without MPI, it is unknown
    assert levels(apart) == set()


def test_machines_with_one_name_are_two_hosts():
    twins = world(clocks={0: 0.0, 2: -3.5})
    for each in twins.facts:
        each["host"] = "localhost"
    assert levels(twins) == {"warning"}
    assert twins.hosts == {"localhost": [0, 1], "localhost (2)": [2, 3]}
    assert "that of localhost (2)" in found("warning", "clock of localhost is", twins).what


def test_nodes_are_compared_with_those_of_mpi(monkeypatch):
    """The communicator's own nodes put ranks of one host together, whatever MPI says."""
    monkeypatch.setattr(measure, "ALL_PAIRS_S", 0.01)
    monkeypatch.setattr(facts, "collect", lambda: copy.deepcopy(HEALTHY))
    assert run_ranks(2, lambda comm: doctor.examine_world(comm).together) == [[], []]
    monkeypatch.setattr(facts, "mpi_nodes", lambda comm: [0, 1])
    (world, _) = run_ranks(2, doctor.examine_world)
    assert found("warning", "ranks 0, 1 run on node1, but MPI treats them", world)


@pytest.mark.parametrize(
    ("library", "variable"), [("Open MPI v5.0.11", "OMPI_MCA_btl_tcp_if_include"), ("MPICH 5", "FI_TCP_IFACE")]
)
def test_the_network_that_was_chosen_is_seen_for_each_mpi(monkeypatch, library, variable):
    class OneRank:
        Get_library_version = staticmethod(lambda: f"{library}, and more")
        Is_initialized = staticmethod(lambda: True)
        Query_thread = staticmethod(lambda: 3)
        THREAD_MULTIPLE = 3

    monkeypatch.setitem(sys.modules, "mpi4py.MPI", OneRank)
    monkeypatch.setattr(environment, "has_ulfm", lambda: False)
    for name in ("OMPI_MCA_btl_tcp_if_include", "FI_TCP_IFACE"):
        monkeypatch.setenv(name, "eth0" if name == variable else "other")
    assert facts.mpi()["network chosen"] == "eth0"


def test_the_network_that_was_chosen_is_seen_under_torchrun(monkeypatch):
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth0"}.items():
        monkeypatch.setenv(name, value)
    assert facts.mpi() == {"running": False, "network chosen": "eth0"}
    chosen = world()
    for each in chosen.facts:
        each["MPI"] = facts.mpi()
        each["interfaces"]["eth1"] = {"address": each["interfaces"]["eth0"]["address"], "Mbit/s": None}
    assert found("ok", "ranks use the network that was chosen, eth0", chosen)


def test_an_address_that_two_hosts_have_is_warned_of_and_another_network_named():
    both = world()
    for each in both.facts:
        each["interfaces"] = {"docker0": {"address": "172.17.0.1", "Mbit/s": None}, **each["interfaces"]}
    finding = found("warning", "same address", both)
    assert "172.17.0.1 (docker0 of node1, docker0 of node2)" in finding.what
    assert finding.do.endswith("--interface eth0")
    both.facts[0]["MPI"]["network chosen"] = "eth0"
    assert levels(both) == set()


def test_interfaces_with_other_names_are_warned_of():
    other = {"ib0": {"address": "10.1.0.1", "Mbit/s": None}}
    named = world(size=2, interfaces=other)
    assert "(node1: eth0; node2: ib0)" in found("warning", "no interface has the same name", named).what


def test_clocks_that_are_apart_are_warned_of():
    assert "agree within 2.0 ms" in found("ok", "clocks", world(clocks={0: 0.0, 2: 0.002})).what
    finding = found("warning", "clock of node1", world(clocks={0: 0.0, 2: -3.5}))
    assert finding.what.startswith("the clock of node1 is 3.5 s ahead of that of node2")


def test_a_slow_pair_is_named_and_compared_with_its_kind():
    pairs = [Pair(a, b, 1e-6 if a // 2 == b // 2 else 5e-5, 1e10) for a in range(4) for b in range(a + 1, 4)]
    assert levels(world(pairs=pairs)) == set()
    pairs[-2] = Pair(1, 3, 5e-5, 1e9)
    finding = found("warning", "median", world(pairs=pairs))
    assert (
        finding.what == "rank 1 on node1 and rank 3 on node2 reach 1 GB/s, where the median between hosts is 10"
    )
    assert "on one host: 1 us and 10 GB/s" in found("ok", "on one host", world(pairs=pairs)).what


def test_missing_features_of_mpi_are_named():
    lacks = HEALTHY["MPI"] | {"threads": False, "ulfm": False}
    one = world(size=1, hosts=1, MPI=lacks)
    assert found("warning", "MPI_THREAD_MULTIPLE", one)
    assert "--ulfm" in found("note", "ULFM is off", one).do


def test_gpus_that_cannot_be_used_are_warned_of():
    assert found("note", "no host has an NVIDIA driver", world())
    gpu = {"driver": True, "count": 1, "CUDA": ""}
    some = world(size=2, gpu=gpu)
    assert "node1 has no usable GPU" in found("warning", "no usable GPU", some).what
    every = world(size=2, hosts=1, gpu=gpu)
    every.facts[0]["gpu"] = gpu
    assert found("ok", "each rank has a GPU", every)
    every.facts[0]["gpu"] = gpu | {"obstacle": "ranks [0, 1] share the GPU 0"}
    assert "since ranks [0, 1] share the GPU 0" in found("warning", "through host memory", every).what


def test_a_gpu_is_examined_where_cupy_sees_one(device, capsys, monkeypatch):
    monkeypatch.setattr(facts, "mpi_facts", dict)
    record = json.loads(output_of(capsys, "doctor", "--json"))
    assert record["ranks"][0]["gpu"]["count"] == 1
    whats = [finding["what"] for finding in record["findings"]]
    assert "each rank has a GPU, and NCCL can be used" in whats


def test_pairs_and_clocks_are_measured_alike_on_all_ranks(monkeypatch):
    monkeypatch.setattr(measure, "ALL_PAIRS_S", 0.03)

    def body(comm):
        return measure.measure_pairs(comm, [0, 1, 2]), measure.measure_clocks(comm, [0, 2])

    results = run_ranks(3, body)
    assert results[0] == results[1] == results[2]
    pairs, clocks = results[0]
    assert [(pair.a, pair.b) for pair in pairs] == [(0, 1), (0, 2), (1, 2)]
    assert all(0 < pair.latency_s < 1 and pair.bytes_per_s > 1e5 for pair in pairs)
    assert clocks.keys() == {0, 2}
    assert abs(clocks[2]) < 1  # they are one clock


def test_of_many_ranks_some_are_measured_and_those_on_every_host_first():
    assert measure.ranks_to_measure(4, [0, 2]) == [0, 1, 2, 3]
    assert measure.ranks_to_measure(100, [0, 50]) == [*range(15), 50]
    assert measure.ranks_to_measure(64, list(range(0, 64, 2))) == list(range(0, 64, 4))


def test_the_heat_map_shades_worse_values():
    pairs = [Pair(0, 1, 1e-6, 1e9), Pair(0, 2, 2e-6, 1e9), Pair(1, 2, 9e-6, 1e9)]
    lines = list(report.table("us", pairs, {pair: pair.latency_s * 1e6 for pair in pairs}, least=True))
    assert lines == [
        "us",
        " rank       0       1       2",
        "    0      .       1█      2▓",
        "    1      1█      .       9",
        "    2      2▓      9       .",
    ]


def test_one_rank_is_examined_without_mpi(capsys, monkeypatch):
    monkeypatch.setattr(facts, "mpi_facts", lambda: {"library": "Open MPI v5.0.11"})  # this starts a process
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)  # another test may have started MPI
    text = output_of(capsys, "doctor")
    assert text.startswith("python -m bagua_comm doctor: 1 rank on 1 host\n")
    assert "this is a world of one rank, without MPI (library: Open MPI v5.0.11)" in text
    assert "-> to examine several ranks: python -m bagua_comm run -n 4 -m bagua_comm doctor\n" in text
    record = json.loads(output_of(capsys, "doctor", "--json"))
    assert record["exit_code"] == 0
    assert record["ranks"][0]["versions"]["python"] == sys.version.split()[0]


@pytest.mark.parametrize("library", ["cannot be loaded: libmpi.so.40", "mpi4py is not installed"])
def test_without_an_mpi_the_way_to_one_is_named(library, capsys, monkeypatch):
    monkeypatch.setattr(facts, "mpi_facts", lambda: {"library": library})
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert "-> to examine several ranks: pip install 'bagua-comm[mpi]', or build" in output_of(capsys, "doctor")


def test_a_problem_makes_the_exit_code_1_on_all_ranks(monkeypatch, capsys):
    monkeypatch.setattr(measure, "ALL_PAIRS_S", 0.01)
    monkeypatch.setattr(facts, "collect", lambda: copy.deepcopy(HEALTHY) | {"shared memory": None})
    mine = threading.local()
    monkeypatch.setattr(bootstrap, "connect", lambda **settings: mine.comm)

    def body(comm):
        mine.comm = comm
        return cli.main(["doctor"])

    assert run_ranks(2, body) == [1, 1]
    text = capsys.readouterr().out
    assert "PROBLEM  /dev/shm of node1 does not exist" in text
    assert "1 problem, 0 warnings" in text


def test_missing_ranks_are_an_error_that_says_what_to_do(monkeypatch, capsys):
    def connect(**settings):
        raise CommTimeout("rank 1 has not come")

    monkeypatch.setattr(bootstrap, "connect", connect)
    error = output_of(capsys, "doctor", code=1)
    assert "doctor: rank 1 has not come; if all ranks run, a firewall" in error


@pytest.mark.slow
def test_four_ranks_under_mpirun_are_examined_together():
    result = run_python(4, "-m", "bagua_comm", "doctor", "--json")
    record = json.loads(result.stdout)
    problems = [each["what"] for each in record["findings"] if each["level"] == "problem"]
    assert (result.returncode, problems) == (0, []), result.stderr
    assert len(record["ranks"]) == 4
    assert len(record["pairs"]) == 6
    assert all(rank["MPI"]["threads"] for rank in record["ranks"])


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_ranks_of_torchrun_are_examined_together():
    result = torchrun(2, "-m", "bagua_comm", "doctor", "--json")
    record = json.loads(result.stdout)
    assert (result.returncode, len(record["ranks"]), len(record["pairs"])) == (0, 2, 1), result.stderr
    assert any(finding["what"].startswith("torchrun started these ranks") for finding in record["findings"])


@pytest.mark.slow
def test_ranks_with_another_version_end_with_exit_code_1(tmp_path):
    script = """
        import os, sys
        import bagua_comm.commands.info as info
        if os.environ["RANK"] == "1":
            info.__version__ = "0.0.1"
        from bagua_comm.__main__ import main
        sys.exit(main(["doctor"]))
    """
    result = run_python(2, script=(tmp_path / "script.py", script))
    assert result.returncode == 1, result.stderr
    assert "PROBLEM  ranks have different versions of bagua_comm" in result.stdout


@pytest.mark.slow
def test_a_doctor_whose_reader_goes_away_ends_quietly():
    command = [sys.executable, "-m", "bagua_comm", "doctor"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=300) == 141
    assert error == ""
