"""Checkpoints, restarts, and changes of the algorithm on the way."""

import copy

import pytest
import safetensors.torch
import torch
from support.torch_training import (
    ALGORITHMS,
    ASYNC_ALGORITHMS,
    QADAM,
    WEIGHT_ALGORITHMS,
    Training,
    assert_same_on_all_ranks,
    batch,
    final_weights,
    gradients,
    loss_of,
    make_model,
    optimizer_for,
    sgd,
    through_a_file,
    train,
    train_step,
    weights,
    wrapped,
)
from torch import nn

from bagua_comm import (
    ArrayError,
    AsyncModelAverage,
    ByteGrad,
    CommError,
    Decentralized,
    DiLoCo,
    ErrorFeedback,
    GradientAllReduce,
    Hierarchical,
    Int4,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    QAdam,
    Quantized,
    StreamingDiLoCo,
    UnsupportedError,
    after,
)
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel, QAdamOptimizer, as_array

REPEATABLE = [algorithm for algorithm in ALGORITHMS if algorithm not in ASYNC_ALGORITHMS]
STEPS = 7


# Into the plain module, and back --------------------------------------------------------------------------


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_checkpoints_of_module_and_optimizer_load_into_plain_ones(algorithm):
    def body(comm):
        model = nn.Sequential(nn.BatchNorm1d(4), make_model())
        optimizer = optimizer_for(algorithm, model.parameters())
        ddp = DistributedDataParallel(model, optimizer, algorithm, comm=comm, bucket_bytes=100)
        train(comm, ddp, optimizer, range(5))
        saved = through_a_file({"module": ddp.module.state_dict(), "optimizer": optimizer.state_dict()})
        before = copy.deepcopy(model.state_dict())
        ddp.close()  # buffers become rank 0's, where they differ between exchanges

        plain = nn.Sequential(nn.BatchNorm1d(4), make_model(seed=1))
        plain_optimizer = optimizer_for(algorithm, plain.parameters())
        plain.load_state_dict(saved["module"])
        plain_optimizer.load_state_dict(saved["optimizer"])

        assert list(saved["module"]) == list(plain.state_dict())
        # Of the asynchronous one a round may have ended in close(), and of the streaming one an exchange.
        if algorithm not in ASYNC_ALGORITHMS and not isinstance(algorithm, StreamingDiLoCo):
            for name, value in before.items():
                assert torch.equal(plain.state_dict()[name], value)
            for each, each_optimizer in ((model, optimizer), (plain, plain_optimizer)):
                train_step(each, each_optimizer, batch(0, 5))
            assert torch.equal(weights(plain), weights(model))

    run_ranks(2, body)


def test_a_plain_checkpoint_loads_into_a_wrapped_module():
    plain = make_model(seed=1)

    def body(comm):
        _, optimizer, ddp = wrapped(comm, LowPrecisionDecentralized())
        train_step(ddp, optimizer, batch(comm.rank, 0))
        ddp.module.load_state_dict(plain.state_dict())
        with torch.no_grad():
            assert torch.equal(ddp.module(batch(0, 0)), plain(batch(0, 0)))
        ddp.close()

    run_ranks(2, body)


def test_a_checkpoint_in_an_old_graph_is_not_overwritten_by_an_exchange():
    """An exchange after a step is written back before weights are loaded, not after."""

    def body(comm):
        model, optimizer, ddp = wrapped(comm, DiLoCo(local_steps=1))
        saved = through_a_file(ddp.module.state_dict())
        train_step(ddp, optimizer, batch(comm.rank, 0))
        ddp.module.load_state_dict(saved)
        ddp.eval()(batch(0, 0))
        ddp.close()
        assert torch.equal(weights(model), weights(make_model()))

    run_ranks(2, body)


# Restarts -------------------------------------------------------------------------------------------------


