"""Loading states: training continues from one that fits; others are refused on all ranks before any change."""

import copy
import pickle

import numpy as np
import pytest

from bagua_comm import (
    ArrayError,
    AsyncModelAverage,
    BaguaError,
    Decentralized,
    DiLoCo,
    Engine,
    ErrorFeedback,
    GradientAllReduce,
    Hierarchical,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    Plan,
    Point,
    QAdam,
    SparseLoCo,
    StreamingDiLoCo,
    TensorSpec,
    after,
    every,
)
from bagua_comm.testing import run_ranks

SPECS = [TensorSpec("a", (5, 6), "float32"), TensorSpec("b", (4,), "float32")]
OWN = [
    LowPrecisionDecentralized(),
    LowPrecisionOnePeer(),
    every(2, LowPrecisionOnePeer()),
    GradientAllReduce(ErrorFeedback()),
    GradientAllReduce(Hierarchical(ErrorFeedback())),
    SparseLoCo(2, chunk=16, keep=4),
]
"""Algorithms that keep what is a rank's own."""

ALIKE = [
    GradientAllReduce(),
    Decentralized("one_peer_exponential"),
    DiLoCo(local_steps=2),
    StreamingDiLoCo(local_steps=2, fragments=1),
    QAdam(warmup_steps=2),
    after(1, GradientAllReduce(), Decentralized()),
]
"""Algorithms that keep nothing, or the same on all ranks."""


def make_engine(comm, algorithm, bucket_bytes=1000):
    plan = Plan.pack(SPECS, bucket_bytes=bucket_bytes, alignment=4)
    storage = {payload: plan.allocate() for payload in ("grad", "weight")}
    alike = algorithm.phase(0).equal_start
    for payload, flats in storage.items():
        factor = 1 if alike and payload == "weight" else comm.rank + 1
        for i, flat in enumerate(flats):
            flat[...] = np.linspace(-1, 1 + i, flat.size) * factor
    return Engine(comm, algorithm, plan, storage)


def train(engine, steps=3):
    for _ in range(steps):
        engine.at(Point.FORWARD)
        for bucket in engine.buckets:
            for view in bucket.views.values():
                view += 0.25 * (engine.step + 1)
            for name in bucket.views:
                engine.ready(name)
        engine.at(Point.BACKWARD)
        engine.at(Point.STEP)


def saved_by(ranks, algorithm, steps=3):
    """The saved states of all ranks, after a training of `steps` steps."""

    def body(comm):
        with make_engine(comm, algorithm) as engine:
            train(engine, steps)
            return engine.state_dict()

    return run_ranks(ranks, body, timeout_s=5)


def outcomes_of(algorithm, states, steps=1):
    """The error of loading `states`, one on each rank, or None, for each rank; then training continues."""

    (outcomes,) = outcomes_of_each(algorithm, [states], steps)
    return outcomes


def outcomes_of_each(algorithm, several, steps=1):
    """The outcomes of several times loading `states`, one after the other."""

    def body(comm):
        with make_engine(comm, algorithm) as engine:
            train(engine, steps)
            outcomes = []
            for states in several:
                before = pickle.dumps(engine.state_dict())
                try:
                    engine.load_state_dict(states[comm.rank])
                except ArrayError as exc:
                    assert comparable(pickle.loads(before)) == comparable(engine.state_dict())
                    outcomes.append(str(exc))
                else:
                    outcomes.append(None)
            train(engine, 1)
            return outcomes

    return [list(each) for each in zip(*run_ranks(len(several[0]), body, timeout_s=5), strict=True)]


def comparable(value):
    """A state that can be compared: arrays as bytes."""
    if isinstance(value, dict):
        return {key: comparable(inner) for key, inner in value.items()}
    return (value.dtype, value.shape, value.tobytes()) if hasattr(value, "dtype") else value


def assert_refused(algorithm, states, match):
    assert_all_refused(outcomes_of(algorithm, states), match)


