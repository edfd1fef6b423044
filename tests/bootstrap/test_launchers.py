"""Launchers are recognised by environment variables alone, and a world with too few ranks is explained."""

import os
import subprocess
import sys

import pytest

import bagua_comm
from bagua_comm import BootstrapError
from bagua_comm.bootstrap import launchers
from bagua_comm.bootstrap.launchers import (
    ELASTIC,
    HYDRA,
    OPEN_MPI,
    PMI,
    PMIX,
    SRUN,
    SRUN_PMI2,
    SRUN_PMIX,
    TORCHRUN,
    Launch,
    complaint,
    find,
    without_inherited,
)
from bagua_comm.system import processes
from bagua_comm.transports import LocalTransport

STEP = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
ONE_TASK_PER_NODE = {**STEP, "SLURM_PROCID": "0"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
OF_MPIRUN = {"PMIX_NAMESPACE": "prterun-n1-9@1", "PMIX_RANK": "3"}
OF_HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}
PYTORCH = {"RANK": "3", "WORLD_SIZE": "4"}
OF_TORCHRUN = {**PYTORCH, "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        ({}, None),
        (MPIRUN, Launch(OPEN_MPI, 3, 4)),
        ({**MPIRUN, **OF_MPIRUN}, Launch(OPEN_MPI, 3, 4)),
        (OF_HYDRA, Launch(HYDRA, 3, 4)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Launch(PMI, 1, 2)),
        (OF_MPIRUN, Launch(PMIX, 3, None)),
        (STEP, Launch(SRUN, 1, 2)),
        ({**STEP, "PMI_RANK": "1", "PMI_SIZE": "2"}, Launch(SRUN_PMI2, 1, 2)),
        ({**STEP, "PMIX_NAMESPACE": "slurm.pmix.7.0", "PMIX_RANK": "1"}, Launch(SRUN_PMIX, 1, 2)),
        (PYTORCH, Launch(TORCHRUN, 3, 4)),
        (OF_TORCHRUN, Launch(ELASTIC, 3, 4)),
        # One launcher inside of another: the inner one counts.
        ({**ONE_TASK_PER_NODE, **MPIRUN, **OF_MPIRUN}, Launch(OPEN_MPI, 3, 4)),
        ({**ONE_TASK_PER_NODE, **OF_HYDRA}, Launch(HYDRA, 3, 4)),
        ({**ONE_TASK_PER_NODE, **OF_TORCHRUN}, Launch(ELASTIC, 3, 4)),
        ({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "2", **OF_TORCHRUN}, Launch(ELASTIC, 3, 4)),
        # `run` gives mpirun's numbers PyTorch's names, too; a script may do so under srun.
        ({**MPIRUN, **PYTORCH}, Launch(OPEN_MPI, 3, 4)),
        ({**STEP, "RANK": "1", "WORLD_SIZE": "2"}, Launch(TORCHRUN, 1, 2)),
        # The shell of a batch job is no task of a step.
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),
        # Numbers that are none say nothing.
        ({"PMI_RANK": "", "PMI_SIZE": "many"}, Launch(PMI, None, None)),
        ({"WORLD_SIZE": "4"}, None),
    ],
)
def test_the_closest_launcher_is_found(variables, launch):
    assert find(variables) == launch


BY_PMIX = {"PMIX_NAMESPACE": "slurm.pmix.7.0", "PMIX_RANK": "1"}
BY_PMI2 = {"PMI_JOBID": "7.0", "PMI_RANK": "1", "PMI_SIZE": "2"}
NEXT_JOB = {"SLURM_JOB_ID": "8"}
"""The variables that sbatch changes if a task submits a job of the same number of tasks."""