def assert_restarts(ranks, algorithm, at, *, skipped=(), optimizers=1, other_buckets=200):
    """Saved and loaded into new objects after `at` steps, training ends as if nothing had been."""

    def through(comm):
        training = Training(comm, algorithm, optimizers=optimizers)
        training.run(0, STEPS, skipped=skipped)
        return training.close()

    def restarted(comm):
        training = Training(comm, algorithm, optimizers=optimizers)
        training.run(0, at, skipped=skipped)
        saved = training.saved()
        training.run(at, at + 1, skipped=skipped)  # leaves what was saved as it is
        training.close()

        training = Training(
            comm, algorithm, seed=1 + comm.rank, optimizers=optimizers, bucket_bytes=other_buckets
        )
        training.load(saved)
        for name, value in saved["module"].items():
            assert torch.equal(training.model.state_dict()[name], value)
        training.run(at, STEPS, skipped=skipped)
        return training.close()

    expected = run_ranks(ranks, through, timeout_s=5)
    for rank, actual in enumerate(run_ranks(ranks, restarted, timeout_s=5)):
        for name, value in expected[rank].items():
            assert torch.equal(actual[name], value), f"{name} of rank {rank}"


@pytest.mark.algorithms("sample")
@pytest.mark.covering(1)
@pytest.mark.parametrize("algorithm", REPEATABLE, ids=repr)
@pytest.mark.parametrize(("ranks", "at"), [(1, 4), (2, 1), (4, 4)])
def test_a_restart_changes_nothing(ranks, at, algorithm):
    """Saved between the optimizer's step and the next forward pass, while weights may be under way."""
    if ranks == 1 and "shift_one" in repr(algorithm):
        return  # refused; see test_bad_input.py
    assert_restarts(ranks, algorithm, at)


def test_a_restart_repeats_the_random_numbers_of_stochastic_rounding():
    """They depend on the step, which the algorithm does not count otherwise."""
    assert_restarts(2, GradientAllReduce(Quantized(Int4(rounding="stochastic"), min_bytes=0)), 4)


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", [a for a in REPEATABLE if not isinstance(a, QAdam)], ids=repr)
def test_a_restart_where_optimizers_alternate(algorithm):
    """The step of the only optimizer that stepped has not ended yet when it is saved."""
    assert_restarts(2, algorithm, 4, optimizers=2)


@pytest.mark.algorithms("sample")
@pytest.mark.covering(1)
@pytest.mark.parametrize("algorithm", WEIGHT_ALGORITHMS, ids=repr)
@pytest.mark.parametrize("ranks", [[0], [0, 1]], ids=["one rank", "all ranks"])
def test_a_restart_after_a_step_was_skipped(algorithm, ranks):
    assert_restarts(2, algorithm, 4, skipped=[(rank, 3) for rank in ranks])


@pytest.mark.parametrize(
    "algorithm",
    [DiLoCo(local_steps=3), LowPrecisionOnePeer(), QAdam(warmup_steps=3, average=GradientAllReduce().average)],
    ids=repr,
)
def test_a_restart_with_other_buckets(algorithm):
    """Training that does not depend on the buckets, such as with exact averages, continues bit for bit."""
    if isinstance(algorithm, LowPrecisionOnePeer):

        def body(comm):
            training = Training(comm, algorithm)
            training.run(0, 4)
            saved = training.saved()
            training.close()
            training = Training(comm, algorithm, bucket_bytes=10**6)
            training.load(saved)
            for (bucket,), (state,) in [(training.ddp.engine.buckets, training.ddp.engine.states)]:
                comm.check_consistency(bucket.flat[:0])
                return state.sent[0].copy(), state.received[0].copy()
            return None

        (sent, received), (other_sent, other_received) = run_ranks(2, body)
        assert sent.tobytes() == other_received.tobytes()
        assert received.tobytes() == other_sent.tobytes()
    else:
        assert_restarts(2, algorithm, 4, other_buckets=10**6)


def test_the_state_of_another_algorithm_is_refused():
    def body(comm):
        training = Training(comm, DiLoCo(local_steps=3))
        saved = training.saved()
        training.close()
        training = Training(comm, DiLoCo(local_steps=4))
        with pytest.raises(ArrayError, match=r"saved with DiLoCo\(local_steps=3.*DiLoCo\(local_steps=4"):
            training.load(saved)
        training.run(0, 5)
        training.close()

    run_ranks(2, body)


