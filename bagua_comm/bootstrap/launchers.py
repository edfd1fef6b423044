"""Who started this process, as one of how many, and what to do if MPI finds fewer.

`LAUNCHERS` tells launchers apart by the environment variables that they set. A process may have those of several,
since Slurm starts mpirun's helpers on each node, and srun may start torchrun. The table lists first the launcher
that is closest to the process: this one alone says how many ranks there are.

All functions take the environment variables as a mapping. `own` leaves out those of another step of Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from ..errors import BootstrapError


class Launcher(NamedTuple):
    """What starts processes, and the environment variables by which they know it."""

    name: str
    """As messages call it."""
    rank: str
    """The variable that holds this process' number."""
    size: str | None
    """The variable that holds the number of processes; None if there is none."""
    marks: tuple[str, ...] = ()
    """Variables that must be set as well; "NAME=text" is one whose value begins with that text."""

    def started(self, variables: Mapping[str, str]) -> bool:
        """Whether this launcher, or one that sets the same variables, started a process with `variables`."""
        needed = [*self.marks, self.rank, *([self.size] if self.size else [])]
        parts = [mark.partition("=") for mark in needed]
        return all(name in variables and variables[name].startswith(text) for name, _, text in parts)


ELASTIC = Launcher("torchrun", "RANK", "WORLD_SIZE", ("TORCHELASTIC_RUN_ID",))
OPEN_MPI = Launcher("the mpirun of Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
HYDRA = Launcher("the mpirun of MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALNRANKS",))
SRUN_PMI2 = Launcher("srun --mpi=pmi2", "PMI_RANK", "PMI_SIZE", ("SLURM_STEP_NUM_TASKS",))
PMI = Launcher("a launcher that speaks PMI, as those of MPICH and Intel MPI do", "PMI_RANK", "PMI_SIZE")
SRUN_PMIX = Launcher("srun --mpi=pmix", "PMIX_RANK", "SLURM_STEP_NUM_TASKS", ("PMIX_NAMESPACE=slurm.",))
PMIX = Launcher("a launcher that speaks PMIx, as that of Open MPI does", "PMIX_RANK", None)
TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE")
SRUN = Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")

LAUNCHERS = (ELASTIC, OPEN_MPI, HYDRA, SRUN_PMI2, PMI, SRUN_PMIX, PMIX, TORCHRUN, SRUN)
"""From the closest to a process to the farthest, if it has the variables of several."""


class Launch(NamedTuple):
    """How a process was started."""

    launcher: Launcher
    rank: int | None
    """Its number; None if the variable holds none."""
    size: int | None
    """How many processes were started; None if that is not known."""

    @property
    def is_one_of_many(self) -> bool:
        """Whether there are certainly others."""
        return (self.size or 1) > 1 or (self.rank or 0) > 0


def find(variables: Mapping[str, str]) -> Launch | None:
    """How a process with these environment variables was started; None if no launcher did.

    >>> launch = find({"PMI_RANK": "1", "PMI_SIZE": "4"})
    >>> launch.launcher is PMI, launch.rank, launch.size
    (True, 1, 4)
    """
    for launcher in LAUNCHERS:
        if launcher.started(variables):
            size = _number(variables, launcher.size) if launcher.size else None
            return Launch(launcher, _number(variables, launcher.rank), size)
    return None


def own(variables: Mapping[str, str], step: str | None = None) -> dict[str, str]:
    """These variables without those that a task of another Slurm step handed down.

    A task may submit a job, or run salloc. sbatch takes all variables of the task to the new job, whose script is
    no task of a step, but finds the variables of one; and so do the job's own steps, if they use another PMI.

    Args:
        variables: The environment variables of a process.
        step: The step that `processes.slurm_step` finds above it. Without it, the variables alone decide.

    >>> sorted(own({"SLURM_JOB_ID": "8", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, step="8.batch"))
    ['SLURM_JOB_ID', 'SLURM_PROCID']
    """
    if "SLURM_STEP_NUM_TASKS" not in variables:
        return dict(variables)
    by_pmix = re.fullmatch(r"slurm\.pmix\.(\d+\.\d+)", variables.get("PMIX_NAMESPACE", ""))
    by_pmi = None if HYDRA.started(variables) else re.fullmatch(r"(\d+\.\d+)", variables.get("PMI_JOBID", ""))
    steps = {prefix: found[1] for prefix, found in (("PMIX_", by_pmix), ("PMI_", by_pmi)) if found}
    gone = {prefix for prefix, other in steps.items() if step and other != step and not _is_mixed(variables)}
    if not _is_a_task(variables, step, steps.values()):
        gone |= {"SLURM_STEP_", *steps}
        if SRUN_PMI2.started(variables) and not HYDRA.started(variables):
            gone.add("PMI_")
    return {name: value for name, value in variables.items() if not name.startswith(tuple(gone))}


