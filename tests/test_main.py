"""The command line."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launch import run_python

from bagua_comm import __main__ as cli


def test_run_passes_arguments_and_exit_codes_on(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    result = run_python(1, script, "-x", "--epochs", "2")
    assert result.returncode == 3
    assert "['-x', '--epochs', '2']" in result.stdout


def test_run_passes_signals_on(tmp_path):
    script = tmp_path / "script.py"
    pids = tmp_path / "pids"
    script.write_text(f"import os, time\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')\ntime.sleep(60)")
    command = [sys.executable, "-m", "bagua_comm", "run", "-n", "2", str(script)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and (not pids.exists() or len(pids.read_text().split()) < 2):
        time.sleep(0.05)
    ranks = [int(pid) for pid in pids.read_text().split()]

    process.send_signal(signal.SIGTERM)

    assert process.wait(timeout=90) != 0
    assert len(ranks) == 2
    while time.monotonic() < deadline and any(_runs(pid) for pid in ranks):
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in ranks)


def _runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_run_needs_a_script_that_exists(capsys):
    assert cli.main(["run", "-n", "2", "no_such_file.py"]) == 2
    assert "there is no file no_such_file.py" in capsys.readouterr().err


def test_run_without_mpirun_says_what_brings_one(monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_mpirun", lambda: None)
    assert cli.main(["run", __file__]) == 127
    assert "bagua-comm[mpi]" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", ["0", "-1", "two"])
def test_run_needs_a_positive_number_of_ranks(ranks, capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", "-n", ranks, __file__])
    assert "-n" in capsys.readouterr().err


def test_more_ranks_than_cores_are_oversubscribed_and_yield(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cli, "_version_of", lambda _: "mpirun (Open MPI) 5.0.11")

    flags, variables = cli.launch_settings("mpirun", 4, local=True)
    assert "--oversubscribe" in flags
    assert "mpi_yield_when_idle" in flags
    assert variables["OMP_NUM_THREADS"] == "1"

    flags, variables = cli.launch_settings("mpirun", 1, local=True)
    assert "--oversubscribe" not in flags
    assert variables["OMP_NUM_THREADS"] == "2"


def test_other_mpis_get_no_flags_of_open_mpi(monkeypatch):
    monkeypatch.setattr(cli, "_version_of", lambda _: "HYDRA build details")
    assert cli.launch_settings("mpirun", 64, local=True)[0] == []


@pytest.fixture
def open_mpi(monkeypatch):
    """An Open MPI on a host of two cores, where nobody has said anything about networks."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(cli, "_version_of", lambda _: "mpirun (Open MPI) 5.0.11")
    for name in ("OMPI_MCA_btl", *cli.ALLOCATIONS):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def uses_shared_memory_alone(ranks=2, *, local=True, given=()):
    flags, _ = cli.launch_settings("mpirun", ranks, local=local, given=given)
    return "self,sm" in flags


def test_ranks_on_one_host_use_shared_memory_alone(open_mpi):
    assert uses_shared_memory_alone()
    assert uses_shared_memory_alone(given=["--report-bindings", "--mca", "mpi_show_handle_leaks", "1"])


def test_ranks_use_the_network_where_they_may_need_it(open_mpi, tmp_path):
    assert not uses_shared_memory_alone(local=False)
    assert not uses_shared_memory_alone(given=["--hostfile", "hosts"])
    assert not uses_shared_memory_alone(given=["--hostfile=hosts"])
    assert not uses_shared_memory_alone(ranks=10**6)  # more than there is room for in /dev/shm
    open_mpi.setenv("SLURM_JOB_ID", "7")
    assert not uses_shared_memory_alone()
    open_mpi.delenv("SLURM_JOB_ID")

    hosts = tmp_path / "etc" / "prte-default-hostfile"
    hosts.parent.mkdir()
    mpirun = str(tmp_path / "bin" / "mpirun")
    hosts.write_text("# nothing but a comment\n\n")
    assert "self,sm" in cli.launch_settings(mpirun, 2, local=True)[0]
    hosts.write_text("# two hosts\na slots=4\nb slots=4\n")
    assert "self,sm" not in cli.launch_settings(mpirun, 2, local=True)[0]


def test_who_has_chosen_how_ranks_talk_is_obeyed(open_mpi):
    assert not uses_shared_memory_alone(given=["--mca", "btl", "tcp,self"])
    open_mpi.setenv("OMPI_MCA_btl", "tcp,self")
    assert not uses_shared_memory_alone()


@pytest.mark.slow
def test_ranks_on_one_host_listen_on_no_port(tmp_path):
    script = """
        import bagua_comm, os
        with bagua_comm.connect(timeout_s=60) as comm:
            comm.barrier()
            files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
            mine = {os.readlink(file) for file in files if os.path.lexists(file)}
            lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
            listening = [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in mine]
            print("listens at", listening, flush=True)
    """
    result = run_python(2, script=(tmp_path / "script.py", script))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("listens at []") == 2