def test_a_restart_in_the_middle_of_an_accumulation_keeps_nothing_of_it():
    """As with PyTorch's own, gradients are in no checkpoint."""

    def body(comm):
        training = Training(comm, GradientAllReduce(ErrorFeedback()))
        with training.ddp.no_sync():
            loss_of(training.ddp, batch(comm.rank, 0)).backward()
        saved = training.saved()
        training.close()
        return sorted(saved["ddp"]), sorted(f"module.{name}" for name in saved["module"])

    for names, module_names in run_ranks(2, body):
        assert names == sorted(["_extra_state", *module_names])


KEEP_NOTHING = [
    GradientAllReduce(),
    ByteGrad(),
    GradientAllReduce(Hierarchical(Quantized())),
    GradientAllReduce(Hierarchical()),
]


@pytest.mark.parametrize("algorithm", KEEP_NOTHING, ids=repr)
def test_a_state_dict_holds_tensors_alone_where_the_algorithm_keeps_nothing(algorithm):
    """As safetensors and others expect it; PyTorch's own wrapper saves and loads the same."""

    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)
        train(comm, ddp, optimizer, range(3))
        saved = ddp.state_dict()
        assert list(saved) == [f"module.{name}" for name in model.state_dict()]
        file = safetensors.torch.save(saved)
        _, again_optimizer, again = wrapped(comm, algorithm)
        assert again.load_state_dict(safetensors.torch.load(file)) == ([], [])
        outer = nn.ModuleDict({"net": again})
        assert outer.load_state_dict({f"net.{name}": value for name, value in saved.items()}) == ([], [])
        assert torch.equal(weights(again), weights(model))
        train(comm, again, again_optimizer, range(3, 5))
        assert_same_on_all_ranks(comm, again.module)
        for each in (ddp, again):
            each.close()

    run_ranks(2, body)


@pytest.mark.parametrize("algorithm", KEEP_NOTHING, ids=repr)
def test_a_state_saved_beside_the_module_loads_where_the_algorithm_has_none(algorithm):
    """From files of an earlier version."""

    def body(comm):
        _, optimizer, ddp = wrapped(comm, algorithm)
        train(comm, ddp, optimizer, range(3))
        saved = through_a_file({**ddp.state_dict(), "_extra_state": ddp.get_extra_state()})
        _, _, again = wrapped(comm, algorithm)
        assert again.load_state_dict(saved) == ([], [])
        assert again.engine.step == 3
        for each in (ddp, again):
            each.close()

    run_ranks(2, body)


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a not in KEEP_NOTHING], ids=repr)
def test_a_state_dict_without_the_state_of_the_algorithm_is_refused(algorithm, steps):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)
        train(comm, ddp, optimizer, range(steps))
        saved = ddp.state_dict()
        assert set(saved) == {"_extra_state", *(f"module.{name}" for name in model.state_dict())}
        plain = {f"module.{name}": value for name, value in model.state_dict().items()}
        with pytest.raises(RuntimeError, match=r'Missing key.*"_extra_state"'):
            ddp.load_state_dict(plain)
        assert ddp.load_state_dict(plain, strict=False) == (["_extra_state"], [])
        ddp.close()

    run_ranks(2, body)


def test_a_state_dict_of_the_plain_module_belongs_into_the_plain_module():
    def body(comm):
        model, _, ddp = wrapped(comm)
        with pytest.raises(RuntimeError, match=r"such as '0.weight'.*; use ddp.module.load_state_dict"):
            ddp.load_state_dict(model.state_dict())
        ddp.module.load_state_dict(model.state_dict())
        ddp.close()

    run_ranks(1, body)


def test_loading_without_state_of_the_algorithm_forgets_a_step_that_was_pending():
    def body(comm):
        model, optimizer, ddp = wrapped(comm)
        saved = through_a_file(ddp.state_dict())
        failing = model[0].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(ddp, batch(comm.rank, 0)).backward()
        failing.remove()
        ddp.load_state_dict(saved)
        optimizer.zero_grad()
        train(comm, ddp, optimizer, range(2))
        assert_same_on_all_ranks(comm, model)
        ddp.close()

    run_ranks(2, body)


