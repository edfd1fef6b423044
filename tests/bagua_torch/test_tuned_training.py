"""New buckets and settings while a model trains, by hand and by a tuner."""

import pytest
import torch
from support.torch_training import (
    assert_same_on_all_ranks,
    batch,
    gradients,
    loss_of,
    through_a_file,
    train,
    train_step,
    weights,
    wrapped,
)

from bagua_comm import (
    ArrayError,
    ByteGrad,
    Decentralized,
    DiLoCo,
    ErrorFeedback,
    Exact,
    GradientAllReduce,
    Hierarchical,
    LowPrecisionDecentralized,
    MinMaxUInt8,
    QAdam,
    Quantized,
    Tuner,
    after,
)
from bagua_comm.bucket import DEFAULT_BUCKET_BYTES
from bagua_comm.testing import run_ranks
from bagua_torch import as_array

EXACT = [
    GradientAllReduce(),
    QAdam(warmup_steps=3, average=Exact()),
    Decentralized(),
    Decentralized("shift_one"),
    DiLoCo(local_steps=3),
    after(3, Decentralized(), GradientAllReduce()),
    after(4, GradientAllReduce(), DiLoCo(local_steps=2)),
]
SIZES = [1, 64, 300]
"""Of buckets: each makes others of the model's six tensors, 520 bytes in all."""


def make_tuner(**settings):
    return Tuner(**{"bucket_bytes": SIZES, "steps_per_trial": 1, "warmup_steps": 0, **settings})


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", EXACT, ids=repr)
def test_new_buckets_leave_training_as_it_is_to_the_bit(algorithm):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)
        plain, plain_optimizer, plain_ddp = wrapped(comm, algorithm)
        for step in range(10):
            train(comm, ddp, optimizer, [step])
            train(comm, plain_ddp, plain_optimizer, [step])
            ddp.replan(bucket_bytes=SIZES[step % len(SIZES)])
        for each in (ddp, plain_ddp):
            each.close()
        assert torch.equal(weights(model), weights(plain))
        assert torch.equal(gradients(model), gradients(plain))

    run_ranks(2, body)


def test_gradients_are_averaged_by_the_backward_pass_in_which_a_tuner_changes_the_buckets():
    """Not by the optimizer's step: whatever clips gradients comes before it."""

    def body(comm):
        model, optimizer, ddp = wrapped(comm, tuner=make_tuner())
        sizes = set()
        for step in range(20):
            optimizer.zero_grad()
            loss_of(ddp, batch(comm.rank, step)).backward()
            comm.check_consistency(as_array(gradients(model)))
            optimizer.step()
            sizes.add(ddp.bucket_bytes)
        ddp.close()
        assert len(sizes) > 1

    run_ranks(2, body)


def test_gradients_that_accumulate_move_to_new_buckets():
    def body(comm):
        models = []
        for replan in (False, True):
            model, _, ddp = wrapped(comm)
            with ddp.no_sync():
                loss_of(ddp, batch(comm.rank, 0)).backward()
            before = gradients(model)
            if replan:
                ddp.replan(bucket_bytes=64)
                assert torch.equal(gradients(model), before)
                inside = [(flat.data_ptr(), flat.nbytes) for flat in ddp._steps.memory.flats["grad"]]
                assert all(
                    any(0 <= p.grad.data_ptr() - begin < size for begin, size in inside)
                    for p in model.parameters()
                )
            loss_of(ddp, batch(comm.rank, 1)).backward()
            ddp.close()
            models.append(model)
        assert torch.equal(gradients(models[0]), gradients(models[1]))

    run_ranks(2, body)


def test_a_state_that_cannot_move_to_new_buckets_raises_and_training_continues():
    def body(comm):
        algorithm = GradientAllReduce(Hierarchical(ErrorFeedback()))
        model, optimizer, ddp = wrapped(comm, algorithm)
        plain, plain_optimizer, plain_ddp = wrapped(comm, algorithm)
        train(comm, plain_ddp, plain_optimizer, range(4))
        train(comm, ddp, optimizer, range(2))
        with pytest.raises(ArrayError, match="cannot move to another"):
            ddp.replan(bucket_bytes=64)
        train(comm, ddp, optimizer, range(2, 4))
        for each in (ddp, plain_ddp):
            each.close()
        assert torch.equal(weights(model), weights(plain))

    run_ranks(4, body, nodes=["a", "a", "b", "b"])


def test_another_algorithm_is_for_switch():
    def body(comm):
        _, optimizer, ddp = wrapped(comm, ByteGrad())
        with pytest.raises(ArrayError, match=r"expected GradientAllReduce.* with other settings"):
            ddp.replan(algorithm=Decentralized())
        train(comm, ddp, optimizer, range(2))
        ddp.close()

    run_ranks(2, body)


@pytest.mark.parametrize("algorithm", [GradientAllReduce(), Decentralized()], ids=repr)
def test_training_with_a_tuner_is_the_same_to_the_bit_and_ends_with_the_best(algorithm):
    def body(comm):
        tuner = make_tuner()
        model, optimizer, ddp = wrapped(comm, algorithm, tuner=tuner)
        plain, plain_optimizer, plain_ddp = wrapped(comm, algorithm)
        train(comm, plain_ddp, plain_optimizer, range(30))
        sizes = []
        for step in range(30):
            train(comm, ddp, optimizer, [step])
            sizes.append(ddp.bucket_bytes)
        for each in (ddp, plain_ddp):
            each.close()
        assert torch.equal(weights(model), weights(plain))
        assert not tuner.searching
        assert (
            {trial.settings.bucket_bytes for trial in tuner.history} == {*sizes} == {*SIZES, DEFAULT_BUCKET_BYTES}
        )
        assert sizes[-1] == tuner.best.bucket_bytes
        assert all(0 < trial.seconds < 30 for trial in tuner.history)
        return sizes

    assert len(set(map(tuple, run_ranks(2, body)))) == 1


