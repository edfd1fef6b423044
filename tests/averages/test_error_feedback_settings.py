"""Decay, resets and encoded residuals of error feedback, as in LoCo (arXiv 2407.04480)."""

import numpy as np
import pytest
from support.references import Trainer, bits, common_start, decoded, make_plan, mean

from bagua_comm import (
    BFloat16,
    CommMismatch,
    Engine,
    ErrorFeedback,
    GradientAllReduce,
    Hierarchical,
    MinMaxUInt8,
    Quantized,
)
from bagua_comm.arrays import dtype_named
from bagua_comm.kernels import host
from bagua_comm.testing import run_ranks, sample

COUNT, STEPS = 96, 7
CODEC, HOLDS = MinMaxUInt8(block=16), MinMaxUInt8(block=24)
LOCO = ErrorFeedback(Quantized(CODEC), 0.8, 3, HOLDS)
SETTINGS = [
    {"decay": 0.8},
    {"reset_every": 1},
    {"reset_every": 3},
    {"residual_codec": HOLDS},
    {"decay": 0.8, "reset_every": 3, "residual_codec": HOLDS},
]


def values(rank, step):
    return sample(rank, (COUNT,), "float32", seed=step)


def reference(ranks, decay=0.0, reset_every=None, residual_codec=None):
    """The mean and the residuals of all ranks after every step; only the codecs are those of the library."""
    errors = np.zeros((ranks, COUNT), "f4")
    for step in range(STEPS):
        if reset_every is not None and step % reset_every == 0:
            errors[:] = 0
        x = np.array([values(rank, step) for rank in range(ranks)]) + errors * np.float32(1 - decay)
        sent = np.array([decoded(CODEC, row.reshape(ranks, -1)).reshape(-1) for row in x])
        total = mean(sent)
        result = decoded(CODEC, total.reshape(ranks, -1)).reshape(-1)
        lost = x - sent
        for owner, chunk in enumerate(np.split(np.arange(COUNT), ranks)):
            lost[owner, chunk] += ranks * (total - result)[chunk]
        errors = errors * np.float32(decay) + lost
        if residual_codec is not None:
            errors = decoded(residual_codec, errors)
        yield result, errors


@pytest.mark.parametrize(("ranks", "settings"), [*((3, each) for each in SETTINGS), (2, SETTINGS[-1])], ids=str)
def test_it_follows_the_formula(ranks, settings):
    def body(comm, read):
        mean, found = ErrorFeedback(Quantized(CODEC), **settings).bind(comm), []
        for step in range(STEPS):
            found.append((mean(values(comm.rank, step)), mean.residual.copy() if read else None))
        return found

    kept, unread = (run_ranks(ranks, lambda comm, read=read: body(comm, read)) for read in (True, False))
    plain = [result for result, _ in reference(ranks)]
    differs = 0.0
    for step, (result, errors) in enumerate(reference(ranks, **settings)):
        for rank in range(ranks):
            assert kept[rank][step][0].tobytes() == unread[0][step][0].tobytes()
            np.testing.assert_allclose(kept[rank][step][0], result, rtol=0, atol=1e-5)
            np.testing.assert_allclose(kept[rank][step][1], errors[rank], rtol=0, atol=1e-5 * ranks)
        differs = max(differs, np.abs(result - plain[step]).max())
    assert differs > 1e-3  # so that the settings have an effect


def test_a_residual_in_an_engine_stays_encoded():
    def body(comm):
        with Trainer(
            comm, GradientAllReduce(ErrorFeedback(residual_codec=MinMaxUInt8())), make_plan(2)
        ) as training:
            training.step()
            states = [state.average.state for state in training.engine.states]
            return [state.nbytes / (4 * state.size) for state in states]

    assert run_ranks(2, body)[0][0] < 0.3  # the largest one; headers are large beside the others


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_residual_takes_a_quarter_of_the_memory(dtype):
    def body(comm, codec):
        mean, x = ErrorFeedback(residual_codec=codec).bind(comm), np.ones(1 << 16, dtype_named(dtype))
        held = [mean.state.nbytes]
        for _ in range(2):
            mean(x.copy())
            held.append(mean.state.nbytes)
        assert mean.state.size == x.size
        return [nbytes / x.size for nbytes in held]

    itemsize = dtype_named(dtype).itemsize
    assert run_ranks(2, lambda comm: body(comm, None))[0] == [0, itemsize, itemsize]
    assert run_ranks(2, lambda comm: body(comm, BFloat16()))[0] == [0, 2, 2]
    _, *encoded = run_ranks(2, lambda comm: body(comm, MinMaxUInt8()))[0]
    assert encoded == [1 + 2 * itemsize / 512] * 2


@pytest.mark.parametrize("average", [ErrorFeedback(Quantized(CODEC)), LOCO], ids=repr)
def test_a_nan_is_seen_and_forgotten(average):
    def body(comm):
        mean, x = average.bind(comm), np.ones(64, np.float32)
        x[0] = np.nan
        return mean(x), mean.residual.copy(), mean(np.ones(64, np.float32))

    for first, residual, second in run_ranks(2, body):
        assert np.isnan(first).any()
        assert np.isfinite(residual).all()
        assert np.isfinite(second).all()


def test_what_is_written_to_a_residual_that_was_read_is_kept():
    def body(comm):
        mean = LOCO.bind(comm)
        mean(values(comm.rank, 0))
        mean.residual[...] = 1
        held = mean.state.nbytes
        assert mean.residual.tolist() == [1] * COUNT
        np.testing.assert_allclose(mean(np.zeros(COUNT, np.float32)), 0.2, rtol=1e-6)
        return held

    assert run_ranks(2, body) == [4 * COUNT] * 2