def assert_all_refused(outcomes, match):
    (message, *others) = outcomes
    assert others == [message] * len(others)
    assert message is not None, "it was loaded"
    assert match in message


def changed(state, **fields):
    return {**copy.deepcopy(state), **fields}


def with_piece(state, tensor, path, change):
    """A state with one piece of a tensor changed; removed, where `change` gives None."""
    state = copy.deepcopy(state)
    piece = change(state["tensors"][tensor][path])
    if piece is None:
        del state["tensors"][tensor][path]
    else:
        state["tensors"][tensor][path] = piece
    return state


# Ranks and steps -----------------------------------------------------------------------------------------


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", [*OWN, *ALIKE], ids=repr)
def test_a_state_saved_by_all_ranks_is_loaded(algorithm):
    saved = saved_by(2, algorithm)
    assert outcomes_of(algorithm, saved) == [None, None]
    assert outcomes_of(algorithm, pickle.loads(pickle.dumps(saved))) == [None, None]


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", OWN, ids=repr)
def test_per_rank_state_of_another_rank_is_refused(algorithm):
    first, second = saved_by(2, algorithm)
    assert_refused(algorithm, [second, first], "saved by rank 1 of 2, expected rank 0 of 2")
    assert_refused(algorithm, [first, first], "rank 1: the state was saved by rank 0 of 2, expected rank 1 of 2")


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", OWN, ids=repr)
def test_per_rank_state_of_four_ranks_is_refused_on_two(algorithm):
    assert_refused(algorithm, saved_by(4, algorithm)[:2], "saved by rank 0 of 4, expected rank 0 of 2")


@pytest.mark.algorithms("all")
@pytest.mark.parametrize("algorithm", ALIKE, ids=repr)
def test_replicated_state_is_loaded_by_any_rank_of_any_number(algorithm):
    saved = saved_by(4, algorithm)
    assert outcomes_of(algorithm, saved[2:]) == [None, None]
    assert outcomes_of(algorithm, [saved[0]] * 3) == [None, None, None]


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", [*OWN, *ALIKE], ids=repr)
def test_files_of_two_steps_are_not_mixed(algorithm):
    def body(comm):
        with make_engine(comm, algorithm) as engine:
            train(engine, 3)
            first = engine.state_dict()
            train(engine, 2)
            return first, engine.state_dict()

    saved = run_ranks(2, body, timeout_s=5)
    assert_refused(algorithm, [saved[0][0], saved[1][1]], "'step' is 3 on rank 0 and 5 on rank 1")


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", [*OWN, *ALIKE, AsyncModelAverage()], ids=repr)
def test_files_of_two_trainings_are_not_mixed_though_both_are_of_one_step(algorithm):
    first, second = (saved_by(2, algorithm) for _ in range(2))
    assert_refused(algorithm, [first[0], second[1]], "from two different trainings")


def test_files_of_a_training_and_of_one_that_began_from_its_checkpoint_are_not_mixed():
    """As a restart leaves them that died when one rank had written over its file."""

    def body(comm):
        with make_engine(comm, LowPrecisionOnePeer()) as engine:
            train(engine, 2)
            start = engine.state_dict()
            train(engine, 2)
            first = engine.state_dict()
            engine.load_state_dict(start)
            train(engine, 2)
            return first, engine.state_dict()

    saved = run_ranks(2, body, timeout_s=5)
    assert_refused(LowPrecisionOnePeer(), [saved[0][1], saved[1][0]], "from two different trainings")


def test_ranks_that_train_at_their_own_pace_save_at_different_steps():
    def body(comm):
        with make_engine(comm, AsyncModelAverage(interval_s=60)) as engine:
            train(engine, 3 + comm.rank)
            saved = engine.state_dict()
            engine.load_state_dict(saved)
            return engine.step

    assert run_ranks(2, body, timeout_s=5) == [3, 4]


# Damage --------------------------------------------------------------------------------------------------

