"""The recorder: digests of the tensors of each step, compared between the ranks and written to a folder."""

from __future__ import annotations

import logging
import operator
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from .. import arrays
from ..arrays import AnyArray, Array
from ..comm import Communicator
from ..comm.agreement import are_equal, equality_terms
from ..comm.public_methods import public_method
from ..errors import ArrayError, BaguaError, CommMismatch, shown
from ..objects.closing import Closing
from .differences import difference_of, parted
from .records import RecordWriter, Step, Tensor

_log = logging.getLogger(__name__)

Action = Literal["raise", "log", "write"]
"""The reactions of a `DivergenceRecorder` to ranks that differ."""


class DivergenceRecorder(Closing):
    """Recorder of tensors that should be equal on all ranks, which finds the step at which they begin to differ.

    Collective. In each step, every rank hashes its tensors, appends the digests to a file of its own, and
    compares them with those of the other ranks by one allreduce of 40 bytes. At the first difference, each rank
    also keeps its tensors that differ. `python -m bagua_comm compare FOLDER` then names the step, the tensor, the
    ranks and the first element, with the distance in units in the last place.

    A step costs a pass over the tensors (128-bit BLAKE2), for device arrays a copy to the host, and 22 bytes in
    the file for each tensor. Close the recorder, or use it as a context manager.

    Args:
        comm: The ranks.
        folder: A folder for the files `rank_0.steps` and so on, of this run alone. One that all hosts share makes
            copying unnecessary.
        action: "raise": raise `CommMismatch` on all ranks at each difference. "log": log an ERROR to the logger
            "bagua_comm" at the first difference, on rank 0, and continue. "write": write digests alone; `record`
            then communicates nothing, and no tensors are kept.

    Attributes:
        found: The text of the first difference; None if there was none.

    Raises:
        ArrayError: An argument has a wrong value, or a rank cannot write to the folder. Raised on all ranks.

    >>> import tempfile
    >>> from bagua_comm.testing import run_ranks
    >>> folder = tempfile.mkdtemp()
    >>> def body(comm):
    ...     weight = np.ones(3, np.float32)
    ...     with DivergenceRecorder(comm, folder, action="log") as recorder:
    ...         for step in range(4):
    ...             if (step, comm.rank) == (2, 1):
    ...                 weight[1] = np.nextafter(weight[1], 2)
    ...             recorder.record(step, {"weight": weight})
    ...     return recorder.found
    >>> run_ranks(3, body)[0]
    "step 2: tensor 'weight' (float32[3]) differs between ranks: rank 1 differs from ranks 0, 2"
    """

    @public_method("DivergenceRecorder")
    def __init__(self, comm: Communicator, folder: str | Path, *, action: Action = "raise") -> None:
        self._comm, self.action = comm, action
        self.found: str | None = None
        run = comm.broadcast_object(secrets.token_hex(8), root=0)
        problem: str | None = None
        try:
            if action not in ("raise", "log", "write"):
                raise ArrayError(f"action is {action!r}, expected 'raise', 'log' or 'write'")
            self._folder = Path(folder)
            self._writer = RecordWriter(self._folder, comm.rank, comm.size, run)
        except Exception as exc:  # raised below, on all ranks
            problem = _text_of(exc)
        self._raise_problem(comm.allgather_object((problem, action)))

    def _raise_problem(self, rows: list[tuple[str | None, object]]) -> None:
        for rank, (problem, action) in enumerate(rows):
            if problem is None and action != rows[0][1]:
                problem = f"action is {action!r}, and {rows[0][1]!r} on rank 0; give all ranks the same"
            if problem is not None:
                if hasattr(self, "_writer"):
                    self._writer.close()
                raise ArrayError(f"DivergenceRecorder: rank {rank}: {problem}")

    @public_method("DivergenceRecorder.record")
    def record(self, step: int, tensors: Mapping[str, AnyArray]) -> None:
        """Record tensors that should have the same bits on all ranks at this moment.

        Collective, unless the action is "write". It may be called several times in a step, such as for the
        gradients after their average and for the weights after the optimizer; report and error name the first
        difference in this order.

        Args:
            step: The number of the step, from 0 on.
            tensors: Arrays by name, such as `model.state_dict()` of PyTorch.

        Raises:
            CommMismatch: The tensors, their names or the steps differ between ranks, and the action is "raise".
                Raised on all ranks.
            ArrayError: An argument has a wrong value, or a rank cannot write its file. Raised on all ranks.
        """
        mine, problem, values = Step(-1, (), b""), None, dict[str, Array]()
        try:
            values = _values_of(tensors)
            mine = _digested(_number(step), values)
            self._writer.add(mine)
        except Exception as exc:  # raised below, on all ranks
            problem = _text_of(exc)
        if self.action == "write":
            if problem is not None:
                raise ArrayError(f"record: {problem}")
            return
        if _all_equal(self._comm, mine, failed=problem is not None):
            return
        rows: list[tuple[Step, str | None]] = self._comm.allgather_object((mine, problem))
        for rank, (_, text) in enumerate(rows):
            if text is not None:
                raise ArrayError(f"record: rank {rank}: {text}")
        self._report([row for row, _ in rows], values)

    def _report(self, rows: list[Step], values: dict[str, Array]) -> None:
        """Keep the tensors at the first difference, and raise or log. Collective."""
        text, names = _text_and_names(rows)
        advice = f"for the element: python -m bagua_comm compare {self._folder}"
        if self.found is None:
            self.found = text
            kept = {name: arrays.to_host(values[name]) for name in names if name in values}
            # The error of the first rank that raises may end the others: all have kept their tensors before.
            problems = self._comm.allgather_object(self._keep(rows[self._comm.rank].step, kept))
            failed = [
                f"rank {rank} cannot keep its tensors: {each}" for rank, each in enumerate(problems) if each
            ]
            advice = "; ".join([advice, *failed])
            if self.action == "log" and self._comm.rank == 0:
                _log.error("%s; %s", text, advice)
        if self.action == "raise":
            raise CommMismatch(f"record: {text}; {advice}")

    def _keep(self, step: int, tensors: Mapping[str, Array]) -> str | None:
        """Write the tensors; return the reason if it is not possible."""
        try:
            self._writer.keep(step, tensors)
        except OSError as exc:
            return str(exc)
        return None

    def close(self) -> None:
        """Close this rank's file; closing it again does nothing. Not collective."""
        self._writer.close()

    def _leave(self, error: BaseException) -> None:
        self.close()


