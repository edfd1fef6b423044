"""The launcher of this process, its number of processes, and the advice if MPI finds fewer.

`LAUNCHERS` identifies a launcher by the environment variables that it sets. A process may have those of several,
since Slurm starts mpirun's helpers on each node, and srun may start torchrun. The launcher that is closest to the
process is first in the table, and determines the number of ranks.

All functions take the environment variables as a mapping. `without_inherited` removes those of another step of
Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from ..errors import BootstrapError


class Launcher(NamedTuple):
    """A program that starts processes, and the environment variables that identify it."""

    name: str
    """The name of the launcher in messages."""
    rank: str
    """The variable for the rank of a process."""
    size: str | None
    """The variable for the number of processes; None if there is none."""
    marks: tuple[str, ...] = ()
    """Variables that must be set as well; "NAME=text" requires a value that begins with the text."""
    on_host: tuple[str, ...] = ()
    """The variables for the rank among the processes of its host, and for their number, as far as it has them."""

    def started(self, variables: Mapping[str, str]) -> bool:
        """Whether this launcher, or one with the same variables, started a process with `variables`."""
        needed = [*self.marks, self.rank, *([self.size] if self.size else [])]
        parts = [mark.partition("=") for mark in needed]
        return all(name in variables and variables[name].startswith(text) for name, _, text in parts)


ELASTIC = Launcher("torchrun", "RANK", "WORLD_SIZE", ("TORCHELASTIC_RUN_ID",))
OPEN_MPI = Launcher(
    "the mpirun of Open MPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    on_host=("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
HYDRA = Launcher(
    "the mpirun of MPICH or Intel MPI",
    "PMI_RANK",
    "PMI_SIZE",
    ("MPI_LOCALNRANKS",),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
SRUN_PMI2 = Launcher("srun --mpi=pmi2", "PMI_RANK", "PMI_SIZE", ("SLURM_STEP_NUM_TASKS",), ("SLURM_LOCALID",))
PMI = Launcher("a launcher that speaks PMI, as those of MPICH and Intel MPI do", "PMI_RANK", "PMI_SIZE")
SRUN_PMIX = Launcher(
    "srun --mpi=pmix", "PMIX_RANK", "SLURM_STEP_NUM_TASKS", ("PMIX_NAMESPACE=slurm.",), ("SLURM_LOCALID",)
)
PMIX = Launcher("a launcher that speaks PMIx, as that of Open MPI does", "PMIX_RANK", None)
TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE")
SRUN = Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")

LAUNCHERS = (ELASTIC, OPEN_MPI, HYDRA, SRUN_PMI2, PMI, SRUN_PMIX, PMIX, TORCHRUN, SRUN)
"""In the order of their distance to the process, the closest first."""


class Launch(NamedTuple):
    """The start of a process."""

    launcher: Launcher
    rank: int | None
    """The rank of the process; None if the variable is not a number."""
    size: int | None
    """The number of processes; None if that is not known."""

    @property
    def is_one_of_many(self) -> bool:
        """Whether other processes were started for certain."""
        return (self.size or 1) > 1 or (self.rank or 0) > 0


def find(variables: Mapping[str, str]) -> Launch | None:
    """Return the launch of a process with these environment variables; None if no launcher started it.

    >>> launch = find({"PMI_RANK": "1", "PMI_SIZE": "4"})
    >>> launch.launcher is PMI, launch.rank, launch.size
    (True, 1, 4)
    """
    for launcher in LAUNCHERS:
        if launcher.started(variables):
            size = _number(variables, launcher.size) if launcher.size else None
            return Launch(launcher, _number(variables, launcher.rank), size)
    return None


def without_inherited(variables: Mapping[str, str], step: str | None = None) -> dict[str, str]:
    """Return these variables without those inherited from a task of another Slurm step.

    A task may submit a job, or run salloc. sbatch copies all variables of the task to the new job, so its script
    has the variables of a step, though it is not a task of one; the steps of the job inherit them, if they use
    another PMI.

    Args:
        variables: The environment variables of a process.
        step: The step of the process, from `processes.slurm_step`. If None, the variables alone decide.

    >>> variables = {"SLURM_JOB_ID": "8", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
    >>> sorted(without_inherited(variables, step="8.batch"))
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
    """Whether a process with the variables of a step is a task of a step of the job in SLURM_JOB_ID.

    Args:
        variables: The environment variables of the process.
        step: The step of the process; None if that is not known.
        steps: The steps in the variables of PMI and PMIx.
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
    # In a step, SLURM_NTASKS is the number of its tasks; in the script of a job, that of the job.
    tasks, of_job = _number(variables, "SLURM_STEP_NUM_TASKS"), _number(variables, "SLURM_NTASKS")
    return tasks is None or of_job is None or tasks <= of_job


def _is_mixed(variables: Mapping[str, str]) -> bool:
    """Whether this is a heterogeneous job, whose components have job ids of their own."""
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
    """Return the error message if a world of `size` ranks is too small for this launch; None if it is not.

    Args:
        launch: The launch of the process.
        size: The number of ranks that MPI finds; 1 without MPI.
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
        f"start it with the mpirun of {mpi} (python -m bagua_comm run uses that), or "
        f"{BUILD.format('the MPI of this launcher')}"
    )


