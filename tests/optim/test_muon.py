"""Muon of arrays, and what owners of matrices exchange: on any ranks the bits of one process."""

import numpy as np
import pytest
import torch

from bagua_comm import (
    ArrayError,
    CommMismatch,
    Engine,
    GradientAllReduce,
    Int4,
    MinMaxUInt8,
    Plan,
    Point,
    TensorSpec,
    optim,
)
from bagua_comm.optim import owners as owners_module
from bagua_comm.optim.newton_schulz import COEFFICIENTS, orthogonalize
from bagua_comm.testing import run_ranks, sample

SHAPES = [(7, 5), (5, 9), (6, 6), (3, 11), (1, 4), (13, 2)]


def spread(total, size):
    """Uneven: rank r has r times as many rows as rank 1, and the last one the rest."""
    rows = [min(rank, 2) for rank in range(size - 1)]
    rows = rows if sum(rows) <= total else [0] * (size - 1)
    return [*rows, total - sum(rows)]


def gradient(n, step, dtype="float32"):
    return sample(n, SHAPES[n], dtype, seed=step)


def train(comm, muon, rows, steps=3):
    """The whole weights after some steps, on which a rank works with its rows."""
    begins = [None if each is None else sum(each[: comm.rank]) for each in rows]
    mine = [
        slice(None) if begin is None else slice(begin, begin + each[comm.rank])
        for begin, each in zip(begins, rows, strict=True)
    ]
    wholes = [sample(n, shape, "float32", seed=99) for n, shape in enumerate(SHAPES)]
    weights = [whole[part].copy() for whole, part in zip(wholes, mine, strict=True)]
    states = [muon.init(weight) for weight in weights]
    with optim.Owners(comm) as owners:
        for step in range(steps):
            grads = [gradient(n, step)[part].copy() for n, part in enumerate(mine)]
            muon.step(weights, grads, states, owners, rows)
    return [
        weight if each is None else comm.allgather(weight, counts=[m * weight.shape[1] for m in each])
        for weight, each in zip(weights, rows, strict=True)
    ]


def alone(muon, steps=3):
    weights = [sample(n, shape, "float32", seed=99) for n, shape in enumerate(SHAPES)]
    states = [muon.init(weight) for weight in weights]
    for step in range(steps):
        muon.step(weights, [gradient(n, step) for n in range(len(SHAPES))], states)
    return weights


@pytest.mark.parametrize(
    ("size", "group"), [(1, 60), (2, 1), (3, 1), (3, owners_module.GROUP), (4, 60), (4, owners_module.GROUP)]
)
def test_the_bits_are_those_of_one_process_for_any_rows(size, group, monkeypatch):
    monkeypatch.setattr(owners_module, "GROUP", group)
    muon = optim.Muon(0.1, weight_decay=0.1, nesterov=size != 3)
    expected = [weight.tobytes() for weight in alone(muon)]
    rows = [None if n % 3 == 2 else spread(m, size) for n, (m, _) in enumerate(SHAPES)]
    for found in run_ranks(size, lambda comm: train(comm, muon, rows)):
        assert [weight.tobytes() for weight in found] == expected


def test_singular_values_follow_the_polynomial():
    a, b, c = COEFFICIENTS
    for shape in [(4, 7), (7, 4), (5, 5)]:
        x = sample(0, shape, "float64")
        u, s, v = np.linalg.svd(x, full_matrices=False)
        s /= np.sqrt((s**2).sum())
        for _ in range(5):
            s = a * s + b * s**3 + c * s**5
        np.testing.assert_allclose(orthogonalize(x), u * s @ v, rtol=0, atol=1e-12)
    assert not orthogonalize(np.zeros((3, 2))).any()


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_those_of_torch_up_to_its_rounding_to_bfloat16(nesterov, adjust_lr_fn):
    settings = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    found = alone(optim.Muon(**settings))
    reference = [torch.tensor(sample(n, shape, "float32", seed=99)) for n, shape in enumerate(SHAPES)]
    optimizer = torch.optim.Muon(reference, **settings)
    for step in range(3):
        for n, weight in enumerate(reference):
            weight.grad = torch.tensor(gradient(n, step))
        optimizer.step()
    for x, y in zip(found, reference, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=0.02 * 3 * 0.06 * max(1, (len(x) / len(x[0])) ** 0.5))


