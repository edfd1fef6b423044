"""Weights of ranks in an engine: weight 2 counts as two ranks, and a wrong one is an error on all ranks."""

import numpy as np
import pytest
from support.engine_steps import backward

from bagua_comm import (
    ArrayError,
    AsyncModelAverage,
    BaguaError,
    ByteGrad,
    CommMismatch,
    Decentralized,
    DiLoCo,
    Engine,
    ErrorFeedback,
    GradientAllReduce,
    Hierarchical,
    Plan,
    Point,
    QAdam,
    Quantized,
    Reproducible,
    SparseLoCo,
    StreamingDiLoCo,
    TensorSpec,
    TopK,
    UnsupportedError,
    after,
    by_node,
)
from bagua_comm.testing import run_ranks

SPECS = [TensorSpec("a", (300,), "float32"), TensorSpec("b", (500,), "float32")]
PLAN = Plan.pack(SPECS, bucket_bytes=1200)
STEPS, LR = 6, 0.5


def data(source, step):
    return np.random.default_rng([source, step]).standard_normal(800).astype(np.float32)


def train(comm, algorithm, sources, weights=None):
    """Weights of a model after some steps; this rank has the gradients of its source. Collective."""
    grads, x = PLAN.allocate(), PLAN.allocate()
    storage = {"grad": grads, "weight": x}
    if {phase.payload for phase in algorithm.phases} == {"grad"}:
        storage = grads
    with Engine(comm, algorithm, PLAN, storage) as engine:
        for step in range(STEPS):
            if weights is not None:
                engine.weight = weights[comm.rank]
            engine.at(Point.FORWARD)
            grads[0][...], grads[1][...] = np.split(data(sources[comm.rank], step), [300])
            backward(engine, "ba")
            momenta = [getattr(state, "momentum", None) for state in engine.states]
            for flat, grad, momentum in zip(x, grads, momenta, strict=True):
                flat -= LR * (momentum if isinstance(algorithm, QAdam) and step >= 2 else grad)
            engine.at(Point.STEP)
        if weights is not None:
            engine.weight = 1
        engine.at(Point.FORWARD)  # writes back what was exchanged after the step
        backward(engine, "ba")
        return np.concatenate(x)


ALGORITHMS = {
    GradientAllReduce(): 1e-6,
    ByteGrad(): 0.03,
    GradientAllReduce(ErrorFeedback(Quantized(min_bytes=0))): 0.03,
    GradientAllReduce(Hierarchical(ErrorFeedback(TopK(64, 64, bits=32)))): 1e-6,
    GradientAllReduce(Reproducible()): 1e-6,
    QAdam(warmup_steps=2): 0.05,
    DiLoCo(3): 1e-6,
    DiLoCo(2, average=Quantized(min_bytes=0)): 0.03,
    StreamingDiLoCo(3, fragments=2): 1e-6,
    SparseLoCo(2, chunk=64, keep=64, bits=32): 1e-6,
    after(3, GradientAllReduce(), DiLoCo(2)): 1e-6,
}


@pytest.mark.algorithms("all")
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_a_rank_with_weight_two_counts_as_two_ranks(algorithm):
    expected = run_ranks(3, lambda comm: train(comm, algorithm, [4, 5, 5]), nodes=["a", "a", "b"])[0]
    found = run_ranks(2, lambda comm: train(comm, algorithm, [4, 5], [0.5, 1]), nodes=["a", "b"])[0]
    plain = run_ranks(2, lambda comm: train(comm, algorithm, [4, 5]), nodes=["a", "b"])[0]
    size = np.linalg.norm(expected)
    assert np.linalg.norm(found - expected) <= ALGORITHMS[algorithm] * size
    assert np.linalg.norm(plain - expected) > 2 * ALGORITHMS[algorithm] * size


def test_each_weight_is_for_one_step_and_a_rank_without_data_may_have_nan():
    def body(comm):
        flats, found = PLAN.allocate(), []
        with Engine(comm, GradientAllReduce(), PLAN, flats) as engine:
            for step, weight in enumerate((2 - 2 * comm.rank, None, 0)):
                for flat in flats:
                    flat[...] = np.nan if weight == 0 else 1 + comm.rank
                if weight is not None:
                    engine.weight = weight
                engine.at(Point.FORWARD)
                if step == 0:
                    engine.stop()
                engine.ready("a")
                engine.resume()  # sends it, in the first step
                backward(engine, "b")
                engine.at(Point.STEP)
                assert engine.weight is None
                found.append(float(flats[0][0]))
        return found

    with pytest.warns(UserWarning, match="weight: ") as warned:
        assert run_ranks(2, body) == [[1, 1.5, 0]] * 2
    texts = [str(each.message) for each in warned]
    assert [text.partition(",")[0] for text in texts] == [
        "weight: no rank has set one for this backward pass",
        "weight: all weights are 0",
    ]


def steps(comm, weights, algorithm=None):
    """Make a step for each of the weights, without one where it is None. Collective."""
    with Engine(comm, algorithm or GradientAllReduce(), PLAN, PLAN.allocate()) as engine:
        for weight in weights:
            engine.at(Point.FORWARD)
            if weight is not None:
                engine.weight = weight
            backward(engine, "ab")
            engine.at(Point.STEP)