def test_a_single_rank_and_an_empty_array_lose_nothing():
    def body(comm):
        mean, empty = LOCO.bind(comm), LOCO.bind(comm)
        for step in range(5):
            assert np.array_equal(mean(values(0, step)), values(0, step)) == (comm.size == 1)
            assert empty(np.zeros(0, np.float32)).size == 0
        return mean.state.means, empty.state.means

    assert run_ranks(1, body) == [(2, 2)]
    assert run_ranks(2, body) == [(2, 2)] * 2


# Counts -----------------------------------------------------------------------------------------------------


def counts(engine):
    """The numbers of means since the reset, one for each bucket."""
    bound = [state.average for state in engine.states]
    return [(b if hasattr(b, "state") else b.average.across).state.means for b in bound]


@pytest.mark.parametrize(("average", "nodes"), [(LOCO, "abc"), (Hierarchical(LOCO), "abb")], ids=str)
def test_counts_of_steps_are_equal_on_all_ranks_and_buckets(average, nodes):
    def body(comm):
        plan = make_plan(comm.size)
        assert len(plan.buckets) > 1
        with Trainer(comm, GradientAllReduce(average), plan, start=common_start) as training:
            found = []
            for _ in range(5):
                training.run(1)
                found.append(counts(training.engine))
            return found

    expected = [[means] * len(make_plan(3).buckets) for means in (1, 2, 3, 1, 2)]
    assert run_ranks(3, body, nodes=list(nodes)) == [expected] * 3


def test_another_plan_keeps_the_count_and_the_residuals_and_other_settings_restart_the_count():
    def body(comm):
        plan, trajectories = make_plan(comm.size), []
        for replanned in (False, True):
            with Trainer(comm, GradientAllReduce(LOCO), plan, start=common_start) as training:
                training.run(4)
                if replanned:
                    training.replan(plan)
                trajectories.append((bits(training.run(3)), counts(training.engine)))
        assert trajectories[0] == trajectories[1]
        found = []
        with Trainer(comm, GradientAllReduce(LOCO), plan, start=common_start) as training:
            for average in (
                ErrorFeedback(Quantized(CODEC), reset_every=9),
                ErrorFeedback(Quantized(CODEC)),
                Quantized(CODEC),
                LOCO,
            ):
                training.run(2)
                before = list(training.engine.state_dict()["tensors"].values())
                training.replan(plan, GradientAllReduce(average))
                after = list(training.engine.state_dict()["tensors"].values())
                for old, new in zip(before, after, strict=True):
                    if "average.residual" in old:
                        assert np.array_equal(old["average.residual"], new["average.residual"])
                found.append({tensor.get("average.means") for tensor in after})
        return found

    assert run_ranks(2, body) == [[{0}, {None}, {None}, {0}]] * 2


def test_a_loaded_state_continues_to_the_same_bits():
    def body(comm):
        plan = make_plan(comm.size)
        with Trainer(comm, GradientAllReduce(LOCO), plan, start=common_start) as training:
            training.run(4)
            saved = training.state_dict()
            expected = bits(training.run(4))
        assert all(tensor["average.means"] == 1 for tensor in saved["engine"]["tensors"].values())
        with Trainer(comm, GradientAllReduce(LOCO), plan, start=common_start) as training:
            training.load_state_dict(saved)
            return bits(training.run(4)) == expected

    assert run_ranks(3, body) == [True] * 3


# Bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [{"decay": 0.5}, {"reset_every": 4}, {"residual_codec": CODEC}, {}])
def test_settings_that_differ_between_ranks_are_refused_on_all_before_a_byte_moves(other):
    def body(comm):
        average = LOCO if comm.rank == 0 else ErrorFeedback(Quantized(CODEC), **other)
        with pytest.raises(CommMismatch, match=r"rank 0 called ErrorFeedback\.bind.*but rank [12]"):
            average.bind(comm)
        with pytest.raises(CommMismatch, match="different algorithms"):
            Engine(comm, GradientAllReduce(average), make_plan(comm.size), make_plan(comm.size).allocate())
        return comm.counters.total().calls

    run_ranks(3, body)


# Kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_kernel_of_the_decayed_error(dtype):
    x, decoded, before = (sample(seed, (200_003,), "float32").astype(dtype_named(dtype)) for seed in range(3))
    x[:3] = np.nan, np.inf, -np.inf
    wide = [array.astype(np.float32) for array in (x, decoded, before)]
    with np.errstate(all="ignore"):
        lost = wide[2] * np.float32(0.8) + (wide[0] - wide[1])
        expected = np.where(np.isfinite(lost), lost, np.float32(0))
    host.decayed_loss(x, decoded, 0.8, out=before)
    assert before.tobytes() == expected.astype(before.dtype).tobytes()


def test_the_kernel_that_adds_a_part_of_the_residual():
    x, y, out = (sample(seed, (1003,), "float32") for seed in range(3))
    host.add_scaled(x, y, 0.2, out=out)
    assert out.tobytes() == (x + y * np.float32(0.2)).tobytes()
    assert x.tobytes() == sample(0, (1003,), "float32").tobytes()


def test_settings_may_be_numbers_of_numpy_and_inner_may_quantize_all():
    given = ErrorFeedback(Quantized(CODEC, min_bytes=0), decay=np.float32(0.5), reset_every=np.int64(5))
    assert given == ErrorFeedback(Quantized(CODEC, min_bytes=0), decay=0.5, reset_every=5)
    assert "np." not in repr(given)