def test_owners_have_balanced_work_and_are_the_same_everywhere():
    rng = np.random.default_rng(0)
    for ranks in (1, 2, 3, 5):
        costs = dict(enumerate(rng.integers(1, 100, 40).tolist()))
        owners = owners_module.balanced(costs, ranks)
        work = [sum(costs[n] for n, owner in owners.items() if owner == rank) for rank in range(ranks)]
        assert owners.keys() == costs.keys()
        assert max(work) <= 4 / 3 * max(max(costs.values()), sum(costs.values()) / ranks)
    assert owners_module.balanced({0: 1, 1: 1, 2: 1}, 2) == {0: 0, 1: 1, 2: 0}


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_sends_two_times_the_other_ranks_share_of_its_shards(size):
    matrices = [optim.Matrix((4 * size, 6), (4,) * size)] * size

    def body(comm, matrices):
        shards = [np.full((4 if each.rows else 4 * size, 6), n, np.float32) for n, each in enumerate(matrices)]
        with optim.Owners(comm) as owners:
            before = owners.counters.total().wire_bytes
            assert {n: rows.max() for n, rows in owners.map(lambda x: 2 * x, matrices, shards.__getitem__)} == {
                n: 2 * n for n in range(size)
            }
            return owners.counters.total().wire_bytes - before

    shard = 4 * 6 * 4
    sent = run_ranks(size, lambda comm: body(comm, matrices))
    assert sent == [2 * (size - 1) * shard] * size  # for `size` matrices: 2 (p - 1) / p of a shard each
    whole = [optim.Matrix((4 * size, 6))] * size
    assert run_ranks(size, lambda comm: body(comm, whole)) == [(size - 1) * size * shard] * size


@pytest.mark.parametrize("rows", [(2, 0, 5), None], ids=["sharded", "replicated"])
@pytest.mark.parametrize("codec", [MinMaxUInt8(), Int4()], ids=["eight bits", "four bits"])
def test_errors_of_a_codec_are_fed_back_and_do_not_accumulate(codec, rows):
    """The sum of what comes back is the sum of what was computed, up to the error of the last step."""
    matrices, steps = [optim.Matrix((7, 64), rows)] * 4, 12
    exact = [2 * sample(n, (7, 64), "float32") for n in range(4)]

    def body(comm):
        mine = slice(None) if rows is None else slice(sum(rows[: comm.rank]), sum(rows[: comm.rank + 1]))

        def errors(totals, times=1):
            return [np.abs(totals[n] - times * exact[n][mine]).max(initial=0) for n in range(4)]

        def found():
            return dict(owners.map(lambda x: 2 * x, matrices, lambda n: exact[n][mine] / 2))

        with optim.Owners(comm, codec) as owners:
            first, *others = (found() for _ in range(steps))
            sums = {n: sum((each[n] for each in others), first[n]) for n in range(4)}
            wire_bytes = owners.counters.total().wire_bytes
            owners.reset()
            assert errors(found()) == errors(first), "a reset owner begins without errors"
        return sums, max(errors(sums, steps)), max(errors(first)), wire_bytes

    results = run_ranks(3, body)
    for sums, total, once, _ in results:
        assert total <= 3 * once
        assert once > 0 or not sums[0].size
    if rows is None:
        assert len({sums[0].tobytes() for sums, *_ in results}) == 1
    sent = 0
    for owner in owners_module.balanced(dict.fromkeys(range(4), 1), 3).values():
        for rank in {0, 1, 2} - {owner}:
            count = 64 * (7 if rows is None else rows[rank])
            sent += codec.wire_nbytes(count, np.dtype("f4")) if count else 0
            sent += 0 if rows is None else 4 * count
    assert sum(wire_bytes for *_, wire_bytes in results) == steps * sent