REPLICAS = LowPrecisionOnePeer()

DAMAGED = {
    "no mapping": (lambda s: [1, 2], "the state is a list, expected what Engine.state_dict gave"),
    "nothing": (lambda s: None, "the state is a NoneType"),
    "no step": (lambda s: {k: v for k, v in s.items() if k != "step"}, "the state has no 'step'"),
    "an earlier version": (
        lambda s: {k: s[k] for k in ("algorithm", "step", "phase", "phase_began", "tensors")},
        "the state has no 'rank', 'size', 'digest', 'checksum': it is damaged, or was saved by an earlier",
    ),
    "step -5": (lambda s: changed(s, step=-5), "'step' is -5, expected an integer of at least 0"),
    "step True": (lambda s: changed(s, step=True), "'step' is True"),
    "step of text": (lambda s: changed(s, step="3"), "'step' is '3'"),
    "step 2**70": (lambda s: changed(s, step=2**70), "'step' is 1180591620717411303424"),
    "phase began nan": (lambda s: changed(s, phase_began=float("nan")), "'phase_began' is nan"),
    "phase began later": (lambda s: changed(s, phase_began=9), "a phase that began before"),
    "another phase": (lambda s: changed(s, phase="Exact()"), "'phase' is Exact(), expected LowPrecisionOnePeer("),
    "algorithm of bytes": (lambda s: changed(s, algorithm=b"x"), "'algorithm' is b'x', expected a string"),
    "tensors a list": (lambda s: changed(s, tensors=[1]), "'tensors' is a list, expected a mapping"),
    "tensor a list": (lambda s: changed(s, tensors={**s["tensors"], "a": [1]}), "'tensors' has a list for 'a'"),
    "no tensor": (lambda s: changed(s, tensors={"a": s["tensors"]["a"]}), "nothing was saved for 'b'"),
    "one element": (
        lambda s: with_piece(s, "a", "sent", lambda x: x[:, :1]),
        "'sent' of 'a' is float32(1, 1), expected float32(1, 30)",
    ),
    "complex": (
        lambda s: with_piece(s, "a", "sent", lambda x: x.astype("complex64")),
        "'sent' of 'a' is complex64(1, 30), expected float32(1, 30)",
    ),
    "1e300": (
        lambda s: with_piece(s, "a", "sent", lambda x: np.full(x.shape, 1e300)),
        "'sent' of 'a' is float64(1, 30), expected float32(1, 30)",
    ),
    "a list": (
        lambda s: with_piece(s, "b", "received", lambda x: x.tolist()),
        "'received' of 'b' is a list, expected an array, float32(1, 4)",
    ),
    "no array": (
        lambda s: with_piece(s, "b", "received", lambda x: None),
        "'received' of 'b' is missing, expected an array",
    ),
    "a number of text": (
        lambda s: with_piece(s, "a", "round", lambda n: "3"),
        "'round' of 'a' is '3', expected an int such as 0",
    ),
    "numbers that differ": (
        lambda s: with_piece(s, "b", "round", lambda n: 2),
        "'round' of 'b' is 2, expected 3",
    ),
    "unknown": (
        lambda s: changed(s, tensors={**s["tensors"], "a": {**s["tensors"]["a"], "x": 1}}),
        "'a' has 'x'",
    ),
    "another number": (
        lambda s: with_piece(with_piece(s, "a", "round", lambda n: 8), "b", "round", lambda n: 8),
        "the state is damaged: a number",
    ),
    "keys of two kinds": (
        lambda s: changed(s, tensors={**s["tensors"], 3: {}}),
        "'tensors' has a dict for 3, expected",
    ),
}


@pytest.fixture(scope="module")
def whole():
    """The states of two ranks."""
    return saved_by(2, REPLICAS)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_state_that_is_damaged_on_all_ranks_or_one_is_refused_on_all_and_nothing_changes(whole, name):
    damage, match = DAMAGED[name]
    states = [damage(state) for state in whole]
    for outcomes in outcomes_of_each(REPLICAS, [states, [whole[0], states[1]]]):
        assert_all_refused(outcomes, match)


