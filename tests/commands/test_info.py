"""`info`: what it knows about this machine."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.commands import output_of

from bagua_comm import kernels, net
from bagua_comm.commands import info
from bagua_comm.commands.info import collect_info


def test_info_prints_versions_mpi_and_transports(capsys):
    facts = json.loads(output_of(capsys, "info", "--json"))
    assert facts["MPI"]["thread level"] == "MPI_THREAD_MULTIPLE"
    assert facts["MPI"]["ranks may die"] == "yes, under run --ulfm, --spares or --restarts"
    assert facts["versions"]["numpy"] == np.__version__
    assert "Open MPI" in facts["MPI"]["library"]
    assert "bfloat16" in facts["transports carry"]["dtypes"]
    assert facts["devices"]["CUDA devices"] == 0
    assert facts["devices"]["device arrays"] == "not carried: there is no device"
    assert "nccl" in facts["transports carry"]
    assert facts["torch.distributed"] == {"backend bagua": 'import bagua_torch; init_process_group("bagua")'}
    assert facts["NCCL's network plugin"]["source"] == net.source_hash()
    assert facts["NCCL's network plugin"]["kept away by"] == "nothing"
    assert facts["kernels"] == {"of NumPy arrays": kernels.state()}


def test_info_prints_each_variable_of_the_page_that_is_set(monkeypatch):
    page = Path(__file__).parents[2].joinpath("docs/reference/environment.md").read_text()
    named = set(re.findall(r"`([A-Z]+_[A-Za-z_]+|RANK)(?:=1)?`", page))
    assert {"BAGUA_TRACEBACK", "OMPI_MCA_btl_tcp_eager_limit", "RANK", "SLURM_PROCID", "MASTER_PORT"} <= named
    for name in named:
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("HOME_OF_OTHERS", "secret")
    monkeypatch.setattr(info, "mpi_facts", dict)  # this starts a process
    shown = collect_info()["environment"]
    assert named <= shown.keys()
    assert "HOME_OF_OTHERS" not in shown


@pytest.mark.parametrize(
    ("text", "library", "survives"),
    [
        ("MPICH Version:      5.0.2\nMPICH configure:    --with-device=ch4:ucx,ofi\n", "MPICH 5.0.2", False),
        ("MVAPICH2 Version      :\t2.3.7\nMVAPICH2 Device: ch3\n", "MVAPICH2 2.3.7", False),
        (
            "MPI VERSION    : CRAY MPICH version 8.1.25\nMPI BUILD INFO : Sat\n",
            "CRAY MPICH version 8.1.25",
            False,
        ),
        ("Intel(R) MPI Library 2021.18 for Linux* OS\n", "Intel(R) MPI Library 2021.18 for Linux* OS", False),
        ("Open MPI v5.0.11, package: Open MPI a@b Distribution\x00", "Open MPI v5.0.11", True),
    ],
)
def test_info_names_each_mpi_and_whether_run_lets_ranks_die(monkeypatch, text, library, survives):
    """Under MPICH the library was "MPICH configure: ..." and `run --ulfm`, which refuses it, was said to work."""
    answer = subprocess.CompletedProcess([], 0, json.dumps([text, True, True, ""]), "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    found = info.mpi_facts()
    assert found["library"] == library
    assert found["ranks may die"].startswith("yes") == survives


@pytest.mark.parametrize(
    ("libraries", "has"),
    [
        ("", "has neither UCX nor libfabric"),
        ("7f00 r-xp 08:01 5 /opt/lib/libucp.so.0\n", "has UCX, but has not loaded libibverbs"),
        ("7f00 r-xp 08:01 5 /opt/lib/libucp.so.0\n7f01 r-xp 08:01 6 /lib/libibverbs.so.1\n", None),
    ],
)
def test_info_shows_infiniband_and_whether_mpi_can_use_it(monkeypatch, ports, libraries, has):
    answer = subprocess.CompletedProcess([], 0, json.dumps(["Open MPI v5.0.11", True, True, libraries]), "")
    ports(mlx5_0=("200 Gb/sec (4X HDR)", "4: ACTIVE"))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    monkeypatch.setattr(info, "plugin_facts", dict)  # this starts a compiler
    facts = collect_info()
    assert facts["InfiniBand"] == {"mlx5_0": "200 Gb/sec, ACTIVE"}
    assert (has is None) == ("InfiniBand" not in facts["MPI"])
    if has is not None:
        assert facts["MPI"]["InfiniBand"] == (
            f"this machine has mlx5_0 (200 Gb/sec, ACTIVE), and this MPI {has}: between nodes it uses TCP; "
            "see docs/clusters/hpc.md"
        )


def test_info_without_infiniband_does_not_mention_it(monkeypatch, ports):
    ports()
    assert "InfiniBand" not in info.mpi_facts()
    monkeypatch.setattr(info, "mpi_facts", dict)
    assert "InfiniBand" not in collect_info()


def test_long_names_do_not_run_into_their_values(monkeypatch, capsys):
    facts = {"environment": {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "A": "2"}}
    monkeypatch.setattr(info, "collect_info", lambda: facts)
    assert info.run(argparse.Namespace(json=False)) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  OMPI_ALLOW_RUN_AS_ROOT_CONFIRM  1",
        "  A                               2",
    ]


def test_info_names_what_the_backend_of_torch_distributed_lacks(monkeypatch):
    monkeypatch.setattr(info, "installed", lambda *_: "not installed")
    assert info.torch_backend() == "needs PyTorch: pip install 'bagua-comm[torch]'"


@pytest.mark.needs("cupy")
def test_info_without_a_driver_names_it():
    facts = collect_info()["devices"]
    assert facts["CUDA driver"] == "none"
    assert facts["CUDA"] == "no device can be used: there is no NVIDIA driver"
    assert re.fullmatch(r"2\.\d+\.\d+", facts["NCCL"])
    assert re.fullmatch(r"13\.\d+", facts["NVRTC"])


def test_info_without_cupy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    facts = collect_info()["devices"]
    assert "bagua-comm[cuda13]" in facts["CUDA"]
    assert facts["device arrays"] == "not carried: there is no device"


@pytest.mark.parametrize(
    ("shares", "side"),
    [("0", "over NCCL up to 2 ranks on this machine"), ("1", "over NCCL, also where ranks share a GPU")],
)
def test_info_shows_devices_and_the_transports_of_their_arrays(device, monkeypatch, shares, side):
    from cupy.cuda import runtime

    found = {"name": b"a GPU", "totalGlobalMem": 80 * 2**30, "major": 9, "minor": 0}
    monkeypatch.setattr(runtime, "getDeviceProperties", lambda index: found)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", shares)
    device.count = 2
    facts = collect_info()["devices"]
    assert facts["CUDA devices"] == 2
    assert facts["CUDA driver"] == "13.0"
    assert facts["NCCL"] == "2.32.3"
    assert facts["GPU 1"] == "a GPU, 80 GiB, compute capability 9.0, at 0000:01:00.0"
    assert facts["device arrays"].startswith(side)


def test_info_survives_facts_that_are_not_available(device, monkeypatch):
    from cupy.cuda import nccl, runtime

    monkeypatch.setattr(nccl, "available", False)
    monkeypatch.setattr(nccl, "get_version", lambda: 1 / 0)
    monkeypatch.setattr(runtime, "getDeviceProperties", lambda index: 1 / 0)
    facts = collect_info()["devices"]
    assert facts["NCCL"] == facts["GPU 0"] == "not available: division by zero"
    assert facts["device arrays"].startswith("through host memory (staged), since rank 0 cannot load NCCL")