def pmix_settings(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that PMIx reads when MPI starts, for a process of `srun --mpi=pmix`.

    Slurm accepts munge's credentials and the kernel's (native). A PMIx without munge, as that of Open MPI's
    wheel, uses the second, but complains about the first on every rank.
    """
    modes = variables.get("PMIX_SECURITY_MODE", "").split(",")
    return {"PMIX_MCA_psec": "native"} if SRUN_PMIX.started(variables) and "native" in modes else {}


# ---------------------------------------------------------------------------------------------------
# torchrun
# ---------------------------------------------------------------------------------------------------

TORCH_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""The numbers of a process under the names that torchrun gives them."""

COPIED = "BAGUA_TORCH_RANK"
"""The variable that tells the rank and size that were copied to `TORCH_NUMBERS` from the launcher of MPI."""


def torch_numbers(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the numbers of one of many processes of MPI as `TORCH_NUMBERS`; nothing if one of these is set.

    >>> torch_numbers({"PMI_RANK": "1", "PMI_SIZE": "4"})
    {'RANK': '1', 'WORLD_SIZE': '4', 'BAGUA_TORCH_RANK': '1/4'}
    """
    launch = find(variables)
    if launch is None or launch.size is None or not launch.is_one_of_many or launch.launcher is SRUN:
        return {}
    if any(name in variables for name in TORCH_NUMBERS):
        return {}
    sources = launch.launcher.rank, launch.launcher.size or "", *launch.launcher.on_host
    both = zip(TORCH_NUMBERS, sources, strict=False)  # some launchers do not give the last ones
    found = {name: variables[source] for name, source in both if source in variables}
    return {**found, COPIED: f"{found['RANK']}/{found['WORLD_SIZE']}"}


def are_copied(variables: Mapping[str, str]) -> bool:
    """Whether RANK and WORLD_SIZE are the numbers that `torch_numbers` has copied."""
    return variables.get(COPIED) == f"{variables.get(TORCHRUN.rank)}/{variables.get('WORLD_SIZE')}"


def under_torchrun(variables: Mapping[str, str]) -> bool:
    """Whether torchrun, or another launcher with RANK and WORLD_SIZE, started a process with these variables.

    False if both equal the numbers of mpirun: `python -m bagua_comm run` and Accelerate copy them to these names,
    and so does `import bagua_torch`.

    Raises:
        BootstrapError: RANK or WORLD_SIZE is not a valid number.
    """
    if not TORCHRUN.started(variables):
        return False
    mine = variables[TORCHRUN.rank], variables["WORLD_SIZE"]
    mpirun = variables.get("OMPI_COMM_WORLD_RANK"), variables.get("OMPI_COMM_WORLD_SIZE")
    if (mine == mpirun or are_copied(variables)) and not ELASTIC.started(variables):
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
    """Return the number in a variable.

    Raises:
        BootstrapError: It is not a number from `least` to `most`.
    """
    text = variables[name]
    with suppress(ValueError):
        number = int(text)
        if number >= least and (most is None or number <= most):
            return number
    raise BootstrapError(f"connect: the environment variable {name} is {text!r}, expected {meaning}; {cure}")