def test_a_residual_of_another_length_is_refused_though_it_belongs_to_its_bucket_as_a_whole():
    algorithm = GradientAllReduce(Hierarchical(ErrorFeedback()))
    whole = saved_by(2, algorithm)
    (path,) = (path for path, value in whole[0]["tensors"]["a"].items() if hasattr(value, "dtype"))
    states = [with_piece(state, "a", path, lambda x: x[:1]) for state in whole]
    assert_refused(algorithm, states, "the state is damaged")


def test_an_exchange_under_way_is_still_written_back_after_a_state_was_refused():
    def body(comm):
        with make_engine(comm, LowPrecisionDecentralized()) as engine:
            train(engine, 2)
            with pytest.raises(ArrayError, match="the state has no"):
                engine.load_state_dict({})
            engine.settle()
            refused = [bucket.flat.copy() for bucket in engine.buckets]
        with make_engine(comm, LowPrecisionDecentralized()) as engine:
            train(engine, 2)
            engine.settle()
            return refused, [bucket.flat.copy() for bucket in engine.buckets]

    for refused, expected in run_ranks(2, body, timeout_s=5):
        for x, y in zip(refused, expected, strict=True):
            assert x.tobytes() == y.tobytes()


def test_random_damage_is_refused_alike_on_all_ranks_or_harms_nothing():
    rng = np.random.default_rng(2026)
    for algorithm in [*OWN, *ALIKE]:
        whole = pickle.dumps(saved_by(2, algorithm))
        seed = int(rng.integers(2**32))

        def body(comm, algorithm=algorithm, whole=whole, seed=seed):
            random = np.random.default_rng(seed)  # the same on all ranks
            outcomes = []
            with make_engine(comm, algorithm) as engine:
                for _ in range(25):
                    states = pickle.loads(whole)
                    victims = [0] if random.random() < 0.5 else [0, 1]
                    for victim in victims:
                        states[victim] = damaged(states[victim], random)
                    try:
                        engine.load_state_dict(states[comm.rank])
                        outcomes.append(None)
                    except BaguaError as exc:
                        outcomes.append(f"{type(exc).__name__}: {exc}")
                engine.load_state_dict(pickle.loads(whole)[comm.rank])
                train(engine, 2)
            return outcomes

        first, second = run_ranks(2, body, timeout_s=10)
        assert first == second
        assert all(text is None or text.startswith("ArrayError: load_state_dict: ") for text in first)


JUNK = [
    None,
    True,
    -1,
    2**70,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x" * 1000,
    b"x",
    (),
    [],
    {},
    set(),
    object,
    1j,
]


def damaged(value, random):
    """A copy of a state with one thing in it, somewhere, dropped, retyped, reshaped, cut or exchanged."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = list(value)[random.integers(len(value))]
        copied = dict(value)
        match random.integers(6):
            case 0:
                del copied[key]
            case 1:
                copied[random.choice(["", "x", f"{key} of"])] = copied.pop(key)
            case _:
                copied[key] = damaged(copied[key], random)
        return copied
    if isinstance(value, np.ndarray):
        dtype = random.choice(["float64", "float16", "complex64", "int32", "bool", "O", "S4", ">f4", "M8[s]"])
        return [
            value[..., :1],
            value[..., :-1],
            value.reshape(-1),
            value[None],
            np.zeros((0,), value.dtype),
            value.astype(">f4").astype(dtype) if dtype not in ("M8[s]", "S4") else np.zeros(value.shape, dtype),
            value.tolist(),
            np.float32(1),
        ][random.integers(8)]
    if isinstance(value, int) and random.random() < 0.5:
        return value + int(random.choice([-10, -1, 1, 10]))
    return JUNK[random.integers(len(JUNK))]
