"""What ranks tell each other about their GPUs, and whether NCCL can serve ranks that have these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SHARED_GPU_NCCL = 23000
"""From this version on (2.30), NCCL can be told to accept several ranks on one GPU, and distinguishes the slices
of a GPU (MIG). Earlier versions know a GPU by its bus id alone."""

ADVICE = (
    "NCCL needs one GPU for each rank: start no more ranks on a machine than it has GPUs. (Ranks can share a GPU "
    "if each gets an NCCL_HOSTID of its own; they then talk over the network. From NCCL 2.30 on, two ranks can "
    "also share one with NCCL_MULTI_RANK_GPU_ENABLE=1, and more of them with a small NCCL_MAX_CTAS as well.)"
)


class GpuFacts(NamedTuple):
    """What a rank tells the others about its GPU, and about NCCL."""

    machine: str
    """The machine's name for NCCL; ranks with different names in NCCL_HOSTID count as on different machines."""
    bus_id: str | None
    """The id of its GPU; None without a GPU. (Numbers will not do: processes may number GPUs differently.)"""
    uuid: str
    """NVIDIA's id of its GPU, or of its slice of a GPU (MIG)."""
    nccl: int
    """NCCL's version, 23203 for 2.32.3; 0 if it cannot be loaded."""
    problem: str
    """Why it cannot be loaded."""
    shares: bool
    """Whether NCCL was told that ranks may share a GPU."""
    broken: str = ""
    """Why its GPU cannot be used; empty if it can."""


def nccl_obstacle(gpus: Sequence[GpuFacts]) -> str | None:
    """Why NCCL cannot serve ranks with these GPUs; None if it can."""
    ranks_at: dict[tuple[str, str | None, str], list[int]] = {}
    for rank, gpu in enumerate(gpus):
        if gpu.broken:
            return f"rank {rank} cannot use its GPU ({gpu.broken})"
        if not gpu.nccl:
            return f"rank {rank} cannot load NCCL ({gpu.problem})"
        if gpu.nccl != gpus[0].nccl:
            return f"rank 0 has version {gpus[0].nccl} of NCCL, but rank {rank} has {gpu.nccl}"
        slice_of_it = gpu.uuid if gpu.nccl >= SHARED_GPU_NCCL else ""
        ranks_at.setdefault((gpu.machine, gpu.bus_id, slice_of_it), []).append(rank)
    if all(gpu.shares for gpu in gpus) and gpus[0].nccl >= SHARED_GPU_NCCL:
        return None
    for (machine, bus_id, _), ranks in ranks_at.items():
        if len({gpus[rank].uuid for rank in ranks}) > 1:
            return (
                f"ranks {ranks} have slices (MIG) of the GPU {bus_id} of {machine}, which NCCL tells apart from "
                f"version 2.30 on; this is {gpus[0].nccl}"
            )
        if len(ranks) > 1:
            return f"ranks {ranks} share the GPU {bus_id} of {machine}; {ADVICE}"
    return None