def test_a_matrix_whose_owner_changes_begins_without_errors():
    """As when another matrix has no gradient in a step; compared with feedback of each matrix by itself."""
    codec, shapes = Int4(), {"a": (16, 32), "b": (8, 32)}
    exact = {name: sample(n, shape, "float32") for n, (name, shape) in enumerate(shapes.items())}
    calls = ["ab", "ab", "b", "b", "ab", "a", "ab"]

    def body(comm):
        with optim.Owners(comm, codec) as owners:
            for names in calls:
                shards = [exact[name] for name in names]
                matrices = [optim.Matrix(each.shape) for each in shards]
                pairs = owners.map(lambda x: x, matrices, shards.__getitem__, names.__getitem__)
                yield {names[n]: found.copy() for n, found in pairs}

    errors, owned_by = dict.fromkeys("ab", 0.0), {}
    for names, *found in zip(calls, *run_ranks(2, lambda comm: [*body(comm)]), strict=True):
        owners = owners_module.balanced({name: optim.Matrix(shapes[name]).cost for name in names}, 2)
        for name in names:
            error = errors[name] if owned_by.get(name) == owners[name] else 0.0
            owned_by[name] = owners[name]
            total = (exact[name] + np.float32(error)).reshape(1, -1)
            decoded = codec.decode(codec.encode(total), np.empty_like(total)).reshape(shapes[name])
            errors[name] = total.reshape(shapes[name]) - decoded
            for each in found:
                np.testing.assert_array_equal(each[name], decoded)


def test_errors_that_are_not_finite_are_forgotten():
    matrices = [optim.Matrix((4, 8))]

    def body(comm):
        with optim.Owners(comm, MinMaxUInt8()) as owners:
            for value in (np.nan, 1.0, 1.0):
                ((_, found),) = owners.map(lambda x: x, matrices, [np.full((4, 8), value, "f4")].__getitem__)
            return found

    assert all((found == 1.0).all() for found in run_ranks(2, body))


@pytest.mark.parametrize("wrong", ["int4", Int4(rounding="stochastic")], ids=["text", "stochastic"])
def test_a_wrong_codec_on_one_rank_is_refused_on_all(wrong):
    def body(comm):
        text = "rank 1: Owners: codec is .*(expected a Codec|rounds stochastically)"
        with pytest.raises(ArrayError, match=text):
            optim.Owners(comm, wrong if comm.rank else None)

    run_ranks(2, body)


def test_the_next_group_travels_while_one_is_computed(monkeypatch):
    monkeypatch.setattr(owners_module, "GROUP", 1)
    matrices = [optim.Matrix((2, 2), (1, 1))] * 6  # three groups of two

    def body(comm):
        events = []

        def shard(n):
            events.append(f"begin {n // 2}")
            return np.ones((1, 2))

        def function(whole):
            events.append("compute")
            return whole

        with optim.Owners(comm) as owners:
            for n, _ in owners.map(function, matrices, shard):
                events.append(f"end {n // 2}")
        return list(dict.fromkeys(events)) if comm.rank else [each for each in events if each == "compute"]

    first, second = run_ranks(2, body)
    assert first == ["compute"] * 3, "each rank owns one matrix of each group"
    assert second == ["begin 0", "begin 1", "compute", "begin 2", "end 0", "end 1", "end 2"]


def refused(kind, text, body, size=2):
    def expects(comm):
        with optim.Owners(comm) as owners:
            weights = [np.ones((2, 3), np.float32)]
            with pytest.raises(kind, match=text):
                body(comm, owners, weights)
            assert weights[0].all(), "nothing has changed"

    run_ranks(size, expects)


