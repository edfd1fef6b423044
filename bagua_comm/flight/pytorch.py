"""Records of ranks in the format of PyTorch's flight recorder, for its analyser, `torchfrtrace`.

There is a file for each rank, a pickle of dictionaries, numbers and strings, as ProcessGroupNCCL writes it
(version 2.10 of the format), which needs no PyTorch. The analyser knows only PyTorch's operations: `NAMES` maps
our calls to them. The name of our call, its bucket and its step are in the frames, which the analyser prints
with its findings.

Source: torch/distributed/flight_recorder and torch/csrc/distributed/c10d/FlightRecorder.hpp.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..system.files import write_at_once
from .entries import WORLD, Entry, RankRecord

VERSION = "2.10"

PREFIX = "bagua_comm_rank_"
"""The prefix of the file names, before the rank."""

NAMES = {
    "allreduce": "all_reduce",
    "allreduce_many": "all_reduce",
    "quantized_allreduce": "all_reduce",
    "quantized_allgather": "all_reduce",
    "quantized_reduce_scatter": "_reduce_scatter_base",
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
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "barrier": "barrier",
    "split": "barrier",
    "dup": "barrier",
}
"""PyTorch's operations. `quantized_allgather` records the whole result, equal on all ranks. Calls on pickled
objects are barriers, since their sizes are unknown at the begin; so is any other call."""

_STATES = {"started": "started", "enqueued": "started", "ended": "completed", "failed": "started"}


def write_dumps(records: Sequence[RankRecord], folder: Path) -> list[Path]:
    """Write a file for each rank; return the paths.

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
    """For each communicator, the number of the first collective call that all ranks still have."""
    first: dict[str, int] = {}
    for record in records:
        known: dict[str, int] = {}
        for entry in record.entries:
            if entry.collective:
                known.setdefault(entry.group, entry.number)
        for group, number in known.items():
            first[group] = max(first.get(group, 0), number)
    return first


def dump(record: RankRecord, first: Mapping[str, int]) -> dict[str, object]:
    """The dump of PyTorch's flight recorder for this rank.

    It omits messages between two ranks, and calls before number first[group] of each communicator.
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


def _entry(place: int, entry: Entry, members: Sequence[int]) -> dict[str, object]:
    taken, given = _sizes(entry, len(members))
    dtypes = [entry.dtype or "uint8"]
    return {
        # The analyser drops calls by this that other ranks no longer have. That is done here: all begin at 0.
        "record_id": place,
        "pg_id": 0,
        "process_group": (entry.group, _described(entry.group)),
        "collective_seq_id": entry.number,
        "p2p_seq_id": 0,
        "op_id": entry.number,
        "profiling_name": f"gloo:{_operation(entry)}",
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


def _operation(entry: Entry) -> str:
    """The operation of PyTorch's; an `allgather` with counts records the whole result, equal on all ranks."""
    has_parts = entry.name == "allgather" and "counts" in entry.detail
    return "all_reduce" if has_parts else NAMES.get(entry.name, "barrier")


def _sizes(entry: Entry, size: int) -> tuple[list[list[int]], list[list[int]]]:
    """The sizes of inputs and outputs that the analyser compares."""
    count = entry.size if entry.dtype else 0
    name = _operation(entry)
    if name == "barrier":
        return [[0]], [[0]]
    if name == "all_gather":
        return [[count]], [[size * count]]
    if name == "_reduce_scatter_base":
        return [[count]], [[count // size]]
    return [[count]], [[count]]


def _described(group: str) -> str:
    return "default_pg" if group == WORLD else group
