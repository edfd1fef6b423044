"""Programs that a real Slurm starts, on two emulated nodes; see `benchmarks.slurm.cluster`."""

import re
import sys
import textwrap
from pathlib import Path

import pytest
from support.launch import torchrun

from bagua_comm.launch.mpirun import find_mpirun
from benchmarks.slurm import cluster as slurm_of_two_nodes
from benchmarks.slurm import trials

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

WHERE = """
import socket
import numpy as np
import bagua_comm

with bagua_comm.connect(timeout_s=60) as comm:
    total = comm.allreduce(np.ones(300_000))
    assert (total == comm.size).all()
    places = comm.allgather_object((socket.gethostname(), comm.node, comm.local_rank, comm.by_node().intra.size))
    if comm.rank == 0:
        print(comm.size, *places)
"""

BACKEND = """
import torch, torch.distributed as dist
import bagua_torch

dist.init_process_group("bagua")
x = torch.full((300_000,), dist.get_rank() + 1.0)
dist.all_reduce(x)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
model(torch.ones(2, 3)).sum().backward()
if dist.get_rank() == 0:
    print(dist.get_world_size(), x[0].item(), model.module.weight.grad.tolist())
dist.destroy_process_group()
"""

ON_TWO_NODES = "2 ('n1', 0, 0, 1) ('n2', 1, 0, 1)\n"


@pytest.fixture
def where(tmp_path):
    """The path of a program whose rank 0 prints where all ranks are."""
    path = tmp_path / "where.py"
    path.write_text(WHERE)
    return path


def mpi4py_needs_open_mpi():
    """Skip a test of the MPI of Open MPI's wheel where mpi4py uses another one."""
    from mpi4py import MPI

    if MPI.get_vendor()[0] != "Open MPI":
        pytest.skip(f"mpi4py uses {MPI.get_vendor()[0]}, which Slurm's PMI2 serves; this is about Open MPI")


def test_the_backend_of_torch_distributed_under_srun(slurm, tmp_path):
    script = tmp_path / "backend.py"
    script.write_text(BACKEND)
    result = slurm.run("srun", "--mpi=pmix", "-N2", "-n2", sys.executable, script)
    assert result.returncode == 0, result.stderr + slurm.logs()
    assert result.stdout == "2 3.0 [[2.0, 2.0, 2.0]]\n"


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ("-N2 -n2", ON_TWO_NODES),
        ("-N2 -n4", "4 ('n1', 0, 0, 2) ('n1', 0, 1, 2) ('n2', 1, 0, 2) ('n2', 1, 1, 2)\n"),
        ("-N1 -n2", "2 ('n1', 0, 0, 2) ('n1', 0, 1, 2)\n"),
    ],
)
def test_srun_with_pmix_makes_one_world_with_its_nodes(slurm, where, options, places):
    result = slurm.run("srun", "--mpi=pmix", *options.split(), sys.executable, where)
    assert result.returncode == 0, result.stderr + slurm.logs()
    assert result.stdout == places


NODES = """
from mpi4py import MPI
import bagua_comm

with bagua_comm.connect(timeout_s=60) as comm:
    here = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    print(here.Get_size(), comm.local_size, comm.transports[0]._endpoint.window is not None)
"""


def test_ranks_of_a_host_share_a_node_though_slurm_has_another_name_for_it(with_slurm, tmp_path):
    """Open MPI then finds each rank alone on its host. (Two nodes see none of each other's processes here.)"""
    mpi4py_needs_open_mpi()
    script = tmp_path / "nodes.py"
    script.write_text(NODES)
    with slurm_of_two_nodes.start(named=False, shared=[tmp_path]) as slurm:
        for nodes, window in (1, True), (2, False):
            result = slurm.run("srun", "--mpi=pmix", f"-N{nodes}", "-n2", sys.executable, script)
            assert result.returncode == 0, result.stderr + slurm.logs()
            assert result.stdout == f"1 2 {window}\n" * 2
        doctor = [sys.executable, "-m", "bagua_comm", "doctor"]
        result = slurm.run("srun", "--mpi=pmix", "-N1", "-n2", *doctor)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "WARNING  ranks 0, 1 run on " in result.stdout
        assert ", but MPI treats them as ranks of several hosts" in result.stdout