def test_averages_and_blocks_are_tried_where_they_are_given():
    def body(comm):
        tuner = make_tuner(averages=[Quantized()], blocks=[32], trials=6)
        _, optimizer, ddp = wrapped(comm, tuner=tuner)
        tried = set()
        for step in range(35):
            train(comm, ddp, optimizer, [step])
            tried.add(ddp.engine.algorithm)
            assert ddp.engine.algorithm == ddp.algorithm
        assert_same_on_all_ranks(comm, ddp.module)
        ddp.close()
        assert tried > {GradientAllReduce()}
        assert ddp.algorithm == tuner.best.algorithm
        return tried

    tried = run_ranks(2, body)
    assert tried[0] == tried[1]


def test_the_next_training_begins_with_the_profile(tmp_path):
    def body(comm):
        first = make_tuner(profile=tmp_path / "profile.json")
        _, optimizer, ddp = wrapped(comm, tuner=first)
        train(comm, ddp, optimizer, range(30))
        ddp.close()
        comm.barrier()
        second = make_tuner(profile=tmp_path / "profile.json")
        _, _, ddp = wrapped(comm, tuner=second)
        ddp.close()
        assert (second.searching, second.history) == (False, [])
        assert ddp.bucket_bytes == second.best.bucket_bytes == first.best.bucket_bytes

    run_ranks(2, body)


@pytest.mark.parametrize("algorithm", [ByteGrad(), LowPrecisionDecentralized()], ids=repr)
def test_a_checkpoint_made_during_a_search_loads_into_one_that_begins(algorithm):
    def body(comm):
        _, optimizer, ddp = wrapped(comm, algorithm, tuner=make_tuner(blocks=[32, 64], trials=5))
        step = 0
        while ddp.algorithm == algorithm:
            train(comm, ddp, optimizer, [step])
            step += 1
        saved = through_a_file(ddp.state_dict())
        ddp.close()

        model, optimizer, ddp = wrapped(comm, algorithm, tuner=make_tuner(blocks=[32, 64], trials=5))
        ddp.load_state_dict(saved)
        assert ddp.algorithm == algorithm
        assert ddp.engine.step == step
        assert torch.equal(
            weights(model), torch.cat([saved[f"module.{n}"].reshape(-1) for n, _ in model.named_parameters()])
        )
        train(comm, ddp, optimizer, range(step, step + 30))
        assert not ddp.tuner.searching
        ddp.close()

    run_ranks(2, body)


def test_a_search_rests_in_join_and_ends_with_another_algorithm():
    def body(comm):
        tuner = make_tuner(warmup_steps=2)
        _, optimizer, ddp = wrapped(comm, tuner=tuner)
        with ddp.join():
            train(comm, ddp, optimizer, range(8 + comm.rank))
        assert (tuner.searching, tuner.history) == (True, [])
        train(comm, ddp, optimizer, range(6))
        assert 0 < len(tuner.history) < 10
        trials = len(tuner.history)
        ddp.switch(ByteGrad())
        train(comm, ddp, optimizer, range(6))
        assert ddp.tuner is None
        assert len(tuner.history) == trials
        ddp.close()

    run_ranks(2, body)


def test_a_step_with_an_unused_parameter_or_an_evaluation_between_is_tuned_like_others():
    def body(comm):
        tuner = make_tuner(trials=4)
        model, optimizer, ddp = wrapped(comm, ByteGrad(), tuner=tuner, find_unused_parameters=True)
        for step in range(30):
            train_step(ddp, optimizer, batch(comm.rank, step))
            ddp.eval()
            with torch.no_grad():
                ddp(batch(0, 0))
            ddp.train()
        assert not tuner.searching
        assert isinstance(tuner.best.algorithm.average.codec, MinMaxUInt8)
        assert_same_on_all_ranks(comm, model)
        ddp.close()

    run_ranks(2, body)


def test_a_checkpoint_of_one_rank_that_is_damaged_is_refused_on_all_during_a_search():
    algorithm = LowPrecisionDecentralized()

    def body(comm):
        _, optimizer, ddp = wrapped(comm, algorithm, tuner=make_tuner(blocks=[32, 64], trials=5))
        step = 0
        while ddp.algorithm == algorithm:
            train(comm, ddp, optimizer, [step])
            step += 1
        saved = ddp.state_dict()
        ddp.close()
        _, optimizer, ddp = wrapped(comm, algorithm, tuner=make_tuner(blocks=[32, 64], trials=5))
        for change in ({"algorithm": "x"}, {"algorithm": []}, {"step": -1}):
            whole = saved["_extra_state"]
            damaged = {**whole, **change} if comm.rank else whole
            with pytest.raises(ArrayError, match="load_state_dict"):
                ddp.load_state_dict({**saved, "_extra_state": damaged})
            assert ddp.algorithm == algorithm
        train(comm, ddp, optimizer, range(2))
        ddp.close()

    run_ranks(2, body, timeout_s=5)
