"""The states of algorithms, saved and loaded by tensor name: for checkpoints and new plans.

A state is a dataclass of arrays, numbers and further dataclasses. An array whose last axis is as long as its
bucket is cut into pieces, one for each tensor; numbers are saved with every tensor of the bucket. Other arrays
are saved whole, with the first tensor, and load into the same bucket only. An array of a part of the bucket, in a
`CHUNK`, is saved whole with a description of the part, and loads into the same part only.

An array belongs to its rank, and no other rank can load it, unless its field is marked `REPLICATED`. Numbers
are the same on all ranks, except those marked `OWN_NUMBER`, which are saved as arrays without dimensions. The
marks `MEAN` and `RECREATED` say how `bagua_comm.checkpoint` brings an array to another number of ranks;
`load_state` lets arrays marked `RECREATED` be missing, and keeps what `init` made.

A checkpoint is a dictionary: the entries of `StateHeader`, a "digest" that is equal on ranks that saved together,
a "checksum", and "tensors", the result of `save_state`. `moved` marks one that may come from other ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import arrays
from ..arrays import Array, dtype_name
from ..bucket import Bucket, BucketSpec
from ..comm import Communicator
from ..errors import ArrayError, UnsupportedError, shown
from .base import Algorithm, Rounds
from .parts import PER_BUCKET, check_part, layout_of, layout_of_part, not_movable, without_part

Saved = dict[str, dict[str, Any]]
"""By the name of the tensor, then by the path in the state: pieces of arrays, and numbers."""

# ---------------------------------------------------------------------------------------------------
# Headers of checkpoints
# ---------------------------------------------------------------------------------------------------


class StateHeader(NamedTuple):
    """The settings, step and rank of a checkpoint."""

    algorithm: str
    step: int
    phase: str
    phase_began: int
    rank: int
    size: int

    def digest(self, training: str, algorithm: Algorithm, names: Iterable[str]) -> str:
        """A hash that is equal on all ranks that saved together, and differs from all other checkpoints."""
        steps = (self.step, self.phase, self.phase_began) if steps_in_lockstep(algorithm, self.step) else ()
        together = (training, self.algorithm, self.size, steps, sorted(names))
        return hashlib.blake2b(repr(together).encode(), digest_size=16).hexdigest()


def read_header(saved: object, algorithm: Algorithm, names: Iterable[str]) -> StateHeader:
    """Read and check the header of a checkpoint.

    Raises:
        ArrayError: It is not a checkpoint, it is damaged, or it is not of this algorithm and of tensors of these
            `names`.
    """
    if not isinstance(saved, Mapping):
        raise ArrayError(f"the state is a {type(saved).__name__}, expected what Engine.state_dict gave")
    missing = [name for name in (*StateHeader._fields, "digest", "checksum", "tensors") if name not in saved]
    if missing:
        raise ArrayError(
            f"the state has no {', '.join(map(repr, missing))}: it is damaged, or was saved by an earlier "
            "version; to continue without it, load the weights alone"
        )
    header = StateHeader(*(saved[name] for name in StateHeader._fields))
    for name in ("algorithm", "phase", "digest", "checksum"):
        if not isinstance(saved[name], str):
            raise ArrayError(f"{name!r} is {shown(saved[name])}, expected a string")
    for name in ("step", "phase_began", "rank", "size"):
        least = 1 if name == "size" else 0
        if type(saved[name]) is not int or not least <= saved[name] < 2**63:
            raise ArrayError(f"{name!r} is {shown(saved[name])}, expected an integer of at least {least}")
    if header.algorithm != repr(algorithm):
        raise ArrayError(
            f"saved with {header.algorithm}, but the algorithm is {algorithm!r}; load it with the first one and "
            "switch then, or load the weights alone, into the module itself (`.module` of the wrapper)"
        )
    if header.phase_began > header.step or header.rank >= header.size:
        raise ArrayError(
            f"the state is of step {header.step} in a phase that began in step {header.phase_began}, on rank "
            f"{header.rank} of {header.size}; expected a phase that began before, and a rank below {header.size}"
        )
    wanted = repr(algorithm.phase(header.phase_began))
    if header.phase != wanted:
        raise ArrayError(f"'phase' is {header.phase}, expected {wanted} from step {header.phase_began} on")
    check_names(names, saved["tensors"])
    return header


def steps_in_lockstep(algorithm: Algorithm, step: int) -> bool:
    """Whether all ranks are in the same step; in `Rounds` each rank trains at its own speed."""
    return not isinstance(algorithm.phase(step).window, Rounds)


def with_tensors(saved: Mapping[str, object], tensors: Saved) -> dict[str, object]:
    """A checkpoint with other `tensors`."""
    sealed = checksum(*(saved[name] for name in (*StateHeader._fields, "digest")), saved=tensors)
    return {**saved, "tensors": tensors, "checksum": sealed}


MOVED = "moved"
"""The key of a checkpoint that other ranks may have saved, or ranks on other nodes; see `checkpoint/engines.py`.
When it is loaded, what does not fit is left out if it can be made anew."""


def check_together(algorithm: Algorithm, rows: Sequence[tuple[StateHeader, str]]) -> None:
    """Raise unless ranks saved their checkpoints together.

    Args:
        algorithm: The algorithm of the checkpoints.
        rows: The header and the digest of every rank.

    Raises:
        ArrayError: They did not; the same error on all ranks.
    """
    (first, digest), *_ = rows
    for rank, (theirs, their_digest) in enumerate(rows):
        names = ["size"]
        if steps_in_lockstep(algorithm, first.step) or steps_in_lockstep(algorithm, theirs.step):
            names += ["step", "phase", "phase_began"]
        for name in names:
            mine, other = getattr(first, name), getattr(theirs, name)
            if mine != other:
                hint = "; after `stop`, resume first and then save" if name == "step" else ""
                raise ArrayError(
                    f"load_state_dict: ranks have states that were not saved together: {name!r} is {mine} "
                    f"on rank 0 and {other} on rank {rank}{hint}"
                )
        if digest != their_digest:
            raise ArrayError(
                "load_state_dict: ranks have states that were not saved together: those of rank 0 and rank "
                f"{rank} are from two different trainings"
            )


def check_tensors(
    algorithm: Algorithm,
    pairs: Iterable[tuple[Bucket, object]],
    header: StateHeader,
    saved: Mapping[str, Any],
    comm: Communicator,
) -> None:
    """Raise unless the tensors of a checkpoint can be loaded on this rank.

    Args:
        algorithm: The phase to continue.
        pairs: Its buckets, each with its state.
        header: The header of the checkpoint.
        saved: The checkpoint.
        comm: The ranks.

    Raises:
        ArrayError: Something does not fit a state, belongs to another rank, or is not what was saved.
    """
    tensors = saved["tensors"]
    for bucket, state in pairs:
        per_rank = per_rank_paths(bucket, state, tensors)
        if per_rank and (header.rank, header.size) != (comm.rank, comm.size):
            raise ArrayError(
                f"the state was saved by rank {header.rank} of {header.size}, expected rank {comm.rank} of "
                f"{comm.size}: {algorithm} keeps {per_rank[0]!r}, which differs between ranks"
            )
        check_state(bucket, state, tensors, comm)
    if checksum(*header, saved["digest"], saved=tensors) != saved["checksum"]:
        raise ArrayError(
            "the state is damaged: a number, a shape or a name in it is not what was saved, or it has values of "
            "several ranks, as from torch.distributed.checkpoint, which keeps those of one rank each: use "
            "bagua_torch.Checkpoints, or save the state of ddp.module there, after ddp.average_weights()"
        )


def checksum(*header: object, saved: Saved) -> str:
    """A hash of `header` and of what was saved: numbers, and the shapes and dtypes of arrays."""
    kept = [
        (name, path, f"{dtype_name(value.dtype)}{value.shape}" if hasattr(value, "dtype") else repr(value))
        for name in sorted(saved)
        for path, value in sorted(saved[name].items())
    ]
    return hashlib.blake2b(repr((header, kept)).encode(), digest_size=16).hexdigest()


# ---------------------------------------------------------------------------------------------------
# States, tensor by tensor
# ---------------------------------------------------------------------------------------------------


def has_saved_state(state: object) -> bool:
    """Whether checkpoints hold a part of `state`, now or after some steps."""
    return any(
        entry.value is not None or not entry.field.metadata.get("handed_over") for entry in _fields_of(state)
    )


def replicated_arrays(state: object) -> list[Array]:
    """The arrays of `state` that have the same bytes on all ranks."""
    found = (entry.value for entry in _fields_of(state) if entry.rule == "alike")
    return [value for value in found if hasattr(value, "dtype")]


def check_nothing_lost(bucket: Bucket, state: object, saved: Saved) -> None:
    """Raise unless `state`, of an algorithm with other settings, has a field for everything that was saved.

    Raises:
        ArrayError: Something would be lost.
    """
    fields = {entry.path for entry in _fields_of(state)}
    for tensor in bucket.views:
        for path in saved[tensor]:
            if path.removesuffix(PER_BUCKET) not in fields:
                raise ArrayError(
                    f"replan: the algorithm keeps {path!r} of {tensor!r}, which would be lost with the new "
                    "settings; expected settings that keep it"
                )


def save_state(bucket: Bucket, state: object, comm: Communicator) -> Saved:
    """Copy `state`, by the tensors of `bucket`."""
    saved: Saved = {name: {} for name in bucket.views}
    for entry in _fields_of(state):
        path, value = entry.path, entry.value
        if value is None:
            continue
        part = layout_of_part(entry.chunk, bucket.spec, comm)
        if entry.is_own:
            pieces = {name: np.array(value, np.float64) for name in saved}
        elif not hasattr(value, "dtype"):
            pieces = dict.fromkeys(saved, value)
        elif value.shape[-1:] == bucket.flat.shape and part is None:
            pieces = {name: value[..., where].copy() for name, where in bucket.spec.slices().items()}
        else:
            saved[next(iter(saved))][path + PER_BUCKET] = part or layout_of(bucket.spec)
            pieces = {next(iter(saved)): value.copy()}
        for name, piece in pieces.items():
            saved[name][path] = piece
    return saved


def check_movable(saved: Saved, specs: Iterable[BucketSpec]) -> None:
    """Raise unless the result of `save_state` fits buckets of these `specs`.

    Raises:
        ArrayError: An array belongs to its bucket as a whole, and no new bucket has the same tensors.
    """
    layouts = [layout_of(spec) for spec in specs]
    for tensor, pieces in saved.items():
        for path in pieces:
            if path.endswith(PER_BUCKET) and without_part(pieces[path]) not in layouts:
                raise not_movable(path.removesuffix(PER_BUCKET), tensor)


def check_names(names: Iterable[str], saved: object) -> None:
    """Raise unless `saved` has an entry for each of these tensors.

    Raises:
        ArrayError: It is not a mapping of mappings, or a tensor is missing.
    """
    if not isinstance(saved, Mapping):
        raise ArrayError(f"'tensors' is a {type(saved).__name__}, expected a mapping from names of tensors")
    missing = [name for name in names if name not in saved]
    if missing:
        raise ArrayError(f"nothing was saved for {', '.join(map(repr, missing[:3]))}")
    for name, pieces in saved.items():
        if not isinstance(name, str) or not isinstance(pieces, Mapping):
            raise ArrayError(f"'tensors' has a {type(pieces).__name__} for {name!r}, expected a mapping")


def fitting_parts(bucket: Bucket, state: object, saved: Saved, comm: Communicator) -> dict[str, bool | None]:
    """Whether what can be made anew was saved for the part of the bucket that this rank has; by its path.

    None if it was not saved. These are arrays marked `RECREATED`, and in a `CHUNK` those marked `MEAN`.
    """
    fits: dict[str, bool | None] = {}
    for entry in _fields_of(state):
        if entry.rule != "anew" and not (entry.chunk and entry.rule == "mean"):
            continue
        path, part = entry.path, layout_of_part(entry.chunk, bucket.spec, comm)
        layouts = [saved[t][path + PER_BUCKET] for t in bucket.views if path + PER_BUCKET in saved[t]]
        whole = [part or layout_of(bucket.spec)] if layouts or part else []
        is_saved = bool(layouts) or any(path in saved[tensor] for tensor in bucket.views)
        fits[path] = layouts == whole if is_saved else None
    return fits


def check_state(bucket: Bucket, state: object, saved: Saved, comm: Communicator) -> None:
    """Raise unless `load_state` can load `saved` into `state`. Changes nothing.

    Raises:
        ArrayError: Something is missing, or does not fit this bucket: a path, a type, a shape or a dtype.
    """
    entries = {entry.path: entry for entry in _fields_of(state)}
    fields = {path: entry.value for path, entry in entries.items()}
    for tensor in bucket.views:
        unknown = [path for path in saved[tensor] if str(path).removesuffix(PER_BUCKET) not in fields]
        if unknown:
            wanted = ", ".join(map(repr, fields)) or "nothing"
            raise ArrayError(f"{tensor!r} has {unknown[0]!r}, expected {wanted}")
    for path, value in fields.items():
        found = {tensor: saved[tensor][path] for tensor in bucket.views if path in saved[tensor]}
        if entries[path].is_own:
            for name, piece in found.items():
                _check_array(path, name, piece, np.empty((), np.float64), ())
            if found:
                numbers = {name: float(found[name]) if name in found else None for name in bucket.views}
                _check_number(path, 0.0, numbers)
            continue
        layouts = [saved[t][path + PER_BUCKET] for t in bucket.views if path + PER_BUCKET in saved[t]]
        if not found and not layouts and (value is None or entries[path].rule == "anew"):
            continue  # made when it is first used, or by init
        tensor = next(iter(found), next(iter(bucket.views)))
        part = layout_of_part(entries[path].chunk, bucket.spec, comm)
        if entries[path].chunk and (found or layouts) and not isinstance(value, (bool, int, float)):
            check_part(path, tensor, layouts, part, bucket.spec)
        if layouts and (list(found) != [tensor] or layouts != [part or layout_of(bucket.spec)]):
            raise not_movable(path, tensor)
        if value is None:
            value = bucket.flat
        if not hasattr(value, "dtype"):
            _check_number(path, value, {name: found.get(name) for name in bucket.views})
        elif layouts:
            _check_array(path, tensor, found[tensor], value, None if value is bucket.flat else value.shape)
        elif value.shape[-1:] != bucket.flat.shape or part is not None:
            raise ArrayError(f"{path!r} is missing from {tensor!r}, expected an array of shape {value.shape}")
        else:
            for spec in bucket.spec.tensors:
                if spec.name in found or fields[path] is not None:
                    shape = (*value.shape[:-1], spec.size)
                    _check_array(path, spec.name, found.get(spec.name), value, shape)


def _check_number(path: str, mine: object, found: Mapping[str, object]) -> None:
    """Raise unless all of `found` are the same number, of the type of `mine`."""
    first = next(iter(found.values()))
    for tensor, value in found.items():
        fits = type(value) is type(mine) or (type(mine) is float and type(value) is int)
        if not fits:
            raise ArrayError(f"{path!r} of {tensor!r} is {shown(value)}, expected {_a(mine)} such as {mine!r}")
        if value != first and not (value != value and first != first):  # NaN is unlike itself
            raise ArrayError(
                f"{path!r} of {tensor!r} is {value!r}, expected {first!r}, as for other tensors of its bucket. "
                "They were in several buckets when this was saved, one of them with an exchange under way: pack "
                "both plans by Plan.pack(tensors, groups=algorithm.groups(tensors)), or save without one"
            )


def _check_array(path: str, tensor: str, piece: Any, like: Array, shape: tuple[int, ...] | None) -> None:
    """Raise unless `piece` has the dtype of `like` and this shape, or any shape if None."""
    wanted = f"{like.dtype}" if shape is None else f"{like.dtype}{shape}"
    try:
        arrays.library(piece)
    except UnsupportedError:
        found = "missing" if piece is None else _a(piece)
        raise ArrayError(f"{path!r} of {tensor!r} is {found}, expected an array, {wanted}") from None
    if piece.dtype != like.dtype or (shape is not None and piece.shape != shape):
        raise ArrayError(f"{path!r} of {tensor!r} is {piece.dtype}{piece.shape}, expected {wanted}")


def _a(value: object) -> str:
    kind = type(value).__name__
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def per_rank_paths(bucket: Bucket, state: object, saved: Saved) -> list[str]:
    """The paths in `saved` of arrays that differ between ranks."""
    replicated = {path for path, rule in rules_of(state).items() if rule == "alike"}
    pieces = ((tensor, path) for tensor in bucket.views for path in saved[tensor])
    return [
        path
        for tensor, path in pieces
        if hasattr(saved[tensor][path], "dtype")
        and (path not in replicated or path + PER_BUCKET in saved[tensor])
    ]


def rules_of(state: object) -> dict[str, str | None]:
    """How each array moves to another number of ranks, by its path in the state; numbers are included.

    "alike": it is copied. "mean": each rank gets the mean. "anew": `init` makes it. None: it cannot move.
    """
    return {entry.path: entry.rule for entry in _fields_of(state)}


def load_state(bucket: Bucket, state: object, saved: Saved, comm: Communicator) -> None:
    """Load the result of `save_state`, even if the tensors were in other buckets then.

    Call `check_state` first, unless `saved` was made in this program.

    Raises:
        ArrayError: Something does not fit this bucket.
    """
    for entry in _fields_of(state):
        path, owner, field, value, chunk = entry
        found = {tensor: saved[tensor][path] for tensor in bucket.views if path in saved[tensor]}
        if not found:
            continue
        tensor, piece = next(iter(found.items()))
        if entry.is_own:
            setattr(owner, field.name, float(piece))
            continue
        layout = saved[tensor].get(path + PER_BUCKET)
        part = layout_of_part(chunk, bucket.spec, comm)
        if layout not in (None, part or layout_of(bucket.spec)):
            raise not_movable(path, tensor)
        if value is None and hasattr(piece, "dtype"):  # it is made when it is first used
            value = arrays.zeros_like(bucket.flat if layout is None else _in_library_of(piece, bucket.flat))
            setattr(owner, field.name, value)
        if not hasattr(value, "dtype"):
            setattr(owner, field.name, piece)
        elif layout is None and value.shape[-1:] == bucket.flat.shape:
            for tensor, where in bucket.spec.slices().items():
                value[..., where] = _in_library_of(found.get(tensor, 0), value)
        elif piece.shape == value.shape:
            value[...] = _in_library_of(piece, value)
        else:
            raise ArrayError(f"load_state: {path!r} has shape {piece.shape}, expected {value.shape}")


def copy_numbers(state: object, other: object) -> None:
    """Copy the numbers of `other` to `state`: they are the same for all buckets, as counts of steps."""
    numbers = {e.path: e.value for e in _fields_of(other) if e.is_own or isinstance(e.value, (int, float))}
    for entry in _fields_of(state):
        if entry.path in numbers and (entry.is_own or isinstance(entry.value, (int, float))):
            setattr(entry.owner, entry.field.name, numbers[entry.path])


def _in_library_of(piece: Any, like: Array) -> object:
    """`piece` on the host or on the device, as `like` is; the host waits for a copy."""
    if not hasattr(piece, "dtype") or arrays.library(piece) == arrays.library(like):
        return piece
    if isinstance(like, np.ndarray):
        return piece.get()
    there = arrays.empty(piece.shape, piece.dtype, like=like)
    there.set(piece)
    return there


class _Entry(NamedTuple):
    """An array or a number of a state."""

    path: str
    owner: object
    field: dataclasses.Field[object]
    value: Any
    chunk: bool | str = False
    """Whether an array covers a part of the bucket, whatever its length; see `CHUNK`. "of nodes": unless each
    rank is a node of its own."""

    @property
    def rule(self) -> str | None:
        """See `rules_of`."""
        return "alike" if self.field.metadata.get("alike") else self.field.metadata.get("reshape")

    @property
    def is_own(self) -> bool:
        """Whether it is a number that differs between ranks, or None in place of it; see `OWN_NUMBER`."""
        return bool(self.field.metadata.get("own_number"))


def _fields_of(state: Any, prefix: str = "", chunk: bool | str = False) -> Iterator[_Entry]:
    """All arrays and numbers of a state, except transient ones."""
    settings = getattr(type(state), "__dataclass_params__", None)
    if settings is None or settings.frozen:  # a frozen dataclass holds settings, not state
        return
    for field in dataclasses.fields(state):
        value, path = getattr(state, field.name), prefix + field.name
        if field.metadata.get("transient"):
            continue
        if dataclasses.is_dataclass(value):
            inner = prefix if field.metadata.get("same_path") else f"{path}."
            yield from _fields_of(value, inner, chunk or field.metadata.get("chunk", False))
        elif value is None or isinstance(value, (bool, int, float)) or hasattr(value, "dtype"):
            yield _Entry(path, state, field, value, chunk)
