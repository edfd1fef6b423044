"""The contract of an algorithm, as a test."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..algorithms import Algorithm, Point, Rounds
from ..algorithms.base import pack, runs_in_rounds
from ..algorithms.combinators import Interval
from ..arrays import Array
from ..bucket import TensorSpec
from ..comm import Communicator
from ..engine import Engine
from ..errors import CommMismatch
from .values import check_settings, sample
from .worlds import run_ranks


def check_algorithm(
    algorithm: Algorithm, *, comm: Communicator | None = None, sizes: Sequence[int] = (1, 2, 3, 4)
) -> None:
    """Check the contract of an algorithm: settings, window, equal bytes on all ranks, and exact restarts.

    Trains with it in an `Engine` for several steps. Which values it gives is for tests of its own: a sum passes
    where a mean was meant.

    Args:
        algorithm: The algorithm, a frozen dataclass whose `repr` shows its settings.
        comm: The ranks to train on; then the call is collective. If None, worlds of threads.
        sizes: The numbers of ranks of these worlds.

    Raises:
        AssertionError: It breaks the contract.
        CommMismatch: Ranks hold different averages.

    >>> from bagua_comm import ByteGrad
    >>> check_algorithm(ByteGrad(), sizes=(2,))
    """
    check_settings(algorithm)
    for phase in algorithm.phases:
        assert phase.payload in ("grad", "weight"), f'payload is {phase.payload!r}, expected "grad" or "weight"'
        window = phase.window
        if not isinstance(window, Rounds):
            for point in (window.opens, window.closes):
                assert point in _POINTS, f"{window} opens or closes at {point}, expected a Point of a step"
    if comm is not None:
        _check_training(comm, algorithm)
        return
    for size in sizes:
        run_ranks(size, lambda comm: _check_training(comm, algorithm))


_POINTS = (Point.FORWARD, Point.GRADIENT, Point.BACKWARD, Point.STEP)

_SPECS = [TensorSpec(f"t{i}", (5, i + 1), "float32") for i in range(6)]


def _check_training(comm: Communicator, algorithm: Algorithm) -> None:
    def make() -> Engine:
        plan = pack(algorithm, _SPECS, bucket_bytes=200, alignment=4 * comm.size)
        return Engine(comm, algorithm, plan, {p.payload: plan.allocate() for p in algorithm.phases})

    with make() as engine:
        assert len(engine.buckets) > 1
        for step in range(3):
            _train(comm, engine, step)
        saved = engine.state_dict()
        flats = [bucket.flat.copy() for bucket in engine.buckets]
        for step in range(3, 5):
            _train(comm, engine, step)
        engine.settle()
        expected = engine.plan.cut([bucket.flat.copy() for bucket in engine.buckets])
        engine.stop()  # closed as it is, it would warn if five steps are too few for an exchange

    if runs_in_rounds(algorithm):
        return  # ranks train at different speeds, so a restart does not repeat the same rounds
    with make() as engine:
        engine.load_state_dict(saved)
        for bucket, flat in zip(engine.buckets, flats, strict=True):
            bucket.flat[...] = flat
        for step in range(3, 5):
            _train(comm, engine, step)
        engine.settle()
        for name, view in engine.plan.cut([bucket.flat for bucket in engine.buckets]).items():
            np.testing.assert_array_equal(view, expected[name], err_msg=f"{name} after a restart")
        engine.stop()


def _train(comm: Communicator, engine: Engine, step: int) -> None:
    """One step with values that differ between ranks: gradients, or changes of the weights."""
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
        for number, (bucket, state) in enumerate(zip(engine.buckets, engine.states, strict=True)):
            try:
                _assert_averaged(comm, bucket.flat, state)
            except CommMismatch as exc:
                raise CommMismatch(
                    f"step {step}, bucket {number}: after the exchange, ranks hold different gradients; the "
                    f"algorithm must give the same average to all ({exc})"
                ) from exc
    engine.at(Point.STEP)
    assert all(np.isfinite(bucket.flat).all() for bucket in engine.buckets)


def _assert_averaged(comm: Communicator, gradient: Array, state: object) -> None:
    """Check that all ranks hold the same gradient, or the same array averaged in its place.

    Raises:
        CommMismatch: They hold different ones.
    """
    if isinstance(state, Interval):
        if state.due:
            _assert_averaged(comm, gradient, state.inner)
        return
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
    assert gradient.any(), "the exchange has replaced all gradients by zeros"
