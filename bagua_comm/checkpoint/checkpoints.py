"""Checkpoints of trees of arrays and plain values, saved and loaded by all ranks together."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..comm import Communicator
from ..comm.outcomes import on_all_ranks, text_of
from ..comm.public_methods import public_method
from ..errors import ArrayError, BaguaError, CheckpointError, CommMismatch, shown
from ..logs import log_on_root, megabytes
from ..objects.closing import Closing
from ..objects.pickling import Live
from . import saving, slabs, trees
from .folders import FORMAT, VERSION, Folder, Found, Manifest, file_name, manifest_at
from .loading import Reader
from .saving import SaveJob, Staging
from .trees import Packed, differing_parts, shortened

T = TypeVar("T")

_log = logging.getLogger(__name__)

BEAT_S = 0.25
"""The interval at which ranks report their progress to each other while files are written."""

LEAVE_S = 10.0
"""How long a rank that leaves after an error waits for its save in progress, in seconds."""

QUIET_S = 1.0
"""How long it waits before it prints why, in seconds."""

STOP_S = 1.0
"""How long a save that was given up may take to end, in seconds."""

LEFT = "it left after an error"
"""The reason of a save that was given up."""

_MARK_IT = "put what belongs to a rank in Own(...)"
_SAME_SLABS = (
    "give slabs of one dtype, and of the same lengths along all axes but the one marked *; if they are blocks of "
    "a grid of several axes, gather those of a row first, see docs/guides/checkpoints.md"
)
_GIVEN_UP = "another rank has failed"
_RUNNING, _DONE, _FAILED = range(3)


class Loaded(NamedTuple):
    """Result of `Checkpoints.load`."""

    step: int
    tree: Any
    """The saved tree, with every `Own` replaced by this rank's value."""
    ranks: int
    """The number of ranks that saved it."""
    skipped: tuple[str, ...] = ()
    """With `fallback`: newer checkpoints that could not be loaded, and why."""