def _is_a_task(variables: Mapping[str, str], step: str | None, steps: Iterable[str]) -> bool:
    """Whether a process that has the variables of a step is a task of one, in the job that SLURM_JOB_ID names.

    Args:
        variables: Its environment variables.
        step: The step above it; None if that is not known.
        steps: Those that the variables of PMI and PMIx name.
    """
    if step is not None and not step.partition(".")[2].isdecimal():
        return False  # "8.batch" is the script of a job, and "8.interactive" the shell of salloc
    job = variables.get("SLURM_JOB_ID")
    if job is not None and not _is_mixed(variables):
        # salloc runs its shell as a child of the task that called it.
        named = [step] if step is not None else steps
        if any(each.partition(".")[0] != job for each in named):
            return False
    if step is not None:
        return True
    # In a step, SLURM_NTASKS is its own number of tasks; in the script of a job, that of the job.
    tasks, of_job = _number(variables, "SLURM_STEP_NUM_TASKS"), _number(variables, "SLURM_NTASKS")
    return tasks is None or of_job is None or tasks <= of_job


def _is_mixed(variables: Mapping[str, str]) -> bool:
    """Whether this is a heterogeneous job, whose parts have numbers of their own."""
    return any(name.startswith("SLURM_HET_") for name in variables)


def _number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name, "")
    return int(text) if text.isdecimal() else None


# ---------------------------------------------------------------------------------------------------
# MPI finds fewer ranks than were started
# ---------------------------------------------------------------------------------------------------

BUILD = "build mpi4py against {} (MPICC=/path/to/mpicc pip install --no-binary=mpi4py mpi4py)"

INSIDE = "python -m bagua_comm run inside of salloc or sbatch"


def complaint(launch: Launch, size: int, mpi: str) -> str | None:
    """What is wrong with a world of `size` ranks for a process started like this; None if nothing is.

    Args:
        launch: How it was started.
        size: How many ranks MPI finds; 1 without MPI.
        mpi: The name and version of mpi4py's MPI, as "Open MPI 5.0.11"; "" if there is none.
    """
    launcher, counted = launch.launcher, launch.size is not None
    if size >= (launch.size if launch.size is not None else (launch.rank or 0) + 1):
        return None
    known = f"{launcher.size}={launch.size}" if counted else f"{launcher.rank}={launch.rank}"
    started = f"{launch.size} processes" if counted else f"process {launch.rank}"
    found = "is alone" if size == 1 else f"finds a world of {size}"
    meant = "connect(alone=True)" if size == 1 else "connect(comm=mpi4py.MPI.COMM_WORLD)"
    return (
        f"connect: {launcher.name} started {started} ({known}), but this one {found}, since "
        f"{_reason(launcher, mpi)}. To change that, {_advice(launcher, mpi)}. If this world is meant, say {meant}"
    )


def _reason(launcher: Launcher, mpi: str) -> str:
    if not mpi:
        return "mpi4py is not installed"
    if launcher is SRUN:
        return f"mpi4py's {mpi} cannot reach the others without PMI"
    return f"mpi4py's {mpi} and this launcher do not understand each other"


def _advice(launcher: Launcher, mpi: str) -> str:
    if not mpi:
        return (
            "pip install 'bagua-comm[mpi]', which brings Open MPI, or, at a site with an MPI of its own, "
            f"{BUILD.format('that')}. PyTorch needs no MPI: start torchrun on each node, and call "
            "bagua_torch.connect()"
        )
    if launcher in (SRUN, SRUN_PMI2, SRUN_PMIX):
        wanted = SRUN_PMIX if mpi.startswith("Open MPI") else SRUN_PMI2
        library = " and I_MPI_PMI_LIBRARY=/path/to/libpmi2.so" if mpi.startswith("Intel") else ""
        if launcher is wanted:
            return f"{BUILD.format('the MPI of this cluster')}, or start it with {INSIDE}"
        return (
            f"start it with {wanted.name}{library} (srun --mpi=list shows what this Slurm has), or with {INSIDE}"
        )
    return (
        f"start it with the mpirun of {mpi} (python -m bagua_comm run takes that), or "
        f"{BUILD.format('the MPI of this launcher')}"
    )


# ---------------------------------------------------------------------------------------------------
# torchrun
# ---------------------------------------------------------------------------------------------------


def under_torchrun(variables: Mapping[str, str]) -> bool:
    """Whether torchrun started a process with these variables, or something else that sets RANK and WORLD_SIZE.

    Not if they are what mpirun says: `python -m bagua_comm run` and Accelerate give its numbers these names, too.

    Raises:
        BootstrapError: These are not the numbers of a rank and of ranks.
    """
    if not TORCHRUN.started(variables):
        return False
    mine = variables[TORCHRUN.rank], variables["WORLD_SIZE"]
    mpirun = variables.get("OMPI_COMM_WORLD_RANK"), variables.get("OMPI_COMM_WORLD_SIZE")
    if mine == mpirun and not ELASTIC.started(variables):
        return False
    size = checked_number(variables, "WORLD_SIZE", "a number of ranks", 1)
    checked_number(variables, "RANK", f"a rank from 0 to {size - 1}", 0, size - 1)
    return True


def checked_number(
    variables: Mapping[str, str],
    name: str,
    meaning: str,
    least: int,
    most: int | None = None,
    *,
    cure: str = "unset it, or start this program with torchrun or with mpirun",
) -> int:
    """The number in a variable.

    Raises:
        BootstrapError: It holds none, or one that is too small or too large.
    """
    text = variables[name]
    with suppress(ValueError):
        number = int(text)
        if number >= least and (most is None or number <= most):
            return number
    raise BootstrapError(f"connect: the environment variable {name} is {text!r}, expected {meaning}; {cure}")
