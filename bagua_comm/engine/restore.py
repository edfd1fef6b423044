"""The state of an engine's algorithm: saved, checked on all ranks, and loaded, also into another plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ..algorithms.base import Algorithm, Combinator, Payload, State
from ..algorithms.parts import PER_BUCKET
from ..algorithms.state import (
    MOVED,
    Saved,
    StateHeader,
    check_nothing_lost,
    check_tensors,
    check_together,
    checksum,
    fitting_parts,
    load_state,
    read_header,
    rules_of,
    save_state,
    with_tensors,
)
from ..bucket import Bucket
from ..comm import Communicator
from ..comm.outcomes import on_all_ranks
from ..errors import ArrayError, warn
from .checks import new_token

T = TypeVar("T")


class Checkpoint(NamedTuple):
    """A checkpoint that all ranks have checked, and the states to load it into."""

    training: str
    """A new token of the training run, the same on all ranks."""
    header: StateHeader
    states: list[State]
    continues: bool
    """Whether its phase continues; else the phase ends at FORWARD, and nothing is loaded."""
    tensors: Saved
    """The loaded state, by tensor name."""


def save_states(comm: Communicator, buckets: Iterable[Bucket], states: Iterable[State]) -> Saved:
    """Copy the state of each bucket, by tensor name."""
    saved: Saved = {}
    for bucket, state in zip(buckets, states, strict=True):
        saved.update(save_state(bucket, state, comm))
    return saved


def load_states(comm: Communicator, buckets: Iterable[Bucket], states: Iterable[State], saved: Saved) -> None:
    """Copy what `save_states` returned into the states of these buckets."""
    for bucket, state in zip(buckets, states, strict=True):
        load_state(bucket, state, saved, comm)


def make_state_dict(header: StateHeader, training: str, algorithm: Algorithm, tensors: Saved) -> dict[str, Any]:
    """The dictionary that `Engine.state_dict` returns."""
    digest = header.digest(training, algorithm, tensors)
    return {
        **header._asdict(),
        "digest": digest,
        "checksum": checksum(*header, digest, saved=tensors),
        "tensors": tensors,
    }


def check_state_dict(
    comm: Communicator,
    algorithm: Algorithm,
    buckets: Mapping[Payload, Sequence[Bucket]],
    names: Sequence[str],
    saved: Mapping[str, Any],
) -> Checkpoint:
    """Check on all ranks that `saved` can be loaded, and make the states for it.

    Collective.

    Args:
        comm: The communicator of an idle lane.
        algorithm: The algorithm of the engine.
        buckets: Its buckets, by payload.
        names: The tensors of its current phase.
        saved: The result of `Engine.state_dict`.

    Raises:
        ArrayError: On all ranks; see `Engine.load_state_dict`.
    """

    def read() -> tuple[StateHeader, str, str, object]:
        return read_header(saved, algorithm, names), saved["digest"], new_token(), saved.get(MOVED)

    rows = _on_all_ranks(comm, read)
    header = rows[comm.rank][0]
    check_together(algorithm, [row[:2] for row in rows])
    phase = algorithm.phase(header.phase_began)
    continues = repr(algorithm.phase(header.step)) == header.phase
    states = [phase.init(bucket, comm) for bucket in buckets[phase.payload]]
    pairs = list(zip(buckets[phase.payload], states, strict=True)) if continues else []
    lost: list[str] = []
    if all(row[3] is True for row in rows):
        tensors, lost = _without_misfits(comm, pairs, saved["tensors"], resized=header.size != comm.size)
        header = header._replace(rank=comm.rank, size=comm.size)
        saved = with_tensors({**saved, **header._asdict()}, tensors)
    _on_all_ranks(comm, lambda: check_tensors(phase, pairs, header, saved, comm))
    if lost and comm.rank == 0:
        warn(
            f"load_state_dict: {', '.join(lost)} of {phase} cannot be loaded, since nodes have other ranks now, "
            "or it is lost on a rank; all ranks make it anew",
            RuntimeWarning,
        )
    return Checkpoint(rows[0][2], header, states, continues, saved["tensors"])


def _on_all_ranks(comm: Communicator, read: Callable[[], T]) -> list[T]:
    """The results of `read` on all ranks; an error of one is raised on all. Collective."""

    def unreadable(text: str) -> ArrayError:
        return ArrayError(f"the state cannot be read: {text}")

    return on_all_ranks(comm, "load_state_dict", read, unreadable)


def _without_misfits(
    comm: Communicator, pairs: Sequence[tuple[Bucket, State]], saved: Saved, *, resized: bool
) -> tuple[Saved, list[str]]:
    """Leave out what can be made anew, where a rank has nothing that fits it, of each bucket on all ranks.

    Collective. One rank alone could not make it anew: replicas are consistent only together.

    Returns:
        What is left, and the paths of what is lost, except replicas that all ranks expect to make anew.
    """
    rows = _on_all_ranks(comm, lambda: [fitting_parts(bucket, state, saved, comm) for bucket, state in pairs])
    tensors: Saved = {name: dict(pieces) for name, pieces in saved.items()}
    lost: set[str] = set()
    for (bucket, state), *found in zip(pairs, *rows, strict=True):
        rules = rules_of(state)
        for path in {path for fits in found for path in fits}:
            fits = {each.get(path) for each in found}
            if False not in fits and not (None in fits and (resized or rules[path] == "anew")):
                continue
            if fits != {None} or rules[path] != "anew":
                lost.add(repr(path))
            for name in bucket.views:
                for key in (path, path + PER_BUCKET):
                    tensors[name].pop(key, None)
    return tensors, sorted(lost)


# Another plan -----------------------------------------------------------------------------------------------


def check_same_types(old: Algorithm, new: Algorithm) -> None:
    """Raise unless `new` is `old` with other settings, in all phases.

    Raises:
        ArrayError: It is another algorithm.
    """
    if [_types_of(phase) for phase in new.phases] != [_types_of(phase) for phase in old.phases]:
        raise ArrayError(f"replan: algorithm is {new}, expected {old} with other settings")


def phase_to_continue(algorithm: Algorithm, current: Algorithm, *, began: int, step: int) -> tuple[int, bool]:
    """The step in which the phase of an algorithm with new settings began, and whether it is the current one.

    If it is another phase, that one begins in this step.
    """
    continues = _types_of(algorithm.phase(began)) == _types_of(current)
    return (began if continues else step), continues


def _types_of(phase: Algorithm) -> tuple[object, ...]:
    """The types of an algorithm and of those inside it, whatever their settings."""
    inner = _types_of(phase.algorithm) if isinstance(phase, Combinator) else ()
    return (type(phase), phase.payload, *inner)


def make_states(
    phase: Algorithm, buckets: Sequence[Bucket], comm: Communicator, saved: Saved | None
) -> list[State]:
    """Make the states of a phase for these buckets.

    Collective.

    Raises:
        ArrayError: They have no field for something in `saved`, which would be lost.
    """
    states = [phase.init(bucket, comm) for bucket in buckets]
    if saved is not None:
        for bucket, state in zip(buckets, states, strict=True):
            check_nothing_lost(bucket, state, saved)
    return states