ALONE = """
import bagua_comm
from bagua_comm import BootstrapError
try:
    bagua_comm.connect(timeout_s=60)
except BootstrapError as error:
    print(error, flush=True)
    raise
"""


@pytest.mark.parametrize(
    ("module", "mpi", "started"),
    [
        ("bagua_comm", "none", "srun started 2 processes (SLURM_STEP_NUM_TASKS=2)"),
        ("bagua_torch", "pmi2", "srun --mpi=pmi2 started 2 processes (PMI_SIZE=2)"),
    ],
)
def test_ranks_that_do_not_find_each_other_say_what_to_add(slurm, tmp_path, module, mpi, started):
    script = tmp_path / "alone.py"
    script.write_text(
        ALONE.replace("bagua_comm.connect", f"{module}.connect").replace("import", f"import {module},", 1)
    )
    result = slurm.run("srun", f"--mpi={mpi}", "-N2", "-n2", sys.executable, script)
    assert result.returncode == 1, result.stderr + slurm.logs()
    assert result.stdout.count(f"connect: {started}, but this one is alone, since mpi4py's Open MPI ") == 2
    assert result.stdout.count("start it with srun --mpi=pmix (srun --mpi=list") == 2
    assert result.stdout.count("If this world is meant, say connect(alone=True)\n") == 2
    assert re.search(r"alone.py:\d+, in <module>", result.stderr)


WITHOUT_MPI4PY = """
import importlib.util, sys
importlib.util.find_spec = lambda name: None
sys.modules["mpi4py"] = None
"""