def test_ranks_on_one_host_are_told_where_to_meet(open_mpi):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        open_mpi.delenv(name, raising=False)
    _, variables = cli.launch_settings("mpirun", 2, local=True)
    assert variables["MASTER_ADDR"] == "127.0.0.1"
    with socket.socket() as free:
        free.bind(("127.0.0.1", int(variables["MASTER_PORT"])))
    for elsewhere in ({"local": False}, {"local": True, "given": ["--hostfile=hosts"]}):
        assert "MASTER_PORT" not in cli.launch_settings("mpirun", 2, **elsewhere)[1]
    open_mpi.setenv("MASTER_PORT", "7")
    assert "MASTER_ADDR" not in cli.launch_settings("mpirun", 2, local=True)[1]


def test_a_rank_of_open_mpi_has_its_numbers_in_torchruns_names_unless_they_are_set():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    given = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    mpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in given.items()}
    show = [*cli.PER_RANK, sys.executable, "-c", f"import os; print(*map(os.environ.get, {names}))"]
    environment = {key: value for key, value in os.environ.items() if key not in names}

    def shown(**more):
        return subprocess.run(
            show, env={**environment, **mpi, **more}, capture_output=True, text=True, check=True
        ).stdout

    assert shown() == "3 4 1 2\n"
    assert shown(LOCAL_RANK="0") == "3 4 0 2\n"


def test_ulfm_is_one_flag_of_open_mpi_and_of_no_other(open_mpi, capsys):
    open_mpi.setattr(cli, "find_mpirun", lambda: "mpirun")
    assert cli.main(["run", "-n", "2", "--ulfm", "--dry-run", __file__]) == 0
    assert " --with-ft ulfm " in capsys.readouterr().out
    assert cli.main(["run", "-n", "2", "--dry-run", __file__]) == 0
    assert "ulfm" not in capsys.readouterr().out

    open_mpi.setattr(cli, "_version_of", lambda _: "HYDRA build details")
    assert cli.main(["run", "-n", "2", "--ulfm", "--dry-run", __file__]) == 2
    assert "--ulfm needs Open MPI" in capsys.readouterr().err


def test_the_command_line_needs_no_docstrings():
    command = [sys.executable, "-OO", "-m", "bagua_comm", "run", "--dry-run", __file__]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_info_prints_versions_mpi_and_transports():
    command = [sys.executable, "-m", "bagua_comm", "info"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout
    facts = json.loads(
        subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=90, check=True).stdout
    )
    assert facts["MPI"]["thread level"] == "MPI_THREAD_MULTIPLE"
    assert facts["versions"]["numpy"] in text
    assert "Open MPI" in facts["MPI"]["library"]
    assert "bfloat16" in facts["transports carry"]["dtypes"]
    assert facts["devices"]["CUDA devices"] == 0
    assert facts["devices"]["device arrays"] == "not carried: there is no device"
    assert "nccl" in facts["transports carry"]


def test_info_without_a_driver_says_what_is_missing():
    facts = cli.collect_info()["devices"]
    assert facts["CUDA driver"] == "none"
    assert facts["CUDA"] == "no device can be used: there is no NVIDIA driver"
    assert re.fullmatch(r"2\.\d+\.\d+", facts["NCCL"])
    assert re.fullmatch(r"13\.\d+", facts["NVRTC"])


def test_info_without_cupy_says_what_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    facts = cli.collect_info()["devices"]
    assert "bagua-comm[cuda13]" in facts["CUDA"]
    assert facts["device arrays"] == "not carried: there is no device"


@pytest.mark.parametrize(
    ("shares", "side"),
    [("0", "over NCCL up to 2 ranks on this machine"), ("1", "over NCCL, also where ranks share a GPU")],
)
def test_info_shows_devices_and_what_carries_their_arrays(device, monkeypatch, shares, side):
    from cupy.cuda import runtime

    found = {"name": b"a GPU", "totalGlobalMem": 80 * 2**30, "major": 9, "minor": 0}
    monkeypatch.setattr(runtime, "getDeviceProperties", lambda index: found)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", shares)
    device.count = 2
    facts = cli.collect_info()["devices"]
    assert facts["CUDA devices"] == 2
    assert facts["CUDA driver"] == "13.0"
    assert facts["NCCL"] == "2.32.3"
    assert facts["GPU 1"] == "a GPU, 80 GiB, compute capability 9.0, at 0000:01:00.0"
    assert facts["device arrays"].startswith(side)


def test_info_survives_what_cannot_be_asked(device, monkeypatch):
    from cupy.cuda import nccl, runtime

    monkeypatch.setattr(nccl, "available", False)
    monkeypatch.setattr(nccl, "get_version", lambda: 1 / 0)
    monkeypatch.setattr(runtime, "getDeviceProperties", lambda index: 1 / 0)
    facts = cli.collect_info()["devices"]
    assert facts["NCCL"] == facts["GPU 0"] == "not available: division by zero"
    assert facts["device arrays"].startswith("through host memory (staged), since rank 0 cannot load NCCL")