@pytest.mark.parametrize(
    ("variables", "step", "launcher"),
    [
        # A task of a step is one of many, whatever other step's task submitted its job.
        (STEP, "7.0", SRUN),
        (STEP, None, SRUN),
        ({**STEP, **BY_PMIX}, "7.0", SRUN_PMIX),
        ({**STEP, **BY_PMI2}, "7.0", SRUN_PMI2),
        ({**STEP, **NEXT_JOB, **BY_PMIX}, "8.0", SRUN),
        ({**STEP, **NEXT_JOB, **BY_PMI2}, "8.3", SRUN),
        # The script of a job that a task submitted has the variables of that task's step.
        ({**STEP, **NEXT_JOB}, "8.batch", None),
        ({**STEP, **NEXT_JOB, **BY_PMIX}, "8.batch", None),
        ({**STEP, **NEXT_JOB, **BY_PMI2}, "8.batch", None),
        ({**STEP, **NEXT_JOB, "PMI_RANK": "1", "PMI_SIZE": "2"}, "8.batch", None),
        # So has the shell of salloc, which runs below the task.
        ({**STEP, **NEXT_JOB}, "7.0", None),
        ({**STEP, **NEXT_JOB, **BY_PMIX}, "7.0", None),
        # Where the steps of Slurm are hidden, variables may still show them.
        ({**STEP, **NEXT_JOB, **BY_PMIX}, None, None),
        ({**STEP, **NEXT_JOB, **BY_PMI2}, None, None),
        ({**STEP, **NEXT_JOB, "SLURM_NTASKS": "1"}, None, None),
        # In such a script, another launcher may start ranks.
        ({**STEP, **NEXT_JOB, **BY_PMIX, **MPIRUN, **OF_MPIRUN}, "8.batch", OPEN_MPI),
        ({**STEP, **NEXT_JOB, **BY_PMI2, **OF_HYDRA}, "8.batch", HYDRA),
        ({**STEP, **NEXT_JOB, **OF_TORCHRUN}, "8.batch", ELASTIC),
        # The parts of a heterogeneous job may have other numbers than SLURM_JOB_ID.
        ({**STEP, **BY_PMIX, "SLURM_HET_SIZE": "2"}, "8.0", SRUN_PMIX),
    ],
)
def test_variables_of_another_step_do_not_count(variables, step, launcher):
    launch = find(without_inherited(variables, step))
    assert (launch and launch.launcher) == launcher


@pytest.mark.parametrize(
    ("modes", "namespace", "settings"),
    [
        ("munge,native", "slurm.pmix.8.0", {"PMIX_MCA_psec": "native"}),
        ("munge", "slurm.pmix.8.0", {}),
        ("munge,native", "prterun-n1-7@1", {}),
    ],
)
def test_a_pmix_without_munge_does_not_complain_where_slurm_accepts_others(modes, namespace, settings):
    variables = {"PMIX_SECURITY_MODE": modes, "PMIX_NAMESPACE": namespace, "PMIX_RANK": "0"}
    assert launchers.pmix_settings({**variables, "SLURM_STEP_NUM_TASKS": "2"}) == settings


def test_a_job_that_a_task_submitted_is_a_world_of_one(monkeypatch):
    for name, value in {**STEP, **NEXT_JOB, **BY_PMIX}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(bagua_comm.bootstrap.environment, "slurm_step", lambda: "8.batch")
    with bagua_comm.connect() as comm:
        assert (comm.size, comm.transports[0].name) == (1, "local")


@pytest.mark.parametrize(
    ("title", "step"), [("slurmstepd: [8.batch]", "8.batch"), ("slurmstepd: [65+1.0]", "65.0"), ("me", None)]
)
def test_the_step_of_a_process_is_the_title_of_the_slurmstepd_above_it(title, step):
    """The shell stands for slurmstepd; it must not become Python, so it has something to do after it."""
    code = f"import runpy; print(runpy.run_path({processes.__file__!r})['slurm_step']())"  # without NumPy
    script = 'exec -a "$0" bash -c \'"$0" -c "$1"; true\' "$1" "$2"'
    command = ["bash", "-c", script, title, sys.executable, code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout) == (0, f"{step}\n"), result.stderr