class Checkpoints(Live, Closing):
    """Checkpoints in a folder that all ranks share: complete or absent, even if a save is interrupted.

    Collective. `save` copies this rank's part and returns; a thread writes it in the background. Arrays and
    values that all ranks share are written once, a part by each rank. Per-rank values are marked:

        with Checkpoints("runs/7", comm) as checkpoints:
            ...
            checkpoints.save(step, {"weights": w, "lr": 0.1, "generator": Own(state)})

    A tree holds NumPy and CuPy arrays (and objects with `__dlpack__`), NumPy's scalars, None, bool, int, float,
    complex, str, bytes, and lists, tuples and dicts of these. All are restored bit for bit; arrays are
    restored as NumPy arrays. Nothing is pickled: files are JSON and safetensors.

    Close it, or use it as a context manager. Only one program at a time may save in a folder; any number may
    load.

    Args:
        folder: The folder of the checkpoints, in a file system that all ranks share. Made when it is needed.
        comm: The ranks. Checkpoints work on a duplicate of it.
        keep: The number of newest checkpoints to keep; None keeps all.
        stall_s: How long a rank may write without progress before the save fails, in seconds.

    Raises:
        ArrayError: An argument is out of range, or differs between ranks.

    >>> import tempfile
    >>> from bagua_comm import Own
    >>> from bagua_comm.testing import run_ranks
    >>> def body(comm):
    ...     with Checkpoints(folder, comm) as checkpoints:
    ...         checkpoints.save(10, {"weights": np.ones(3), "rank": Own(comm.rank, "drop")})
    ...         return checkpoints.load().tree
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run_ranks(2, body)
    [{'weights': array([1., 1., 1.]), 'rank': 0}, {'weights': array([1., 1., 1.]), 'rank': 1}]
    """

    _to_array: trees.ToArray = staticmethod(trees.as_tagged)
    _from_array: trees.FromArray = staticmethod(trees.from_tagged)

    @public_method("Checkpoints")
    def __init__(
        self, folder: str | Path, comm: Communicator, *, keep: int | None = 3, stall_s: float = 600.0
    ) -> None:
        self._closed = False
        self._lane = comm.lane()
        self._comm: Communicator = self._lane.comm
        try:
            settings = self._together("Checkpoints", lambda: _checked(folder, keep, stall_s))
            for rank, other in enumerate(settings):
                if other != settings[0]:
                    raise ArrayError(f"Checkpoints: rank 0 has {settings[0]}, but rank {rank} has {other}")
        except BaseException:
            self._lane.close()
            raise
        self.folder = Path(folder)
        self.keep = keep
        self._stall_s = stall_s
        self._files = Folder(self.folder)
        self._staging = Staging()
        self._worker = ThreadPoolExecutor(1, "checkpoints")
        self._saving: tuple[int, Future[str | None]] | None = None
        """The step of the save in progress, and its future error."""
        self._given_up = False
        """Whether the save in progress must end because this rank leaves."""
        self._open = comm.open_checkpoints
        self._open.append(self)
        self._at_exit = functools.partial(_report_unsaved, weakref.ref(self))
        atexit.register(self._at_exit)

    # Saving -----------------------------------------------------------------------------------------

    @public_method("Checkpoints.save")
    def save(self, step: int, tree: object, *, wait: bool = False) -> None:
        """Save a tree as the checkpoint of a step.

        Collective. Returns when this rank's part has been copied, so that training may change its arrays. First
        waits for a save in progress. A checkpoint of the same step is replaced when the new one is complete.
        The next call of `save`, `wait`, `load` or `close` raises the error of a failed save.

        All ranks pass the same tree, except inside of `Own`. Other values and shapes are compared. Each rank
        compares the part of arrays that the previous rank writes with its own copy.

        Args:
            step: A number of at least 0.
            tree: The tree to save.
            wait: Return when the checkpoint is complete.

        Raises:
            ArrayError: `step` or `tree` is out of range.
            CheckpointError: The last save failed, or with `wait` this one; on all ranks.
            CommMismatch: Ranks pass different steps or trees; the message names the path.
            UnsupportedError: The tree holds an unsupported value; the message names its path.
        """
        self.wait()
        jobs: list[tuple[Packed, SaveJob]] = []

        def prepare() -> tuple[tuple[int, str], list[int]]:
            if type(step) is not int or not 0 <= step < 2**60:
                raise ArrayError(f"step is {shown(step)}, expected an integer of at least 0")
            packed = trees.pack(tree, self._to_array)
            digest = saving.digest(packed)
            jobs.append((packed, saving.stage(step, packed, self._staging, self._comm.rank, self._comm.size)))
            return (step, digest), [slab.length for slab in packed.slabs]

        rows = self._together("save", prepare)
        ((packed, job),) = jobs
        if any(row[0] != rows[0][0] for row in rows):
            raise self._difference(step, packed)
        wholes = slabs.wholes_of(packed.slabs, [lengths for _, lengths in rows])
        future = self._lane.submit(self._write, job._replace(wholes=wholes))
        self._saving = step, future
        if wait:
            self.wait()

    @public_method("Checkpoints.wait")
    def wait(self) -> None:
        """Wait for the save in progress, if there is one.

        Collective.

        Raises:
            CheckpointError: It failed on a rank, which the message names; the same on all ranks. Earlier
                checkpoints are unchanged, unless the message says that this one is complete.
        """
        if self._closed:
            raise CheckpointError("these checkpoints are closed")
        if self._saving is None:
            return
        step, future = self._saving
        try:
            self._lane.wait()
        finally:
            if future.done():
                self._saving = None
        problem = future.result()
        if problem is not None:
            raise CheckpointError(f"saving step {step} in {self.folder}: {problem}")

    def _difference(self, step: int, packed: Packed) -> CommMismatch:
        """The first difference between the ranks' trees. Collective."""
        rows = self._comm.allgather_object([("step", str(step)), *packed.values])
        for rank, row in enumerate(rows):
            for (path, mine), (other_path, other) in zip(rows[0], row, strict=False):
                if (path, mine) != (other_path, other):
                    if path != other_path:
                        here, there = differing_parts(path, other_path)
                        what = f"rank 0 has {here} where rank {rank} has {there}"
                    else:
                        here, there = differing_parts(mine, other)
                        what = f"{shortened(path)} is {here} on rank 0 and {there} on rank {rank}"
                    cure = _SAME_SLABS if mine.startswith("a slab ") and other.startswith("a slab ") else _MARK_IT
                    return CommMismatch(f"save: ranks have different trees: {what}; {cure}")
        return CommMismatch(f"save: ranks have different trees; {_MARK_IT}")

    @public_method("Checkpoints.save")
    def _write(self, job: SaveJob) -> str | None:
        """Write a checkpoint; return the reason of a failure. Runs on the lane. Collective."""
        files, comm, began_s = self._files, self._comm, time.monotonic()
        problem = self._on_root(lambda: files.begin(job.step))[1]
        if problem is not None:
            return problem
        folder = files.unfinished(job.step)
        part, problem = self._beside(lambda note: saving.write(folder, job, comm.rank, note))
        rows = comm.gather_object((part, problem), root=0) or []
        problem = _first_problem([problem for _, problem in rows])
        parts = [part for part, _ in rows if part is not None]
        if problem is None and parts:
            problem = saving.first_mismatch(parts)
        sizes = {file_name(rank): part.file["bytes"] for rank, part in enumerate(parts)}
        joined = slabs.manifest_entry(job.wholes, [part.joined for part in parts if part.joined])
        if joined is not None:
            sizes[slabs.FILE] = joined["bytes"]
        problem, nbytes = comm.broadcast_object((problem, sum(sizes.values())), root=0)

        def end(_: Callable[[], None]) -> None:
            if comm.rank != 0:
                return
            if problem is not None:
                files.drop(job.step)
                return
            plan = {"tree": job.tree, "shared": job.shared, "own": [part.own for part in parts]}
            manifest = {
                "format": FORMAT,
                "version": VERSION,
                "world": comm.size,
                "step": job.step,
                "files": [part.file for part in parts],
                "plan": plan,
                "concatenated": joined,
            }
            files.publish(job.step, manifest, sizes, self.keep)

        ended = comm.broadcast_object(self._beside(end)[1], root=0)
        problem = problem or ended
        if problem is None:
            seconds = time.monotonic() - began_s
            size = megabytes(nbytes)
            log_on_root(
                _log, comm.rank, "step %d is saved in %s: %s in %.1f s", job.step, self.folder, size, seconds
            )
        return problem

    def _beside(self, body: Callable[[Callable[[], None]], T]) -> tuple[T | None, str | None]:
        """Run `body` until it has ended on all ranks; return its result or the problem.

        Collective. It runs on the thread that reads and writes. Meanwhile no call between the ranks lasts much
        longer than `BEAT_S`, so none times out.

        Args:
            body: Called with a function to call after every piece.
        """
        progress = _Progress()
        work = self._worker.submit(body, progress.note)
        beat_s = min(BEAT_S, self._comm.timeout_s / 4)
        state, any_runs = _RUNNING, True
        while any_runs:
            if self._given_up:
                state = _FAILED
            if state == _RUNNING:
                wait([work], timeout=beat_s)
                if work.done():
                    state = _DONE if work.exception() is None else _FAILED
                elif progress.idle_s() > self._stall_s:
                    state = _FAILED
            else:
                time.sleep(beat_s / 20)  # for the others
            flags = np.array([state == _RUNNING, state == _FAILED], np.uint8)
            any_runs, progress.given_up = self._comm.allreduce(flags, op="max").astype(bool).tolist()
        if not work.done() and self._given_up:
            return None, LEFT
        if not work.done():
            return None, f"the disk has not answered for {self._stall_s:g} s"
        error = work.exception()
        return (work.result(), None) if error is None else (None, text_of(error))

    # Loading ----------------------------------------------------------------------------------------

    @public_method("Checkpoints.latest")
    def latest(self, *, fallback: bool = False) -> int | None:
        """The step of the newest checkpoint; None if there is none.

        Collective.

        Args:
            fallback: Skip checkpoints with a damaged manifest.

        Raises:
            CheckpointError: The folder cannot be read, or there is a damaged manifest; on all ranks.
        """
        self.wait()
        for found in self._candidates():
            if found.problem is None:
                return found.step
            if not fallback:
                raise CheckpointError(_cannot(found, found.problem))
        return None

    @public_method("Checkpoints.load")
    def load(self, step: int | None = None, *, fallback: bool = False, like: Any = None) -> Loaded:
        """Load the checkpoint of a step, or the newest one.

        Collective. All bytes are compared with their checksums.

        Args:
            step: Its step; None for the newest.
            fallback: If that one is damaged, warn, and load the one before it.
            like: A tree as for `save`. Each `Own(slab, "concatenate")` in it has the shape of the slab that this
                rank gets. Its elements and all other values are ignored. An array for which no rank gives a slab
                is divided as by `numpy.array_split`.

        Returns:
            Its step and its tree, with new arrays.

        Raises:
            ArrayError: There is no such checkpoint.
            CheckpointError: It is damaged or incompatible, or cannot be loaded on this number of ranks, or in
                slabs as of `like`; the same on all ranks. Nothing is loaded.
        """
        self.wait()

        def slabs_given() -> dict[str, tuple[str, int]]:
            packed = trees.pack(like, self._to_array)
            return {slab.path: (slab.kind, slab.length) for slab in packed.slabs}

        given = self._together("load", slabs_given)
        skipped: list[str] = []
        candidates = self._candidates()
        if step is not None:
            wanted = [n for n, each in enumerate(candidates) if each.step == step]
            candidates = candidates[wanted[0] :] if wanted else []
        for found in candidates:
            answer, problem = self._on_root(lambda found=found: manifest_at(found.path))  # type: ignore[misc]
            manifest, problem = answer or ({}, problem)
            problem = problem or found.problem
            tree: object = None
            if problem is None:
                try:
                    (tree,) = self._read(found, manifest, given)
                except CheckpointError as exc:
                    problem = str(exc)
            if problem is None:
                log_on_root(_log, self._comm.rank, "step %d is loaded from %s", found.step, self.folder)
                return Loaded(found.step, tree, manifest["world"], tuple(skipped))
            if not fallback:
                raise CheckpointError(_cannot(found, problem))
            skipped.append(_cannot(found, problem))
            if self._comm.rank == 0:
                warnings.warn(f"{skipped[-1]}; loading the one before", RuntimeWarning, stacklevel=2)
        if skipped:
            raise CheckpointError("no checkpoint can be loaded: " + "; ".join(skipped))
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise ArrayError(f"load: there is {what} in {self.folder}")

    def _read(self, found: Found, manifest: Manifest, given: list[dict[str, tuple[str, int]]]) -> tuple[object]:
        """Read the tree, in a tuple; an error on one rank is raised on all. Collective."""
        comm = self._comm

        def read(note: Callable[[], None]) -> tuple[object]:
            with Reader(found.path, manifest, comm.rank, given, self._from_array, note) as reader:
                return (reader.read(),)

        tree, problem = self._beside(read)
        problem = _first_problem(comm.allgather_object(problem))
        if tree is None or problem is not None:
            raise CheckpointError(problem)
        return tree

    def _candidates(self) -> list[Found]:
        """The complete checkpoints that rank 0 sees. Collective."""
        found, problem = self._on_root(self._files.complete)
        if problem is not None:
            raise CheckpointError(f"{self.folder} cannot be read: {problem}")
        return found or []

    # Together ---------------------------------------------------------------------------------------

    def _together(self, call: str, body: Callable[[], T]) -> list[T]:
        """The results of `body` of all ranks; an error on one rank is raised on all. Collective."""
        return on_all_ranks(self._comm, call, body, CheckpointError)

    def _on_root(self, body: Callable[[], T]) -> tuple[T | None, str | None]:
        """The result of `body` on rank 0, and its problem; the same on all ranks. Collective."""
        outcome: tuple[T | None, str | None] = (None, None)
        if self._comm.rank == 0:
            try:
                outcome = (body(), None)
            except Exception as exc:
                outcome = (None, text_of(exc))
        return self._comm.broadcast_object(outcome, root=0)

    # The end ----------------------------------------------------------------------------------------

    @public_method("Checkpoints.close")
    def close(self) -> None:
        """Wait for the save in progress, then free the lane and the threads; closing twice does nothing.

        Collective.

        Raises:
            CheckpointError: That save failed.
        """
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._closed = True
            self._forget()
            self._worker.shutdown(wait=False)
            self._files.close()
            self._lane.close()

    @property
    def group(self) -> str:
        """The name of its communicator, as in messages."""
        return self._comm.group

    def _forget(self) -> None:
        """Let nothing close it, or speak of it, any more."""
        atexit.unregister(self._at_exit)
        with contextlib.suppress(ValueError):
            self._open.remove(self)

    def _leave(self, error: BaseException) -> None:
        self._closed = True
        self._forget()
        try:
            self._end_save(error)
        finally:
            self._worker.shutdown(wait=False)
            with contextlib.suppress(BaguaError):
                self._lane._leave(error)

    def _end_save(self, error: BaseException) -> None:
        """Complete a save in progress if the other ranks take part in time; else give it up, and print that.

        Not collective: other ranks may go on, or have left.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        step, save = saving
        self._lane.forget(save)
        comm, what = self._comm, f"the checkpoint of step {step} in {self.folder}"
        who, limit_s = f"rank {comm.rank} of {comm.size}", min(LEAVE_S, comm.timeout_s)
        try:
            if wait([save], min(QUIET_S, limit_s)).not_done and limit_s > QUIET_S:
                reason = f"{type(error).__name__}: {shortened(str(error))}".rstrip(": ")
                _say(f"{who} leaves after {reason}; it waits up to {limit_s:g} s for {what}")
                wait([save], limit_s - QUIET_S)
        finally:  # Ctrl-C ends the wait
            if not save.done():
                self._given_up = True
                if wait([save], STOP_S).not_done:  # another rank does not answer
                    comm.stop_calls(LEFT)
                    wait([save], STOP_S)
            if not _is_complete(save):
                _say(f"{who}: {what} was not completed{_why(save)}")


def _report_unsaved(ref: weakref.ref[Checkpoints]) -> None:
    """Print that the program ends while a checkpoint is not known to be complete."""
    found = ref()
    if found is None or not found._comm.guard.is_of_this_process:
        return
    saving = found._saving
    if saving is not None and not _is_complete(saving[1]):
        _say(
            f"the program ends, and the checkpoint of step {saving[0]} in {found.folder} may be "
            "incomplete, because Checkpoints was not closed: use `with Checkpoints(...)`, or call close()"
        )


class _Progress:
    """The time of a rank's last progress, and whether another rank has failed."""

    def __init__(self) -> None:
        self._moved_s = time.monotonic()
        self.given_up = False

    def note(self) -> None:
        """Record progress; called by the thread that writes, after every piece."""
        self._moved_s = time.monotonic()
        if self.given_up:
            raise CheckpointError(_GIVEN_UP)

    def idle_s(self) -> float:
        return time.monotonic() - self._moved_s


