"""Muon of parameters; the cases that ranks run are in support/muon_training.py."""

import copy
import pickle
import re

import pytest
import torch
from support.launch import TESTS, run_python, torchrun
from torch import nn

import bagua_torch
from bagua_comm import ArrayError, Int4
from bagua_comm.testing import run_ranks

PROGRAM = TESTS / "support" / "muon_training.py"
CASES = re.findall(r"^def (\w+)\(comm\):", PROGRAM.read_text(), re.MULTILINE)


def assert_all_ran(result, names):
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("ok ")] == names


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_cases_under_mpirun(ranks):
    assert_all_ran(run_python(ranks, PROGRAM, *CASES, timeout_s=380), CASES)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_cases_under_torchrun():
    assert_all_ran(torchrun(3, PROGRAM, *CASES, timeout_s=180), CASES)


def trained(optimizer_of, model, steps=3):
    optimizer = optimizer_of(model)
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        assert optimizer.step(lambda x=x: backward(model(x).square().mean())) > 0
    return [p.detach() for p in model.parameters()]


def backward(loss):
    loss.backward()
    return loss.item()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))


def muon_of(model, **settings):
    return bagua_torch.Muon(model.named_parameters(), adam=lambda _, p: None if p.ndim == 2 else {}, **settings)


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
def test_it_is_muon_and_adamw_of_torch(adjust_lr_fn):
    """Matrices up to torch's rounding to bfloat16 in each product, the rest to the bit."""
    model, reference = network(), network()
    ours = muon_of(model, lr=0.01, adjust_lr_fn=adjust_lr_fn)
    matrices = [p for p in reference.parameters() if p.ndim == 2]
    others = [p for p in reference.parameters() if p.ndim == 1]
    muon = torch.optim.Muon(matrices, lr=0.01, adjust_lr_fn=adjust_lr_fn)
    adamw = torch.optim.AdamW(others, lr=0.01, weight_decay=0.1)
    for step in range(4):
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            q.grad = p.grad.clone()
        for optimizer in (ours, muon, adamw):
            optimizer.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        if p.ndim == 1:
            assert torch.equal(p, q)
        else:
            torch.testing.assert_close(p, q, rtol=0, atol=4 * 0.01 * 0.03)


def test_a_state_goes_on_in_a_copy_and_settings_follow_a_schedule():
    model = network()
    optimizer = muon_of(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    trained(lambda _: optimizer, model)
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.0005, 0.0005]
    others = [copy.deepcopy(model) for _ in range(2)]
    loaded = muon_of(others[0])
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    moved, unpickled = pickle.loads(pickle.dumps((others[1], optimizer)))
    for group, own in zip(unpickled.param_groups, loaded.param_groups, strict=True):
        assert group["lr"] == own["lr"]
    expected = trained(lambda _: optimizer, model)
    assert all(map(torch.equal, trained(lambda _: loaded, others[0]), expected))
    assert not all(map(torch.equal, [p.detach() for p in moved.parameters()], expected))


def test_empty_matrices_are_left_as_they_are():
    for shape in (0, 5), (5, 0):
        optimizer = bagua_torch.Muon([empty := nn.Parameter(torch.empty(shape))])
        empty.grad = torch.empty(shape)
        optimizer.step()


def test_a_parameter_that_is_no_matrix_needs_the_rule():
    model = network()
    text = r"0.bias is \(9,\) of torch.float32, expected a matrix of floats; let the rule `adam` return settings"
    with pytest.raises(ArrayError, match=text):
        bagua_torch.Muon(model.named_parameters())
    with pytest.raises(ArrayError, match=r"with adam, params are Parameter, expected model.named_parameters"):
        bagua_torch.Muon(model.parameters(), adam=lambda name, p: {})
    with pytest.raises(ArrayError, match=r"algorithm='sgd' and the unknown settings \['rate'\]"):
        bagua_torch.Muon([{"params": [model[0].weight], "algorithm": "sgd", "rate": 1}])
    with pytest.raises(ArrayError, match="lr is -1, expected a number of at least 0"):
        bagua_torch.Muon([model[0].weight], lr=-1)
    with pytest.raises(ArrayError, match="betas is"):
        bagua_torch.Muon(model.named_parameters(), adam=lambda name, p: {"betas": (2.0, 0.9)})
    with pytest.raises(ArrayError, match="maximize=True, expected False"):
        bagua_torch.Muon([{"params": [model[0].weight], "maximize": True}])
    optimizer = bagua_torch.Muon([model[0].weight])
    with pytest.raises(ArrayError, match=r"a group has no algorithm, .*load the state of one"):
        optimizer.load_state_dict(torch.optim.Muon([model[0].weight]).state_dict())
    assert optimizer.param_groups[0]["algorithm"] == "muon", "nothing is loaded"
    with pytest.raises(ArrayError, match="expected a matrix"):
        optimizer.add_param_group({"params": [model[0].bias]})
    assert len(optimizer.param_groups) == 1, "the group is not added"


def test_one_rank_steps_as_without_distribute():
    def body(comm):
        def distributed(model):
            optimizer = muon_of(model)
            optimizer.distribute(comm)
            return optimizer

        return trained(distributed, network())

    (found,) = run_ranks(1, body)
    assert all(map(torch.equal, found, trained(muon_of, network())))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_loaded_state_begins_without_the_errors_of_a_codec(dtype):
    initial = network()

    def body(comm):
        def distributed(model):
            optimizer = muon_of(model, dtype=dtype)
            optimizer.distribute(comm, codec=Int4())
            return optimizer

        def load(model, optimizer):
            model.load_state_dict(weights)
            optimizer.load_state_dict(copy.deepcopy(state))
            return [p.clone() for p in trained(lambda _: optimizer, model)]

        model, other = copy.deepcopy((initial, initial))
        optimizer = distributed(model)
        trained(lambda _: optimizer, model)
        weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        with_errors = [p.clone() for p in trained(lambda _: optimizer, model)]
        fresh = distributed(other)
        expected = load(other, fresh)
        assert all(map(torch.equal, load(model, optimizer), expected))
        assert not all(map(torch.equal, with_errors, expected))
        optimizer.close()
        fresh.close()

    run_ranks(2, body)