SHELLS = [{"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, {**ONE_TASK_PER_NODE, "SLURM_STEP_NUM_TASKS": "1"}]
"""Of a batch job, and of the interactive step of `salloc`."""


@pytest.mark.parametrize("variables", SHELLS)
def test_a_world_of_one_is_right_where_one_process_was_started(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with bagua_comm.connect() as comm:
        assert comm.size == 1


MPI = ["Open MPI 5.0.11", "MPICH 5.0.2", "Intel MPI 2021.18", ""]


@pytest.mark.parametrize("mpi", MPI)
@pytest.mark.parametrize("launcher", [OPEN_MPI, HYDRA, SRUN_PMI2, PMI, SRUN_PMIX, SRUN], ids=lambda one: one.name)
def test_a_world_of_one_among_many_is_explained(launcher, mpi):
    message = complaint(Launch(launcher, 1, 4), 1, mpi)
    assert message.startswith(f"connect: {launcher.name} started 4 processes ({launcher.size}=4)")
    assert mpi in message
    assert message.endswith("say connect(alone=True)")
    assert complaint(Launch(launcher, 1, 4), 4, mpi) is None
    assert complaint(Launch(launcher, 0, 1), 1, mpi) is None
    assert complaint(Launch(launcher, 0, 1), 8, mpi) is None  # MPI may know more


@pytest.mark.parametrize(
    ("launcher", "mpi", "advice"),
    [
        (SRUN, "Open MPI 5.0.11", "start it with srun --mpi=pmix (srun --mpi=list"),
        (SRUN, "MPICH 5.0.2", "start it with srun --mpi=pmi2 (srun --mpi=list"),
        (SRUN, "Intel MPI 2021.18", "srun --mpi=pmi2 and I_MPI_PMI_LIBRARY=/path/to/libpmi2.so"),
        (SRUN_PMI2, "Open MPI 5.0.11", "start it with srun --mpi=pmix"),
        (SRUN_PMI2, "MPICH 5.0.2", "build mpi4py against the MPI of this cluster (MPICC="),
        (SRUN_PMIX, "Open MPI 5.0.11", "build mpi4py against the MPI of this cluster (MPICC="),
        (HYDRA, "Open MPI 5.0.11", "the mpirun of Open MPI 5.0.11 (python -m bagua_comm run uses that)"),
        (OPEN_MPI, "MPICH 5.0.2", "or build mpi4py against the MPI of this launcher"),
        (SRUN, "", "pip install 'bagua-comm[mpi]'"),
        (SRUN, "", "start torchrun on each node, and call bagua_torch.connect()"),
    ],
)
def test_the_advice_fits_the_launcher_and_mpi(launcher, mpi, advice):
    assert advice in complaint(Launch(launcher, 0, 2), 1, mpi)


def test_fewer_ranks_than_were_started_are_a_mistake_as_well():
    message = complaint(Launch(OPEN_MPI, 0, 8), 2, "Open MPI 5.0.11")
    assert "started 8 processes (OMPI_COMM_WORLD_SIZE=8), but this one finds a world of 2" in message
    assert message.endswith("say connect(comm=mpi4py.MPI.COMM_WORLD)")


def test_where_no_size_is_known_a_rank_beyond_the_world_is_the_mistake():
    assert complaint(Launch(PMIX, 0, None), 1, "MPICH 5.0.2") is None
    assert "started process 3 (PMIX_RANK=3), but this one is alone" in complaint(
        Launch(PMIX, 3, None), 1, "MPICH 5.0.2"
    )


def test_under_torchrun_the_numbers_must_be_numbers():
    assert launchers.under_torchrun(PYTORCH)
    assert launchers.under_torchrun({**MPIRUN, **OF_TORCHRUN})
    assert not launchers.under_torchrun({**MPIRUN, **PYTORCH})
    assert not launchers.under_torchrun({"WORLD_SIZE": "4"})
    with pytest.raises(BootstrapError, match="variable WORLD_SIZE is 'four', expected a number of ranks"):
        launchers.under_torchrun({"RANK": "0", "WORLD_SIZE": "four"})


# connect() -----------------------------------------------------------------------------------------------


def test_alone_is_a_world_of_one_whatever_started_it(monkeypatch):
    for name, value in {**MPIRUN, **PYTORCH, **STEP}.items():
        monkeypatch.setenv(name, value)
    with bagua_comm.connect(alone=True) as comm:
        assert (comm.rank, comm.size, comm.transports[0].name) == (0, 1, "local")


def test_a_second_world_is_refused_while_the_first_is_open():
    with bagua_comm.connect() as comm:
        for options in ({}, {"alone": True}):
            with pytest.raises(BootstrapError, match=r"default\(\) returns .* its dup\(\) makes .* close\(\) it"):
                bagua_comm.connect(**options)
        assert bagua_comm.default() is comm
        with bagua_comm.connect(transport=LocalTransport()) as other:
            assert bagua_comm.default() is other
    with bagua_comm.connect() as again:
        assert again is not comm


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": "tcp"}, "transport is 'tcp', expected a Transport"),
        (
            {"alone": True, "transport": bagua_comm.transports.LocalTransport()},
            "alone=True and transport= exclude",
        ),
        *(
            ({"comm": comm}, f"comm is of type {type(comm).__name__}, .*mpi4py.MPI.Comm")
            for comm in (3, "world", object())
        ),
        ({"gpu": "cuda"}, "gpu is 'cuda', expected one of auto, nccl, staged, none"),
    ],
)
def test_what_makes_no_world_is_refused(options, message):
    with pytest.raises(BootstrapError, match=message):
        bagua_comm.connect(**options)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["bagua_comm", "bagua_torch"])
