"""Files by which ranks of Open MPI share memory, kept apart from those of another job.

Open MPI 5 names them `/dev/shm/sm_segment.<host>.<uid>.<job>.<rank>`, and of the name of a job only a hash of 16
bits is in the number. Two jobs of one user on one host have the same files with a probability of 1 / 65,536. Then
each writes into the memory of the other, and ranks crash or wait forever
(https://github.com/open-mpi/ompi/issues/7642). A rank of mpirun that finds its file there already therefore uses
a folder of its own, unless the program has started MPI itself.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..system.files import remove_at_exit, shared_memory

VARIABLE = "OMPI_MCA_btl_sm_backing_directory"
"""Open MPI's parameter of the folder of these files."""


@contextmanager
def kept_apart() -> Iterator[None]:
    """Let MPI start with another folder for the file of this rank if there is one of its name already."""
    folder = _other_folder()
    if folder is not None:
        os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        if folder is not None:
            del os.environ[VARIABLE]


def _other_folder() -> Path | None:
    """A new folder if there is a file of the name of this rank's, and the user has chosen none."""
    pattern = pattern_of(os.environ)
    if pattern is None or VARIABLE in os.environ or not any(shared_memory().glob(pattern)):
        return None
    try:
        folder = Path(tempfile.mkdtemp(prefix="bagua_comm-mpi-", dir=shared_memory()))
    except OSError:
        return None
    remove_at_exit(folder)
    return folder


def pattern_of(variables: Mapping[str, str]) -> str | None:
    """A pattern of the file's name, from the environment variables of a rank; None if they are not Open MPI's.

    >>> job = {"PMIX_NAMESPACE": "prterun-vm-31681@1", "OMPI_COMM_WORLD_NODE_RANK": "0"}
    >>> pattern_of(job).replace(f".{os.geteuid()}.", ".uid.")
    'sm_segment.*.uid.3720001.0'
    """
    name, at, number = variables.get("PMIX_NAMESPACE", "").rpartition("@")
    rank = variables.get("OMPI_COMM_WORLD_NODE_RANK", "")
    if not (at and number.isdecimal() and rank.isdecimal() and hasattr(os, "geteuid")):
        return None
    digest = _one_at_a_time(name.encode())
    job = ((digest >> 16) ^ (digest & 0xFFFF)) << 16 | int(number) & 0xFFFF
    return f"sm_segment.*.{os.geteuid()}.{job:x}.{int(rank)}"


def _one_at_a_time(text: bytes) -> int:
    """Bob Jenkins's hash of this name, of 32 bits (Dr. Dobb's Journal, September 1997)."""
    found = 0
    for byte in text:
        found = (found + byte) * 1025 & 0xFFFFFFFF
        found ^= found >> 6
    found = found * 9 & 0xFFFFFFFF
    found ^= found >> 11
    return found * 32769 & 0xFFFFFFFF
