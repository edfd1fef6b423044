"""Flat optimizers: against torch.optim."""

import numpy as np
import pytest
import torch

from bagua_comm import ArrayError, optim
from bagua_comm.arrays import dtype_named
from bagua_comm.testing import sample

COUNT = 50
STEPS = 12
DTYPES = [("float32", 1e-5), ("float64", 1e-12)]


def gradient(x, step):
    return (0.3 * x + sample(0, (COUNT,), "float64", seed=1 + step)).astype(x.dtype)


def trajectory(optimizer, dtype, update=None):
    """The weights after every step; `update(weight, grad, state)` is the optimizer's step."""
    x = sample(0, (COUNT,), dtype)
    state, kept = optimizer.init(x), []
    for step in range(STEPS):
        g = gradient(x, step)
        before = g.copy()
        (update or optimizer.step)(x, g, state)
        assert g.tobytes() == before.tobytes(), "the gradient is the caller's"
        kept.append(x.copy())
    return kept


def torch_trajectory(kind, dtype, **settings):
    x = torch.tensor(sample(0, (COUNT,), dtype))
    optimizer, kept = kind([x], **settings), []
    for step in range(STEPS):
        x.grad = torch.tensor(gradient(x.numpy(), step))
        optimizer.step()
        kept.append(x.numpy().copy())
    return kept


@pytest.mark.parametrize(("dtype", "atol"), DTYPES)
@pytest.mark.parametrize("weight_decay", [0, 0.1])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0, False), (0.9, False), (0.9, True)])
def test_sgd_is_that_of_torch(momentum, nesterov, weight_decay, dtype, atol):
    settings = {"lr": 0.1, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}

    actual = trajectory(optim.SGD(**settings), dtype)

    np.testing.assert_allclose(actual, torch_trajectory(torch.optim.SGD, dtype, **settings), rtol=0, atol=atol)


@pytest.mark.parametrize(("dtype", "atol"), DTYPES)
@pytest.mark.parametrize("weight_decay", [0, 0.1])
@pytest.mark.parametrize(("betas", "eps"), [((0.9, 0.999), 1e-8), ((0.5, 0.7), 0.1), ((0.0, 0.9), 1e-8)])
def test_adam_is_that_of_torch(betas, eps, weight_decay, dtype, atol):
    settings = {"lr": 0.01, "betas": betas, "eps": eps, "weight_decay": weight_decay}

    actual = trajectory(optim.Adam(**settings), dtype)

    np.testing.assert_allclose(actual, torch_trajectory(torch.optim.Adam, dtype, **settings), rtol=0, atol=atol)


@pytest.mark.parametrize(("dtype", "atol"), DTYPES)
@pytest.mark.parametrize("weight_decay", [0, 0.1])
def test_qadam_is_adam_in_the_warm_up(weight_decay, dtype, atol):
    settings = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": weight_decay}
    qadam, momentum = optim.QAdam(warmup_steps=STEPS, **settings), np.zeros(COUNT, dtype)

    actual = trajectory(qadam, dtype, lambda x, g, state: qadam.step(x, g, state, momentum))

    np.testing.assert_allclose(actual, torch_trajectory(torch.optim.Adam, dtype, **settings), rtol=0, atol=atol)


@pytest.mark.parametrize("weight_decay", [0, 0.1])
@pytest.mark.parametrize("warmup_steps", [1, 4])
def test_qadam_then_freezes_the_variance_and_takes_the_momentum_as_it_is(warmup_steps, weight_decay):
    lr, b1, b2, eps = 0.01, 0.8, 0.9, 1e-8
    qadam = optim.QAdam(lr, warmup_steps, (b1, b2), eps, weight_decay)
    x = sample(0, (COUNT,), "float64")
    state, momentum = qadam.init(x), np.zeros(COUNT)
    for step in range(warmup_steps):
        qadam.step(x, gradient(x, step), state, momentum)
    variance, expected = state.variance.copy(), x.copy()
    deviation = np.sqrt(variance / (1 - b2**warmup_steps))

    for t in range(warmup_steps + 1, STEPS):
        averaged = sample(1, (COUNT,), "float64", seed=t)
        momentum[...] = averaged
        m = averaged + (1 - b1) * weight_decay * expected
        expected -= lr / (1 - b1**t) * m / (deviation + eps)

        qadam.step(x, np.full(COUNT, np.nan), state, momentum)  # the gradient went into the momentum

        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(momentum, m, rtol=0, atol=1e-12)
    assert state.variance.tobytes() == variance.tobytes()
    assert state.step == STEPS - 1


@pytest.mark.parametrize(("dtype", "atol"), [("float16", 2e-2), ("bfloat16", 1e-1)])
@pytest.mark.parametrize("optimizer", [optim.SGD(0.1, 0.9, 0.1, nesterov=True), optim.Adam(0.01)], ids=repr)
def test_other_precisions(optimizer, dtype, atol):
    narrow = np.array(trajectory(optimizer, dtype)).astype("f8")

    np.testing.assert_allclose(narrow, trajectory(optimizer, "float64"), rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("optimizer", [optim.SGD(0.1, 0.9), optim.Adam(), optim.QAdam(warmup_steps=1)], ids=repr)
def test_without_gradients_weights_stay_as_they_are(optimizer, dtype):
    x = sample(0, (COUNT,), dtype)
    before, state = x.copy(), optimizer.init(x)
    zeros = np.zeros(COUNT, dtype_named(dtype))
    more = [zeros.copy()] if isinstance(optimizer, optim.QAdam) else []

    for _ in range(3):
        optimizer.step(x, zeros, state, *more)

    assert x.tobytes() == before.tobytes()


def test_settings_are_plain_data():
    for optimizer in (optim.SGD(0.1, nesterov=True, momentum=0.9), optim.Adam(), optim.QAdam(0.01, 7)):
        assert eval(repr(optimizer), vars(optim)) == optimizer
        assert hash(optimizer) == hash(eval(repr(optimizer), vars(optim)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.SGD(lr="0.1"), r"SGD: lr is '0\.1', expected a number of at least 0$"),
        (lambda: optim.SGD(lr=0.1, momentum=1.0), r"SGD: momentum is 1\.0, expected .* below 1"),
        (lambda: optim.SGD(lr=0.1, nesterov=True), "nesterov is true, which needs a momentum above 0"),
        (lambda: optim.Adam(betas=(0.9,)), r"Adam: betas is \(0\.9,\), expected two numbers"),
        (lambda: optim.QAdam(warmup_steps=0), "QAdam: warmup_steps is 0, expected an integer of at least 1"),
    ],
)
def test_a_setting_out_of_range_is_named(make, message):
    with pytest.raises(ArrayError, match=message):
        make()


def test_a_state_is_loaded_in_place_and_refuses_another_optimizers():
    weight = np.ones(3)
    saved, loaded = optim.Adam().init(weight), optim.Adam().init(weight)
    optim.Adam().step(weight, np.ones(3), saved)
    momentum = loaded.momentum
    loaded.load_state_dict(saved.state_dict())
    assert loaded.momentum is momentum
    assert loaded.step == 1
    np.testing.assert_array_equal(momentum, saved.momentum)
    with pytest.raises(ArrayError, match="has buffer, expected momentum, step, variance"):
        loaded.load_state_dict(optim.SGD(lr=1).init(weight).state_dict())
    with pytest.raises(ArrayError, match=r"momentum has shape \(3,\), but \(2,\) was saved"):
        loaded.load_state_dict(optim.Adam().init(np.ones(2)).state_dict())