def test_tasks_without_mpi4py_get_an_error_that_says_how_to_install_it(slurm, tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(WITHOUT_MPI4PY + ALONE)
    result = slurm.run("srun", "-N2", "-n2", sys.executable, script)
    assert result.returncode == 1
    assert (
        result.stdout.count("since mpi4py is not installed. To change that, pip install 'bagua-comm[mpi]'") == 2
    )


def test_each_task_may_be_a_world_of_its_own_if_it_says_so(slurm):
    code = "import bagua_comm; print(bagua_comm.connect(alone=True).size)"
    result = slurm.run("srun", "-N2", "-n2", sys.executable, "-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "1\n1\n"


def test_the_shell_of_a_batch_job_is_a_world_of_one_and_its_steps_are_not(slurm, where, tmp_path):
    job = tmp_path / "job.sh"
    job.write_text(
        textwrap.dedent(f"""\
        #!/bin/sh
        #SBATCH --nodes=2 --ntasks=2
        echo "$SLURM_NTASKS tasks"
        {sys.executable} {where}
        srun --mpi=pmix {sys.executable} {where}
        """)
    )
    result = slurm.batch(job)
    assert result.returncode == 0, result.stdout + result.stderr + slurm.logs()
    assert result.stdout == "2 tasks\n1 ('n1', 0, 0, 1)\n" + ON_TWO_NODES


@pytest.mark.parametrize("mpi", ["none", "pmi2", "pmix"])
def test_a_job_that_a_task_submits_is_a_world_of_one_and_its_steps_are_not(slurm, where, tmp_path, mpi):
    job, task, output = tmp_path / "job.sh", tmp_path / "task.sh", tmp_path / "inner.out"
    job.write_text(f"#!/bin/sh\n{sys.executable} {where}\nsrun --mpi=pmix {sys.executable} {where}\n")
    submit = f"sbatch --parsable --output={output} -N2 -n2 --dependency=afterany:$SLURM_JOB_ID {job}"
    task.write_text(f'#!/bin/sh\nif [ "$SLURM_PROCID" = 0 ]; then {submit}; fi\n')
    result = slurm.run("srun", f"--mpi={mpi}", "-N2", "-n2", "sh", task)
    assert result.returncode == 0, result.stderr + slurm.logs()
    number = result.stdout.strip()
    slurm.run("srun", "-n1", f"--dependency=afterany:{number}", "true")
    assert output.read_text() == "1 ('n1', 0, 0, 1)\n" + ON_TWO_NODES, slurm.logs()


@pytest.mark.parametrize("launcher", ["mpirun", "run"])
def test_mpirun_starts_a_rank_for_each_task_of_an_allocation(slurm, where, launcher):
    mpi4py_needs_open_mpi()
    by_run = [sys.executable, "-m", "bagua_comm", "run", "-n", "2", where]
    command = by_run if launcher == "run" else [find_mpirun(), "-n", "2", sys.executable, where]
    result = slurm.run("salloc", "--quiet", "-N2", "-n2", *command)
    assert result.returncode == 0, result.stderr + slurm.logs()
    assert result.stdout == ON_TWO_NODES


def test_a_task_on_each_node_may_start_torchrun(slurm, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WHERE.replace("bagua_comm", "bagua_torch"))
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=n1:{slurm_of_two_nodes.free_ports(1)[0]}", "--rdzv-id=1"]
    result = slurm.run("srun", "-N2", "-n2", *start, *meet, script, timeout_s=200)
    assert result.returncode == 0, result.stderr + slurm.logs()
    assert re.fullmatch(r"2 \('n[12]', 0, 0, 1\) \('n[12]', 1, 0, 1\)\n", result.stdout)


STEPS = """
import subprocess
from bagua_comm.launch.heartbeat import Heartbeat
from bagua_comm.launch.remote_shell import find_remote_shell

def steps():
    command = "squeue --steps --noheader --job=$SLURM_JOB_ID"
    return len(subprocess.run(command, shell=True, check=True, capture_output=True).stdout.splitlines())

shell = find_remote_shell([])
beats = Heartbeat(shell, ["n1", "n2"])
assert shell.ask(["n1", "n2"], "true") == {"n1": "", "n2": ""}
print(steps(), beats.lost())
beats.close()
print(steps())
"""


def test_heartbeats_leave_no_step_on_a_node(slurm, tmp_path):
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    result = slurm.run("salloc", "--quiet", "-N2", "-n2", sys.executable, script)
    assert result.returncode == 0, result.stderr + slurm.logs()
    assert result.stdout == "2 []\n0\n"


BY_TESTS = {
    "srun with PMIx",
    "salloc --exclusive without tasks",
    "cores of a task",
    "a heterogeneous job, without srun",
    "a written script, as an array",
    "a rank dies, too few are left",
    "a rank dies, and no restart is left",
    "scancel --signal=KILL of the step of mpirun",
    "scancel --batch --signal=TERM",
    "a node goes down, --no-kill",
}
"""The trials of `benchmarks.slurm` that depend most on this library."""


@pytest.mark.parametrize("name", sorted(BY_TESTS))
def test_what_a_user_of_slurm_types(slurm, name):
    mpi4py_needs_open_mpi()
    (trial,) = [trial for trial in trials.TRIALS if trial.name == name]
    result = trials.run(slurm, trial)
    assert (result["result"], result["faults"]) == ("equal", []), f"{result}\n{slurm.logs()}"


@pytest.mark.parametrize(
    ("command", "code", "leaves"),
    [
        ("echo n2", 0, ()),
        ("echo n1; exit 3", 0, ()),
        ("echo n1; touch /dev/shm/file", 0, ()),
        ("echo n1", 0, ("n1: file",)),
    ],
)
def test_a_trial_that_comes_out_otherwise_is_seen(slurm, command, code, leaves):
    trial = trials.Trial("another", f"srun -Q -n1 -w n1 sh -c '{command}'", "n1\n.*", code, leaves=leaves)
    assert trials.run(slurm, trial)["result"] == "differs"


ONE_SCRIPT = """
import numpy as np
import bagua_torch

with bagua_torch.connect(timeout_s=60) as comm:
    x = comm.allreduce(np.arange(100_000.0) * (comm.rank + 1))
    comm.check_consistency(x)
    if comm.rank == 0:
        print(comm.size, x.sum())
"""


@pytest.mark.timeout(900)
def test_one_script_prints_the_same_whatever_starts_it(slurm, tmp_path):
    script: Path = tmp_path / "script.py"
    script.write_text(ONE_SCRIPT)
    python = [sys.executable, script]
    results = {
        "mpirun": slurm.run(find_mpirun(), "-n", "2", "--oversubscribe", *python, timeout_s=200),
        "torchrun": torchrun(2, script, timeout_s=200),
        "srun": slurm.run("srun", "--mpi=pmix", "-N2", "-n2", *python, timeout_s=200),
    }
    printed = {name: (result.returncode, result.stdout) for name, result in results.items()}
    expected = f"2 {3.0 * sum(range(100_000))}\n"
    assert printed == dict.fromkeys(results, (0, expected)), results