def test_loading_forgets_a_step_that_was_pending():
    """A backward pass before a state is loaded is no step of the training that continues from it."""

    def body(comm):
        model, optimizer, ddp = wrapped(comm, LowPrecisionDecentralized())
        train(comm, ddp, optimizer, range(2))
        saved = through_a_file({"ddp": ddp.state_dict(), "optimizer": optimizer.state_dict()})
        results = []
        for begun in (False, True):
            if begun:
                loss_of(ddp, batch(comm.rank, 9)).backward()
                optimizer.load_state_dict(saved["optimizer"])
                ddp.load_state_dict(saved["ddp"])
            assert ddp.engine.step == 2
            train(comm, ddp, optimizer, range(2, 5))
            results.append((ddp.engine.step, weights(model)))
        ddp.close()
        return results

    for (steps, expected), (steps_after, actual) in run_ranks(2, body):
        assert steps == steps_after == 5
        assert torch.equal(expected, actual)


@pytest.mark.parametrize("algorithm", ASYNC_ALGORITHMS, ids=repr)
def test_an_asynchronous_average_restarts_from_any_step(algorithm):
    """Not bit for bit: rounds end when they end. Step counts go on, and ranks agree in the end."""

    def body(comm):
        training = Training(comm, algorithm)
        training.run(0, 5)
        saved = training.saved()
        training.run(5, 7)
        training.close()
        training = Training(comm, algorithm, seed=1 + comm.rank)
        training.load(saved)
        assert training.ddp.engine.step == 5
        for name, value in saved["module"].items():
            assert torch.equal(training.model.state_dict()[name], value)
        training.run(5, STEPS)
        training.ddp.switch(GradientAllReduce())
        assert_same_on_all_ranks(comm, training.model[1])
        training.close()

    run_ranks(2, body)


# Another algorithm on the way -----------------------------------------------------------------------------

CHAIN = [
    ByteGrad(),
    Decentralized(),
    GradientAllReduce(),
    QADAM,
    AsyncModelAverage(interval_s=0),
    LowPrecisionDecentralized(),
    Decentralized("one_peer_exponential"),
    DiLoCo(local_steps=2),
    after(2, GradientAllReduce(ErrorFeedback()), LowPrecisionOnePeer()),
    GradientAllReduce(),
]


@pytest.mark.parametrize("ranks", [*(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 2)), 3])
def test_switching_through_all_algorithms(ranks):
    """The loss continues to fall, and after each switch all ranks have the same weights."""

    def body(comm):
        model = nn.Sequential(nn.BatchNorm1d(4), make_model())
        optimizer = optimizer_for(QADAM, model.parameters())
        ddp = DistributedDataParallel(model, optimizer, CHAIN[0], comm=comm, bucket_bytes=100)
        losses = []
        for number, algorithm in enumerate(CHAIN):
            if number:
                ddp.switch(algorithm)
            assert ddp.algorithm == algorithm
            assert ddp.engine.step == 0
            comm.check_consistency(as_array(weights(model)))
            with torch.no_grad():
                losses.append(loss_of(ddp, batch(0, 0)).item())
            train(comm, ddp, optimizer, range(4))
        comm.check_consistency(as_array(weights(model)))
        ddp.close()
        return losses

    for losses in run_ranks(ranks, body):
        assert losses == sorted(losses, reverse=True)


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", WEIGHT_ALGORITHMS, ids=repr)
def test_switching_takes_the_mean_of_weights_that_differ(algorithm):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)
        train(comm, ddp, optimizer, range(4))
        ddp.eval()(batch(0, 0))  # exchanges are written back
        mine = weights(model)
        ddp.train().switch(GradientAllReduce())
        mean = weights(model)
        momenta = torch.cat([state["momentum_buffer"].reshape(-1) for state in optimizer.state.values()])
        comm.check_consistency(as_array(momenta))
        train(comm, ddp, optimizer, range(3))
        assert_same_on_all_ranks(comm, model)
        ddp.close()
        return mine, mean

    (first, mean), (second, other_mean) = run_ranks(2, body)
    assert torch.equal(mean, other_mean)
    torch.testing.assert_close(mean, (first + second) / 2)


def test_after_switching_gradients_are_averaged_as_if_wrapped_again():
    def trained(comm, *, switched):
        _, optimizer, ddp = wrapped(comm, DiLoCo(local_steps=1) if switched else ByteGrad())
        if switched:
            ddp.switch(ByteGrad())
        train(comm, ddp, optimizer, range(4))
        return final_weights(ddp)

    for actual, expected in run_ranks(2, lambda comm: [trained(comm, switched=s) for s in (True, False)]):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("in_buckets", [True, False])
