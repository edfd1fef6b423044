"""The records of ranks in the format of PyTorch's flight recorder, for its analyser, `torchfrtrace`.

A file for each rank, a pickle of dictionaries, numbers and strings, as ProcessGroupNCCL writes it (version 2.10
of the format). PyTorch is not needed to write it. The analyser knows PyTorch's own operations: `NAMES` says which
one stands for a call of ours. The name of ours, its bucket and its step stand in the frames, which the analyser
prints with what it finds.

Source: torch/distributed/flight_recorder and torch/csrc/distributed/c10d/FlightRecorder.hpp.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import write_at_once
from .entries import WORLD, Entry, RankRecord

VERSION = "2.10"

PREFIX = "bagua_comm_rank_"
"""The files are called by this and the rank."""

NAMES = {
    "allreduce": "all_reduce",
    "allreduce_many": "all_reduce",
    "quantized_allreduce": "all_reduce",
    "scan": "all_reduce",
    "exscan": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "broadcast_many": "broadcast",
    "broadcast_object": "barrier",
    "allgather": "all_gather",
    "allgather_object": "barrier",
    "gather_object": "barrier",
    "scatter_object": "barrier",
    "reduce_scatter": "_reduce_scatter_base",
    "gather": "gather",
    "gatherv": "gather",
    "scatter": "scatter",
    "scatterv": "scatter",
    "allgatherv": "all_reduce",
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all",
    "barrier": "barrier",
    "split": "barrier",
    "dup": "barrier",
}
"""PyTorch's names. `allgatherv` records the whole result, the same on all ranks. Of pickled objects the sizes are
not known when a call begins, so they are barriers; so is any call that is not named here."""

_STATES = {"started": "started", "enqueued": "started", "ended": "completed", "failed": "started"}


def write_dumps(records: Sequence[RankRecord], folder: Path) -> list[Path]:
    """Write a file for each rank; returns their paths.

    Raises:
        OSError: The folder cannot be made, or a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{PREFIX}{record.rank}" for record in records]
    first = _first_known(records)
    for path, record in zip(paths, records, strict=True):
        write_at_once(path, pickle.dumps(dump(record, first)))
    return paths


def _first_known(records: Sequence[RankRecord]) -> dict[str, int]:
    """By communicator, the number of the first collective call that no rank has forgotten."""
    first: dict[str, int] = {}
    for record in records:
        known: dict[str, int] = {}
        for entry in record.entries:
            if entry.collective:
                known.setdefault(entry.group, entry.number)
        for group, number in known.items():
            first[group] = max(first.get(group, 0), number)
    return first


def dump(record: RankRecord, first: Mapping[str, int]) -> dict[str, Any]:
    """What PyTorch's flight recorder would write for this rank.

    Messages between two ranks are left out, and so are calls before number first[group] of each communicator.
    """
    calls = [entry for entry in record.entries if entry.collective and entry.number >= first[entry.group]]
    return {
        "version": VERSION,
        "pg_config": {
            name: {"name": name, "desc": _described(name), "ranks": str(list(ranks))}
            for name, ranks in record.groups.items()
        },
        "pg_status": {},
        "entries": [_entry(i, entry, record.groups[entry.group]) for i, entry in enumerate(calls)],
    }


def _entry(place: int, entry: Entry, members: Sequence[int]) -> dict[str, Any]:
    taken, given = _sizes(entry, len(members))
    dtypes = [entry.dtype or "uint8"]
    return {
        # By this the analyser cuts off what another rank has forgotten; that is done already, so all begin at 0.
        "record_id": place,
        "pg_id": 0,
        "process_group": (entry.group, _described(entry.group)),
        "collective_seq_id": entry.number,
        "p2p_seq_id": 0,
        "op_id": entry.number,
        "profiling_name": f"gloo:{NAMES.get(entry.name, 'barrier')}",
        "time_created_ns": entry.start_ns,
        "time_discovered_started_ns": entry.start_ns,
        "time_discovered_completed_ns": entry.end_ns if entry.state == "ended" else None,
        "duration_ms": None,
        "input_sizes": taken,
        "input_dtypes": dtypes,
        "output_sizes": given,
        "output_dtypes": dtypes,
        "state": _STATES[entry.state],
        "timeout_ms": 0,
        "is_p2p": False,
        "retired": entry.state == "ended",
        "frames": [{"name": str(entry), "filename": "bagua_comm", "line": entry.number}],
    }


def _sizes(entry: Entry, size: int) -> tuple[list[list[int]], list[list[int]]]:
    """The sizes of what goes in and what comes out, as the analyser compares them."""
    count = entry.size if entry.dtype else 0
    name = NAMES.get(entry.name, "barrier")
    if name == "barrier":
        return [[0]], [[0]]
    if name == "all_gather":
        return [[count]], [[size * count]]
    if name == "_reduce_scatter_base":
        return [[count]], [[count // size]]
    return [[count]], [[count]]


def _described(group: str) -> str:
    return "default_pg" if group == WORLD else group
