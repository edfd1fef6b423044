"""What every algorithm must do, as an executable contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..algorithms import Algorithm, Point
from ..algorithms.base import phases_of
from ..arrays import Array
from ..bucket import Plan, TensorSpec
from ..comm import Communicator
from ..engine import Engine
from ..errors import CommMismatch
from .codecs import names_of
from .values import sample
from .worlds import run_ranks


def check_algorithm(
    algorithm: Algorithm, *, comm: Communicator | None = None, sizes: Sequence[int] = (1, 2, 3, 4)
) -> None:
    """Check that an algorithm keeps its contract: settings, window, same bytes, a restart that changes nothing.

    Trains with it in an `Engine` for several steps: over `comm` (collective), or in worlds of each of `sizes`.

    >>> import bagua_comm
    >>> check_algorithm(bagua_comm.ByteGrad(), sizes=(2,))
    """
    assert dataclasses.is_dataclass(algorithm)
    assert eval(repr(algorithm), names_of(algorithm)) == algorithm
    for phase in phases_of(algorithm):
        assert phase.payload in ("grad", "weight")
        points = list(Point)
        assert phase.window.opens in points
        assert phase.window.closes in points
    if comm is not None:
        _check_training(comm, algorithm)
        return
    for size in sizes:
        run_ranks(size, lambda comm: _check_training(comm, algorithm))


_SPECS = [TensorSpec(f"t{i}", (5, i + 1), "float32") for i in range(6)]


def _check_training(comm: Communicator, algorithm: Algorithm) -> None:
    def make() -> Engine:
        plan = Plan.pack(_SPECS, bucket_bytes=200, alignment=4 * comm.size)
        return Engine(comm, algorithm, plan, {p.payload: plan.allocate() for p in phases_of(algorithm)})

    with make() as engine:
        assert len(engine.buckets) > 1
        for step in range(3):
            _train(comm, engine, step)
        saved = engine.state_dict()
        flats = [bucket.flat.copy() for bucket in engine.buckets]
        for step in range(3, 5):
            _train(comm, engine, step)
        engine.settle()
        expected = [bucket.flat.copy() for bucket in engine.buckets]

    if any(phase.window.closes is Point.NEVER for phase in phases_of(algorithm)):
        return  # what other ranks do when is not for a checkpoint to say
    with make() as engine:
        engine.load_state_dict(saved)
        for bucket, flat in zip(engine.buckets, flats, strict=True):
            bucket.flat[...] = flat
        for step in range(3, 5):
            _train(comm, engine, step)
        engine.settle()
        for bucket, flat in zip(engine.buckets, expected, strict=True):
            np.testing.assert_array_equal(bucket.flat, flat, err_msg="after a restart")


def _train(comm: Communicator, engine: Engine, step: int) -> None:
    """One step: gradients that differ between ranks, or weights that change by as much."""
    engine.at(Point.FORWARD)
    of_gradients = engine.payload == "grad"
    if not of_gradients:
        engine.at(Point.BACKWARD)
    for bucket in engine.buckets:
        for view in bucket.views.values():
            value = sample(comm.rank, view.shape, "float32", seed=step)
            view[...] = value if of_gradients else view - value
    if of_gradients:
        for spec in reversed(_SPECS):  # not in the order of the plan
            engine.ready(spec.name)
        engine.at(Point.BACKWARD)
        for bucket, state in zip(engine.buckets, engine.states, strict=True):
            _assert_averaged(comm, bucket.flat, state)
    engine.at(Point.STEP)
    assert all(np.isfinite(bucket.flat).all() for bucket in engine.buckets)


def _assert_averaged(comm: Communicator, gradient: Array, state: Any) -> None:
    """All ranks hold the same gradient, or the same of what the algorithm averages in its place.

    Raises:
        CommMismatch: They don't.
    """
    fields = dataclasses.fields(state) if dataclasses.is_dataclass(state) else ()
    kept = [value for value in (getattr(state, field.name) for field in fields) if hasattr(value, "dtype")]
    for candidate in kept:
        try:
            comm.check_consistency(candidate)
        except CommMismatch:
            continue
        if candidate.any():
            return
    comm.check_consistency(gradient)