def _first_problem(problems: list[str | None]) -> str | None:
    """The problem of the first rank that has one, with its number; ranks that gave up for another count last."""
    failed = [
        (text == _GIVEN_UP, f"rank {rank}: {text}") for rank, text in enumerate(problems) if text is not None
    ]
    return min(failed, key=lambda each: each[0])[1] if failed else None


def _checked(folder: object, keep: object, stall_s: object) -> tuple[str, object, object]:
    if not isinstance(folder, (str, Path)):
        raise ArrayError(f"folder is {shown(folder)}, expected a path")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ArrayError(f"keep is {shown(keep)}, expected an integer of at least 1, or None to keep all")
    if not isinstance(stall_s, (int, float)) or not stall_s > 0:
        raise ArrayError(f"stall_s is {shown(stall_s)}, expected a number of seconds above 0")
    return str(folder), keep, stall_s


def _cannot(found: Found, problem: str) -> str:
    return f"the checkpoint of step {found.step} in {found.path.parent} cannot be loaded: {problem}"


def _say(text: str) -> None:
    """Print a line to stderr."""
    print(f"bagua_comm: {text}", file=sys.stderr, flush=True)


def _is_complete(save: Future[str | None]) -> bool:
    """Whether a checkpoint is complete."""
    return save.done() and not save.cancelled() and save.exception() is None and save.result() is None


def _why(save: Future[str | None]) -> str:
    """The reason why a save failed, after a colon; empty if it has not ended."""
    if not save.done() or save.cancelled():
        return ""
    error = save.exception()
    return f": {save.result() if error is None else text_of(error)}"