def test_a_switch_to_fragments_packs_other_buckets_as_if_wrapped_again(in_buckets):
    """One bucket becomes four, and the weights and gradients are where PyTorch expects them."""
    streaming = StreamingDiLoCo(local_steps=3, fragments=4, delay=2)

    def trained(comm, *, switched):
        model = make_model()
        optimizer = sgd(model.parameters())
        first = GradientAllReduce() if switched else streaming
        ddp = DistributedDataParallel(model, optimizer, first, comm=comm, gradient_as_bucket_view=in_buckets)
        if switched:
            assert len(ddp.engine.buckets) == 1
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, number)
            ddp.switch(streaming)
            for number, parameter in enumerate(model.parameters()):
                assert (parameter.grad == number).all()
        assert len(ddp.engine.buckets) == 4
        train(comm, ddp, optimizer, range(7))
        ddp.average_weights()
        assert_same_on_all_ranks(comm, model)
        return final_weights(ddp)

    for actual, expected in run_ranks(2, lambda comm: [trained(comm, switched=s) for s in (True, False)]):
        assert torch.equal(actual, expected)


def test_a_restart_after_switching():
    def body(comm):
        training = Training(comm, GradientAllReduce())
        training.run(0, 3)
        training.ddp.switch(LowPrecisionDecentralized())
        training.run(3, 6)
        saved = training.saved()
        training.run(6, STEPS)
        expected = training.close()
        training = Training(comm, LowPrecisionDecentralized(), seed=1)
        training.load(saved)
        training.run(6, STEPS)
        for name, value in training.close().items():
            assert torch.equal(value, expected[name])

    run_ranks(2, body)


def test_qadam_switched_to_later_warms_up_as_adam_does():
    """Its warm-up begins with the switch: until it is over, and on one rank, it is Adam to the bit."""
    plain = make_model()
    adam = torch.optim.Adam(plain.parameters(), lr=0.01)
    for step in range(7):
        train_step(plain, adam, batch(0, step))

    def body(comm):
        model = make_model()
        optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=4)
        ddp = DistributedDataParallel(model, optimizer, GradientAllReduce(), comm=comm)
        for step in range(7):
            if step == 3:
                ddp.switch(QAdam(warmup_steps=4))
            train_step(ddp, optimizer, batch(0, step))
        return final_weights(ddp)

    assert torch.equal(run_ranks(1, body)[0], weights(plain))


def make_wide_model():
    return make_model().double()


@pytest.mark.parametrize(
    ("ranks", "make", "before", "algorithm", "error", "match"),
    [
        (3, make_model, GradientAllReduce(), Decentralized("shift_one"), ArrayError, "even number"),
        (2, make_wide_model, DiLoCo(local_steps=2), ByteGrad(), UnsupportedError, "float64"),
        (2, make_model, DiLoCo(local_steps=2), QAdam(warmup_steps=5), ArrayError, "the optimizer is SGD"),
        (2, make_model, GradientAllReduce(), "exact", ArrayError, "expected an algorithm"),
    ],
    ids=["odd ranks", "dtype", "optimizer", "no algorithm"],
)
def test_a_switch_that_is_refused_leaves_the_training_as_it_is(ranks, make, before, algorithm, error, match):
    def trained(refused):
        def body(comm):
            model, optimizer, ddp = wrapped(comm, before, model=make())
            for step in range(5):
                if refused and step == 3:
                    with pytest.raises(error, match=match):
                        ddp.switch(algorithm)
                    assert ddp.algorithm == before
                x = batch(comm.rank, step).to(next(model.parameters()).dtype)
                train_step(ddp, optimizer, x)
            return final_weights(ddp)

        return run_ranks(ranks, body, timeout_s=5)

    for actual, expected in zip(trained(refused=True), trained(refused=False), strict=True):
        torch.testing.assert_close(actual, expected)