def test_under_a_foreign_mpirun_every_process_says_so(module):
    result = subprocess.run(
        [sys.executable, "-c", f"import {module}; {module}.connect()"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**without_launchers(os.environ), **OF_HYDRA},
    )
    assert result.returncode == 1
    assert "rank 3 of 4 on " in result.stderr
    assert (
        f"BootstrapError: connect: {HYDRA.name} started 4 processes (PMI_SIZE=4), but this one is"
        in result.stderr
    )
    assert "Traceback" not in result.stderr


def without_launchers(variables):
    names = ("OMPI_COMM_", "PMI", "MPI_LOCAL", "SLURM_", "PRTE_")
    return {name: value for name, value in variables.items() if not name.startswith(names)}


TORCHS = {
    "Open MPI": (
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
        | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        ["3", "4", "1", "2"],
    ),
    "MPICH": (
        {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
        ["0", "2", "0", "2"],
    ),
    "Slurm": (
        {"PMIX_RANK": "1", "SLURM_STEP_NUM_TASKS": "2", "PMIX_NAMESPACE": "slurm.pmix.8.0", "SLURM_LOCALID": "1"},
        ["1", "2", "1"],
    ),
}


@pytest.mark.parametrize(("variables", "numbers"), TORCHS.values(), ids=TORCHS)
def test_programs_for_torchrun_find_the_numbers_of_mpi_and_the_launcher_stays_mpi(variables, numbers):
    found = launchers.torch_numbers(variables)
    assert [found[name] for name in launchers.TORCH_NUMBERS if name in found] == numbers
    both = variables | found
    assert launchers.find(both).launcher is launchers.find(variables).launcher
    assert not launchers.under_torchrun(both)
    assert launchers.torch_numbers(both) == {}
    torchrun = {"RANK": "0", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x"}  # one that such a process starts
    assert launchers.under_torchrun(both | torchrun)
    assert launchers.under_torchrun(both | {"RANK": "5", "WORLD_SIZE": "8"})


@pytest.mark.parametrize(
    "more",
    [{"LOCAL_RANK": "0"}, {"OMPI_COMM_WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "2"}],
    ids=["one is set", "alone", "torchrun"],
)
def test_numbers_are_not_copied_for_one_process_or_over_others(more):
    assert launchers.torch_numbers({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"} | more) == {}