def _number(step: int) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ArrayError(f"step is {shown(step)}, expected an int from 0 on")
    return number


def _values_of(tensors: Mapping[str, AnyArray]) -> dict[str, Array]:
    if not isinstance(tensors, Mapping):
        raise ArrayError(f"tensors is {shown(tensors)}, expected arrays by name: a dict")
    found = {}
    for name, x in tensors.items():
        if not isinstance(name, str):
            raise ArrayError(f"a name in tensors is {shown(name)}, expected a str")
        try:
            found[name] = arrays.as_array(x)
            if not arrays.is_movable(found[name].dtype):
                raise ArrayError(f"its dtype is {found[name].dtype}, expected numbers in native byte order")
        except BaguaError as exc:
            raise ArrayError(f"tensor {name!r}: {exc}") from exc
    return found


def _digested(step: int, values: Mapping[str, Array]) -> Step:
    tensors = [Tensor(name, arrays.dtype_name(x.dtype), tuple(x.shape)) for name, x in values.items()]
    return Step(step, tuple(tensors), b"".join(map(arrays.digest, values.values())))


def _text_of(exc: Exception) -> str:
    return str(exc) if isinstance(exc, (BaguaError, OSError)) else repr(exc)


def _all_equal(comm: Communicator, mine: Step, *, failed: bool) -> bool:
    """Whether all ranks have the same record, and none has failed. Collective."""
    terms = [*equality_terms(repr(mine).encode()), np.uint64(failed)]
    largest = comm.allreduce(np.array(terms), op="max")
    return are_equal(largest) and not largest[4]


def _text_and_names(rows: list[Step]) -> tuple[str, tuple[str, ...]]:
    """Describe how the records of all ranks differ, and name the tensors that do."""
    difference = difference_of(rows)
    if difference is None:
        return "the ranks' records are equal, but their hashes differ", ()
    groups, names, step = difference.groups, difference.names, rows[0].step
    if difference.kind == "steps":
        other, most = (rows[group[0]].step for group in (groups[1], groups[0]))
        return f"ranks record different steps: {parted(groups)}: step {other} against step {most}", ()
    if difference.kind == "order":
        return f"step {step}: ranks record their tensors in different orders: {parted(groups)}", ()
    tensor = next(str(entry[0]) for entry in difference.entries if entry is not None)
    verb = "differs between ranks" if len(names) == 1 else f"and {len(names) - 1} more differ between ranks"
    return f"step {step}: tensor {tensor} {verb}: {parted(groups)}", names