def late_in(moment, algorithm=None):
    """Rank 1 sets a weight in or after the backward pass of step 1, and goes on after its error."""

    def body(comm):
        with Engine(comm, algorithm or GradientAllReduce(), PLAN, PLAN.allocate()) as engine:
            for step in range(4):
                engine.weight = 3
                engine.at(Point.FORWARD)
                engine.ready("a")
                if (comm.rank, step, moment) == (1, 1, "within"):
                    with pytest.raises(ArrayError, match="the backward pass has begun"):
                        engine.weight = 4
                backward(engine, "b")
                if (comm.rank, step, moment) == (1, 1, "after"):
                    engine.weight = 4
                    with pytest.raises(ArrayError, match="it was set after the backward pass"):
                        engine.at(Point.STEP)
                engine.at(Point.STEP)

    return body


NONE = "; set one on all ranks before each backward pass, 0 on a rank without data; or on none"
REFUSED = [
    *(
        (lambda c, bad=bad: steps(c, [1, bad if c.rank else 4]), ArrayError, f"rank 1 has {text}, expected")
        for *bads, text in (
            *((each, each) for each in (-1.0, np.nan, np.inf)),
            ("7", np.complex64(3), np.ones(2), "set something that is no number"),
        )
        for bad in bads
    ),
    (
        lambda c: steps(c, [5, None if c.rank else 4]),
        ArrayError,
        f"rank 1 has none, and other ranks have one{NONE}",
    ),
    (lambda c: steps(c, [None, None if c.rank else 4]), CommMismatch, ""),
    (lambda c: steps(c, [3, None if c.rank else 4, 1], DiLoCo(1)), ArrayError, "rank 1 has none"),
    *(
        (
            lambda c, ws=each: steps(c, [*ws, 1] if c.rank else [1, 1, 1], DiLoCo(2)),
            ArrayError,
            f"rank 1 has {text}",
        )
        for each, text in (
            ([-4, 7], "set a negative one in some step, expected a finite number"),
            ([-4, -4], "set a negative one in some step, expected a finite number"),
            (["3", "3"], "set something that is no number"),
            ([3, np.nan], "nan, expected a finite number"),
        )
    ),
    *(
        (late_in(moment, algorithm), ArrayError, "rank 1 has set one after its backward pass had begun")
        for moment in ("within", "after")
        for algorithm in (GradientAllReduce(), DiLoCo(2), StreamingDiLoCo(2, fragments=2))
    ),
    *(
        (lambda c, a=algorithm: steps(c, [1], a), UnsupportedError, f"{name} makes no weighted mean")
        for name, algorithm in {
            "Decentralized": Decentralized(),
            "AsyncModelAverage": AsyncModelAverage(),
            "ByNode(Decentralized)": by_node(Decentralized()),
            "SparseLoCo": SparseLoCo(divide="senders"),
            "weight: Decentralized": after(5, DiLoCo(5), Decentralized()),
        }.items()
    ),
]


@pytest.mark.parametrize(("body", "error", "text"), REFUSED)
def test_a_wrong_weight_is_an_error_on_all_ranks(body, error, text):
    def raises(comm):
        with pytest.raises(error) as raised:
            body(comm)
        return str(raised.value)

    assert all(text in message for message in run_ranks(2, raises))


def test_nothing_is_sent_for_weights_before_the_first_and_eight_bytes_after():
    def body(comm):
        sent = []
        for weights in ([None] * 3, [None, 2, None]):
            before = len(spans_of(comm, "weights of ranks", "allgather"))
            steps(comm, weights)
            sent.append(spans_of(comm, "weights of ranks", "allgather")[before:])
        return sent

    with pytest.warns(UserWarning, match="its mean is plain"):
        plain, weighted = run_ranks(2, body)[0]
    assert "weights of ranks" not in plain
    assert weighted == [*plain, *["allgather", "weights of ranks"] * 2]  # a span is added when it ends


@pytest.mark.algorithms("all")
@pytest.mark.parametrize("algorithm", [GradientAllReduce(), DiLoCo(2), Decentralized()], ids=str)
def test_if_one_rank_ends_by_the_error_of_its_weight_the_others_do_not_wait(algorithm):
    def body(comm):
        with Engine(comm, algorithm, PLAN, PLAN.allocate()) as engine:
            for _ in range(3):
                engine.at(Point.FORWARD)
                engine.ready("a")
                if comm.rank == 1:
                    engine.weight = 3
                backward(engine, "b")
                engine.at(Point.STEP)

    with pytest.raises(BaguaError, match="weight: ") as raised:
        run_ranks(3, body, timeout_s=60)
    assert isinstance(raised.value, (ArrayError, UnsupportedError))


def test_a_refused_weight_changes_nothing():
    def body(comm):
        flats = PLAN.allocate()
        flats[0][...] = comm.rank
        with Engine(comm, Decentralized(), PLAN, flats) as engine:
            if comm.rank == 1:
                with pytest.raises(UnsupportedError):
                    engine.weight = 2
            engine.at(Point.FORWARD)
            backward(engine, "ab")
            engine.at(Point.STEP)
            engine.settle()
            return flats[0][0]

    assert run_ranks(2, body) == [0.5, 0.5]


def spans_of(comm, *names):
    return [span.name for span in comm.tracer.spans() if span.name in names]