def test_switching_in_the_middle_of_a_backward_pass_is_refused():
    def body(comm):
        model = make_model()
        ddp = DistributedDataParallel(model, sgd(model.parameters()), comm=comm)

        class Broken(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                raise ZeroDivisionError

        broken = model[2].register_forward_hook(
            lambda module, inputs, output: output + Broken.apply(inputs[0])[:1]
        )
        with pytest.raises(ZeroDivisionError):
            loss_of(ddp, batch(comm.rank, 0)).backward()
        broken.remove()
        with pytest.raises(CommError, match="the last backward pass did not end"):
            ddp.switch(DiLoCo())
        ddp.close()

    run_ranks(1, body)


# Averages for evaluation, and pauses ----------------------------------------------------------------------


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", [*WEIGHT_ALGORITHMS, *ASYNC_ALGORITHMS], ids=repr)
def test_averaged_weights_are_the_mean_of_all_ranks(algorithm):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)
        train(comm, ddp, optimizer, range(4))
        ddp.stop()
        before = weights(model)
        ddp.average_weights()
        assert_same_on_all_ranks(comm, model)
        averaged = weights(model)
        ddp.resume()
        train(comm, ddp, optimizer, range(4, 6))
        ddp.close()
        return before, averaged

    (first, averaged), (second, _) = run_ranks(2, body)
    torch.testing.assert_close(averaged, (first + second) / 2)


def test_nothing_is_exchanged_between_stop_and_resume():
    def body(comm):
        model = make_model()
        ddp = DistributedDataParallel(model, comm=comm)
        ddp.stop()
        ddp.stop()
        loss_of(ddp, batch(comm.rank, 0)).backward()
        assert ddp.engine.counter.calls == 0
        local = gradients(model).clone()
        ddp.resume()
        model.zero_grad()
        loss_of(ddp, batch(comm.rank, 0)).backward()
        ddp.close()
        return local, gradients(model)

    (first, mean), (second, _) = run_ranks(2, body)
    torch.testing.assert_close(mean, (first + second) / 2)


# Objects that are no checkpoints of ours ------------------------------------------------------------------

JUNK = [
    None,
    -1,
    "x",
    [],
    {},
    (),
    float("nan"),
    torch.zeros(1, dtype=torch.complex64),
    torch.zeros(3).to_sparse(),
    torch.zeros(2, device="meta"),
    torch.zeros(4, dtype=torch.float8_e5m2),
]


def replaced(value, path, by):
    """A copy of nested dicts with another value at `path`."""
    if not path:
        return by
    return {**value, path[0]: replaced(value[path[0]], path[1:], by)}


def paths_of(value, path=()):
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths_of(inner, (*path, key))


def test_a_damaged_extra_state_is_refused_alike_on_all_ranks_and_training_continues():
    def body(comm):
        model, optimizer, ddp = wrapped(comm, LowPrecisionOnePeer())
        train(comm, ddp, optimizer, range(2))
        saved = ddp.state_dict()
        before, step = weights(model), ddp.engine.step
        messages = []
        for number, path in enumerate(paths_of(saved["_extra_state"])):
            for junk in JUNK if len(path) < 2 else JUNK[number % 4 :: 4]:
                mine = comm.rank == number % 2  # the other rank's state is whole
                damaged = replaced(saved["_extra_state"], path, junk) if mine else saved["_extra_state"]
                with pytest.raises(ArrayError, match="load_state_dict: ") as caught:
                    ddp.load_state_dict({**saved, "_extra_state": damaged})
                messages.append(str(caught.value))
                assert torch.equal(weights(model), before)
                assert ddp.engine.step == step
        ddp.load_state_dict(saved)
        train(comm, ddp, optimizer, range(2, 4))
        ddp.close()
        return messages

    first, second = run_ranks(2, body, timeout_s=20)
    assert first == second


def test_another_ranks_checkpoint_is_refused_where_replicas_are_in_it():
    def save(comm):
        _, optimizer, ddp = wrapped(comm, LowPrecisionDecentralized())
        train(comm, ddp, optimizer, range(2))
        saved = through_a_file(ddp.state_dict())
        ddp.close()
        return saved

    saved = run_ranks(4, save)

    def load(comm):
        model, _, ddp = wrapped(comm, LowPrecisionDecentralized())
        before = weights(model)
        with pytest.raises(ArrayError, match="saved by rank 0 of 4, expected rank 0 of 2"):
            ddp.load_state_dict(saved[comm.rank])
        assert torch.equal(weights(model), before)
        ddp.close()

    run_ranks(2, load)
