"""Environment variables of this process, as its launcher and the user set them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from urllib.parse import quote

from ..errors import BootstrapError
from ..system.processes import slurm_step, start_of, starter
from . import launchers, tcp_links
from .job import Job

MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")
"""Set by the launchers of Open MPI, MPICH, Intel MPI and Slurm."""

MPI_SETTINGS = {"OMPI_MCA_btl_tcp_eager_limit": str(320 << 10)}
"""Environment variables that `connect` sets before MPI starts, unless the user has set them. With this limit,
Open MPI sends the pieces of our collectives eagerly: on a busy link, a request to send would queue behind
data."""


def job() -> Job:
    """Return the job of this process, from its environment variables; see `job.Job`.

    Raises:
        BootstrapError: One of the variables is not a number.
    """
    return Job.of(os.environ)


def own_variables() -> dict[str, str]:
    """Return the environment variables of this process, without those inherited from another Slurm step."""
    return launchers.without_inherited(os.environ, slurm_step())


# ---------------------------------------------------------------------------------------------------
# MPI
# ---------------------------------------------------------------------------------------------------


def under_mpi() -> bool:
    """Whether this process belongs to a world of MPI.

    Raises:
        BootstrapError: torchrun started this process as one of many.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.Get_size() > 1:
        return True
    variables = own_variables()
    launch = launchers.find(variables)
    if launch is not None and launch.launcher in (launchers.ELASTIC, launchers.TORCHRUN):
        if under_torchrun() and launch.is_one_of_many:
            raise BootstrapError(
                "connect: torchrun started this process, and torchrun sets up no MPI world; call "
                "bagua_torch.connect() instead, or start the program with mpirun -n N python script.py, or with "
                "python -m bagua_comm run -n N script.py"
            )
        return False
    # Slurm's own PMI sets no variables: MPI itself finds out whether there are others.
    return any(name in variables for name in MPI_VARIABLES) or (launch is not None and launch.is_one_of_many)


def has_ulfm() -> bool:
    """Whether this process was started by mpirun --with-ft ulfm."""
    setting = os.environ.get("OMPI_MCA_mpi_ft_enable", "0").lower()  # noqa: SIM112 - as Open MPI writes it
    return setting not in ("", "0", "f", "false", "disabled", "no", "n")


def number_of_links() -> int:
    """Return the number of TCP connections that Open MPI makes between two ranks."""
    text = os.environ.get(tcp_links.VARIABLE, "")
    return max(1, int(text)) if text.isdecimal() else 1


def ranks_on_other_hosts() -> int:
    """Return the number of ranks that Open MPI has started on other hosts; 0 if that is not known."""
    sizes = [os.environ.get(f"OMPI_COMM_WORLD_{which}", "") for which in ("SIZE", "LOCAL_SIZE")]
    whole, here = (int(text) if text.isdecimal() else 0 for text in sizes)
    return max(0, whole - here) if here else 0


def set_mpi_variables() -> None:
    """Set the environment variables that MPI reads when it starts, unless the user has set them.

    Raises:
        BootstrapError: A rank may not open the number of connections that the user has set.
    """
    count, others = number_of_links(), ranks_on_other_hosts()
    complaint = tcp_links.complaint(count, others) if count > 1 else None
    if complaint is not None:
        raise BootstrapError(f"connect: {complaint}")
    settings = {**MPI_SETTINGS, **launchers.pmix_settings(os.environ)}
    for name, value in {**settings, **tcp_links.equal_links(count if others else 1)}.items():
        os.environ.setdefault(name, value)


# ---------------------------------------------------------------------------------------------------
# torchrun
# ---------------------------------------------------------------------------------------------------


def under_torchrun() -> bool:
    """Whether torchrun started this process; see `launchers.under_torchrun`."""
    return launchers.under_torchrun(os.environ)


def torchrun_job() -> str:
    """Return a name for the job that torchrun started, which can be that of a folder; "" without torchrun.

    It ends with the id of the agent, which starts this process again after a failure: run ids are often equal.
    """
    if not under_torchrun():
        return ""
    run, agent = quote(os.environ.get("TORCHELASTIC_RUN_ID", ""), safe=""), starter("TORCHELASTIC_RUN_ID")
    return f"torchrun-{run}-{agent:x}-{start_of(agent):x}"


def number_from_torchrun(name: str) -> int:
    """Return the number that torchrun gave this process, as LOCAL_RANK; 0 without torchrun.

    Raises:
        BootstrapError: It is not a number.
    """
    if name not in os.environ:
        return 0
    return launchers.checked_number(os.environ, name, "a number from 0 on", 0)


def torchrun_serves(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun serves the store of its processes, by environment variables; otherwise rank 0 does."""
    return variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def torchrun_rendezvous() -> dict[str, str]:
    """Return the environment variables by which processes that torchrun started find each other."""
    names = "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"
    return {name: os.environ[name] for name in names if name in os.environ}


def names_rendezvous() -> bool:
    """Whether PyTorch's environment variables name a rendezvous: torchrun's, or another one."""
    variables = torchrun_rendezvous()
    named = all(variables.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    return (named and not launchers.are_copied(os.environ)) or under_torchrun()


def torch_ranks_by_mpi() -> bool:
    """Whether MPI started this process, and PyTorch's environment variables name no rendezvous."""
    return not names_rendezvous() and under_mpi()


def copy_numbers_for_torch() -> None:
    """Set RANK, WORLD_SIZE and what else programs for torchrun read, if MPI started this process as one of many.

    Does nothing if one of them is set.
    """
    os.environ.update(launchers.torch_numbers(own_variables()))


def rank_of_many() -> tuple[int, int | None] | None:
    """Return this rank and the number of processes, if a launcher other than torchrun started several."""
    launch = launchers.find(own_variables())
    if launch is None or not launch.is_one_of_many or launch.launcher in (launchers.ELASTIC, launchers.TORCHRUN):
        return None
    return launch.rank or 0, launch.size


def keep_gloo_on_this_host() -> None:
    """Have gloo listen on 127.0.0.1, unless the user has chosen an interface."""
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