def test_what_differs_between_ranks_is_an_error_on_all_before_a_weight_changes():
    def other_settings(comm, owners, weights):
        muon = optim.Muon(0.1 + comm.rank)
        muon.step(weights, weights, [muon.init(weights[0])], owners)

    def wrong_rows_on_one(comm, owners, weights):
        muon = optim.Muon(0.1)
        muon.step(weights, weights, [muon.init(weights[0])], owners, [[2, 2 + comm.rank]])

    def other_numbers(comm, owners, weights):
        muon, weights = optim.Muon(0.1), weights * (1 + comm.rank)
        muon.step(weights, weights, [muon.init(each) for each in weights], owners)

    refused(
        CommMismatch,
        r"rank 0 called Muon.step\(.*lr=0.1.*, but rank 1 called Muon.step\(.*lr=1.1",
        other_settings,
    )
    refused(CommMismatch, "but rank 1 called .*the numbers of rows of 2 ranks", wrong_rows_on_one)
    refused(CommMismatch, "rank 0 called Muon.step", other_numbers)


def test_arrays_that_do_not_fit_are_refused():
    muon, x = optim.Muon(), np.ones((2, 3), np.float32)
    for bad in (np.ones(3, np.float32), np.ones((2, 2, 2)), np.ones((2, 2), np.float16)):
        with pytest.raises(ArrayError, match="expected a matrix of float32 or float64; use Adam for vectors"):
            muon.init(bad)
    state = muon.init(x)
    for weights, grads, rows in ([x], [x.T], None), ([x], [x.astype("f8")], None), ([x], [x], [[1]]):
        with pytest.raises(ArrayError, match="expected matrices of one dtype, gradients and states like them"):
            muon.step(weights, grads, [state], rows=rows)
    with pytest.raises(
        ArrayError, match=r"\(1, 2, 1, 1\) weights, grads, states and rows, expected equally many"
    ):
        muon.step([x], [x, x], [state])
    with pytest.raises(ArrayError, match="adjust_lr_fn is 'none', expected one of original, match_rms_adamw"):
        optim.Muon(adjust_lr_fn="none")


def test_arrays_of_an_engine_are_stepped_by_their_owners():
    """Gradients are averaged by the engine; each matrix is computed by one rank, and vectors by all."""
    specs = [
        TensorSpec("a", (6, 4), "float32"),
        TensorSpec("b", (4,), "float32"),
        TensorSpec("c", (3, 5), "float32"),
    ]
    muon, adam = optim.Muon(0.1), optim.Adam(0.1)

    def body(comm):
        plan = Plan.pack(specs, bucket_bytes=64)
        weights, grads = plan.allocate(), plan.allocate()
        weight, grad = plan.cut(weights), plan.cut(grads)
        states = [muon.init(weight[name]) for name in "ac"]
        vector = adam.init(weight["b"])
        engine = Engine(comm, GradientAllReduce(), plan, {"weight": weights, "grad": grads})
        with engine, optim.Owners(comm) as owners:
            for step in range(2):
                engine.at(Point.FORWARD)
                for name, view in grad.items():
                    view[...] = comm.rank + sample(0, view.shape, "float32", seed=step)
                    engine.ready(name)
                engine.at(Point.BACKWARD)
                muon.step([weight[name] for name in "ac"], [grad[name] for name in "ac"], states, owners)
                adam.step(weight["b"], grad["b"], vector)
                engine.at(Point.STEP)
        comm.check_consistency(np.concatenate(weights))
        return {name: view.copy() for name, view in weight.items()}

    (first, second), (reference,) = run_ranks(2, body), run_ranks(1, body)
    for name in "abc":
        assert first[name].tobytes() == second[name].tobytes()
        assert first[name].any()
        assert np.abs(first[name] - reference[name]).max() < 0.3  # of other means
