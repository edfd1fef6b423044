"""A mixture of experts on threads, against a plain loop over tokens and against the model of one process."""

import copy
import pickle

import pytest
import torch
from support.launch import run_python
from support.torch_training import through_a_file
from torch import nn

from bagua_comm import ArrayError, ByteGrad, CommMismatch, MinMaxUInt8, UnsupportedError
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel, as_array, moe
from bagua_torch.moe import MoE, global_state_dict, load_global_state_dict

HIDDEN = 6


def make_expert(width=HIDDEN):
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, width))


class Model(nn.Module):
    """Experts between dense layers, whose weights do not come from PyTorch's generator: threads share that."""

    def __init__(self, comm, experts=5, k=2, dtype=torch.float32, **settings):
        super().__init__()
        self.stem = nn.utils.skip_init(nn.Linear, HIDDEN, HIDDEN)
        self.moe = MoE(HIDDEN, make_expert, experts, k, comm=comm, **{"seed": 3, **settings})
        self.head = nn.utils.skip_init(nn.Linear, HIDDEN, 2)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in [*self.stem.parameters(), *self.head.parameters()]:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        self.to(dtype)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        return self.head(x + self.moe(x))


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def share(batch, comm, sizes=None):
    return batch.split(sizes or [len(batch) // comm.size] * comm.size)[comm.rank]


def train(comm, *, steps=3, sizes=None, algorithm=None, dtype=torch.float32, batch=24, **settings):
    """Train on shares of the same batches; returns the outputs and the loads of all steps, and the state."""
    model = Model(comm, dtype=dtype, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ddp = DistributedDataParallel(model, optimizer, algorithm, comm=comm)
    outputs, loads = [], []
    for step in range(steps):
        x = share(draw(batch, HIDDEN, seed=step, dtype=dtype), comm, sizes)
        y = ddp(x)
        loss = y.square().sum() * comm.size / batch  # the mean over ranks is the mean over the batch
        if model.moe.balance == "loss":
            loss = loss + 0.1 * model.moe.balance_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outputs.append(y.detach())
        loads.append(model.moe.load.tolist())
    for name, parameter in model.named_parameters():
        if "experts" not in name:
            comm.check_consistency(as_array(parameter))
    state = global_state_dict(model)
    ddp.close()
    return outputs, loads, state


def assert_equal_to_one_process(p, *, tolerance=1e-12, sizes=None, dtype=torch.float64, **settings):
    (outputs, loads, state), *_ = run_ranks(1, lambda comm: train(comm, dtype=dtype, **settings))
    found = run_ranks(p, lambda comm: train(comm, dtype=dtype, sizes=sizes, **settings))
    for step, expected in enumerate(outputs):
        mine = torch.cat([rank[0][step] for rank in found])
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)
    for _, theirs, its_state in found:
        assert theirs == loads
        assert its_state.keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(its_state[name], value, rtol=tolerance, atol=tolerance, msg=name)
    return loads


# The layer itself ----------------------------------------------------------------------------------------


def by_hand(layer, x, bias=0):
    """The formula of the layer, token by token."""
    rows = []
    for token in x.reshape(-1, HIDDEN):
        scores = (layer.gate.weight @ token).softmax(0)
        chosen = (scores + bias).argsort(descending=True)[: layer.k].tolist()
        weights = [scores[e] for e in chosen]
        total = sum(weights) if layer.normalize else 1
        rows.append(sum(w / total * layer.experts[str(e)](token) for w, e in zip(weights, chosen, strict=True)))
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize(("k", "normalize"), [(1, False), (2, False), (3, True), (5, True)])
def test_the_layer_is_its_formula(k, normalize):
    def body(comm):
        layer = MoE(HIDDEN, make_expert, 5, k, comm=comm, normalize=normalize, seed=0).double().eval()
        x = draw(2, 7, HIDDEN, dtype=torch.float64).requires_grad_()
        mine, expected = layer(x), by_hand(layer, x)
        torch.testing.assert_close(mine, expected)
        inputs = [x, *layer.parameters()]
        gradients = [
            torch.autograd.grad(y.square().sum(), inputs, allow_unused=True, materialize_grads=True)
            for y in (mine, expected)
        ]
        torch.testing.assert_close(*gradients)
        assert int(layer.load.sum()) == 14 * k

    run_ranks(1, body)


def test_gradients_of_the_layer_are_finite_differences():
    def body(comm):
        layer = MoE(HIDDEN, make_expert, 2, 1, comm=comm, balance="loss", seed=0).double()
        return torch.autograd.gradcheck(
            lambda x, gate: torch.func.functional_call(layer, {"gate.weight": gate}, x),
            (draw(2, HIDDEN, dtype=torch.float64).requires_grad_(), layer.gate.weight),
        )

    assert run_ranks(1, body) == [True]


# Many ranks and one process ------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("balance", ["bias", "loss"])
def test_training_equals_that_of_one_process(p, balance):
    loads = assert_equal_to_one_process(p, balance=balance, gamma=0.05)
    assert all(sum(load) == 48 for load in loads)


@pytest.mark.parametrize("k", [1, 4, 5])
def test_it_does_for_any_number_of_experts_per_token(k):
    assert_equal_to_one_process(2, k=k)


@pytest.mark.parametrize(("p", "experts"), [(4, 1), (4, 3), (3, 7)])
def test_it_does_for_fewer_experts_than_ranks_and_uneven_numbers(p, experts):
    assert_equal_to_one_process(p, experts=experts, k=1)


@pytest.mark.parametrize(
    ("sizes", "balance", "experts"), [([0, 24], "loss", 5), ([23, 1], "bias", 2), ([7, 0, 17], "bias", 4)]
)
def test_it_does_for_uneven_and_empty_batches(sizes, balance, experts):
    assert_equal_to_one_process(len(sizes), sizes=sizes, balance=balance, experts=experts)


def test_without_any_token_nothing_changes():
    def body(comm):
        layer = MoE(HIDDEN, make_expert, 4, comm=comm, balance="loss", seed=0)
        y = layer(torch.zeros(0, 3, HIDDEN, requires_grad=True))
        (y.sum() + layer.balance_loss).backward()
        assert (y.shape, layer.balance_loss.item()) == ((0, 3, HIDDEN), 0)
        assert all((p.grad == 0).all() for p in layer.parameters())

    run_ranks(2, body)


def test_outputs_and_gradients_of_experts_are_equal_bit_for_bit_where_scores_are():
    """Quarters make scores exact. Experts then see the same rows in the same order, and so do their gradients.

    Rows take 32 bytes: some processors round a product differently where a row is not aligned to 16 bytes.
    """
    width = 8

    def body(comm):
        layer = MoE(width, lambda: make_expert(width), 4, comm=comm, seed=0)
        with torch.no_grad():
            layer.gate.weight.copy_((draw(4, width) * 8).round() / 4)
        y = layer(share((draw(16, width) * 4).round() / 4, comm))
        (y * share(draw(16, width, seed=1), comm)).sum().backward()
        return y, {name: p.grad * comm.size for name, p in layer.experts.named_parameters()}

    whole, gradients = run_ranks(1, body)[0]
    for p in (2, 4):
        found = run_ranks(p, body)
        assert torch.cat([y for y, _ in found]).equal(whole)
        for _, mine in found:
            assert all(gradient.equal(gradients[name]) for name, gradient in mine.items())


def test_an_algorithm_that_quantizes_gradients_leaves_experts_alone():
    def body(comm):
        model = Model(comm)
        ddp = DistributedDataParallel(model, algorithm=ByteGrad(), comm=comm)
        ddp(share(draw(8, HIDDEN), comm)).sum().backward()
        names = [spec.name for bucket in ddp.engine.plan.buckets for spec in bucket.tensors]
        ddp.close()
        return names

    for names in run_ranks(2, body):
        assert sorted(names) == ["head.bias", "head.weight", "moe.gate.weight", "stem.bias", "stem.weight"]


def test_frozen_experts_and_inputs_without_gradient():
    """The MoE comes first, so tokens need no gradient. Rank 0 has no expert, that of rank 1 is frozen."""

    def body(comm):
        layer = MoE(HIDDEN, make_expert, 2, comm=comm, seed=0)
        if comm.rank == 1:
            next(iter(layer.experts.values())).requires_grad_(False)
        layer(share(draw(9, HIDDEN), comm)).sum().backward()
        return {name: p.grad is not None for name, p in layer.named_parameters()}

    gate, frozen, trained = run_ranks(3, body)
    assert gate == {"gate.weight": True}
    assert [name for name, got in frozen.items() if got] == ["gate.weight"]
    assert all(trained.values())
    assert len(trained) == 5


def test_the_divisor_survives_conversion_and_freezing():
    def body(comm):
        layer = MoE(HIDDEN, lambda: nn.Linear(HIDDEN, HIDDEN).requires_grad_(False), 2, 2, comm=comm, seed=0)
        layer.double().requires_grad_()
        layer(torch.ones(1, HIDDEN, dtype=torch.float64)).sum().backward()
        return layer.experts[str(comm.rank)].bias.grad.sum()

    one, other = run_ranks(2, body)
    # Both ranks send the same token; its two weights add up to 1, and each output has 6 elements.
    torch.testing.assert_close(one + other, torch.tensor(6.0, dtype=torch.float64))


# Balance -------------------------------------------------------------------------------------------------


def test_the_bias_follows_the_load_of_all_ranks():
    def body(comm):
        layer = MoE(HIDDEN, make_expert, 4, 1, comm=comm, gamma=0.01, seed=0)
        expected, history = torch.zeros(4, dtype=torch.float64), []
        for _ in range(10):
            x = share(draw(64, HIDDEN) + 1, comm)
            chosen = ((x @ layer.gate.weight.t()).softmax(-1) + expected.float()).argmax(-1)
            mine = torch.bincount(chosen, minlength=4)
            layer(x)
            load = torch.as_tensor(comm.allreduce(mine.numpy()))
            assert layer.load.equal(load)
            expected += 0.01 * torch.sign(load.double().mean() - load)
            torch.testing.assert_close(layer.bias.double(), expected)
            history.append(load.max().item())
        before = layer.bias
        layer.eval()
        layer(x)
        assert layer.bias.equal(before)
        comm.check_consistency(as_array(layer.bias_steps))
        return history

    for history in run_ranks(2, body):
        assert max(history[-5:]) < history[0]


def test_the_bias_is_exact_in_any_precision():
    def body(comm):
        layer = MoE(HIDDEN, make_expert, 4, 1, comm=comm, gamma=0.001, seed=0).bfloat16()
        layer.bias_steps += 1000
        layer(torch.ones(1, HIDDEN, dtype=torch.bfloat16))
        return sorted(set(layer.bias_steps.tolist()))

    assert run_ranks(1, body) == [[999, 1001]]


def test_the_mean_of_balance_losses_is_that_of_the_whole_batch():
    def body(comm):
        layer = MoE(HIDDEN, make_expert, 4, comm=comm, balance="loss", seed=0)
        x = draw(12, HIDDEN)
        layer(share(x, comm, sizes=[5, 7]))
        scores = (x @ layer.gate.weight.t()).softmax(-1)
        f = layer.load / layer.load.sum()
        return layer.balance_loss.item(), 4 * (f * scores.mean(0)).sum().item()

    (mine, expected), (theirs, _) = run_ranks(2, body)
    assert (mine + theirs) / 2 == pytest.approx(expected, rel=1e-6)
    assert mine != theirs


# Kinds of use --------------------------------------------------------------------------------------------


def test_training_in_float16_is_refused_since_each_rank_would_skip_other_steps():
    def body(comm):
        layer = MoE(HIDDEN, make_expert, 4, 1, comm=comm, seed=0)
        with torch.autocast("cpu", torch.float16):
            with pytest.raises(UnsupportedError, match="train in bfloat16 or float32"):
                layer(torch.ones(1, HIDDEN))
            with torch.no_grad():
                layer(torch.ones(1, HIDDEN))
            return layer.eval()(torch.ones(1, HIDDEN)).dtype

    assert run_ranks(2, body) == [torch.float16] * 2


def test_autocast_sends_half_the_bytes():
    def body(comm):
        model = Model(comm, experts=4)
        x = share(draw(9, HIDDEN), comm)
        sizes = []
        for enabled in (False, True):
            before = comm.counters.by_operation["alltoall"].payload_bytes
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                y = model(x)
            sizes.append(comm.counters.by_operation["alltoall"].payload_bytes - before)
            y.float().sum().backward()
        torch.testing.assert_close(y.float(), model(x), rtol=0.05, atol=0.05)
        return y.dtype, sizes[0] / sizes[1], model.moe.gate.weight.grad.dtype

    assert run_ranks(3, body)[0] == (torch.bfloat16, 2, torch.float32)


def test_encoded_tokens_do_not_depend_on_the_number_of_ranks():
    codec = MinMaxUInt8(block=None)
    exact = run_ranks(1, lambda comm: train(comm, steps=1))[0][0][0]
    coded = run_ranks(1, lambda comm: train(comm, steps=1, codec=codec))[0][0][0]
    assert 0 < (coded - exact).abs().max() < 0.05
    assert_equal_to_one_process(2, codec=codec, dtype=torch.float32, tolerance=1e-5)


def test_evaluation_without_gradients():
    def body(comm):
        model = Model(comm).eval()
        with torch.no_grad():
            return model(share(draw(8, HIDDEN), comm))

    expected = run_ranks(1, body)[0]
    torch.testing.assert_close(torch.cat(run_ranks(4, body)), expected)


def test_experts_are_drawn_apart_whatever_the_number_of_ranks():
    def body(comm, **settings):
        return global_state_dict(MoE(HIDDEN, make_expert, 4, comm=comm, **settings))

    one = run_ranks(1, lambda comm: body(comm, seed=1))[0]
    assert not one["experts.0.0.weight"].equal(one["experts.1.0.weight"])
    for state in run_ranks(3, lambda comm: body(comm, seed=1)):
        assert state.keys() == one.keys()
        assert all(state[name].equal(one[name]) for name in one)
    assert not run_ranks(1, lambda comm: body(comm, seed=2))[0]["gate.weight"].equal(one["gate.weight"])


def test_without_a_seed_it_is_that_of_pytorch_and_later_numbers_continue():
    def drawn():
        torch.manual_seed(5)
        return run_ranks(1, lambda comm: MoE(HIDDEN, make_expert, 2, comm=comm).state_dict())[0], torch.rand(())

    (one, after), (other, after_other) = drawn(), drawn()
    assert all(one[name].equal(other[name]) for name in one)
    assert after == after_other
    first, second = run_ranks(1, lambda comm: [MoE(HIDDEN, make_expert, 2, comm=comm) for _ in range(2)])[0]
    assert not first.gate.weight.equal(second.gate.weight)


@pytest.mark.parametrize("p", [1, 3])
def test_state_moves_to_another_number_of_ranks(p):
    _, _, state = run_ranks(2, lambda comm: train(comm))[0]
    x = draw(12, HIDDEN)

    def body(comm):
        model = Model(comm, seed=9).eval()
        load_global_state_dict(model, state)
        return model(share(x, comm)), global_state_dict(model)

    def reference(comm):
        model = Model(comm, seed=8).eval()
        model.load_state_dict(state)
        return model(x)

    found = run_ranks(p, body)
    torch.testing.assert_close(torch.cat([y for y, _ in found]), run_ranks(1, reference)[0])
    for _, saved in found:
        assert saved.keys() == state.keys()
        assert all(saved[name].equal(state[name]) for name in state)


def trained_on(comm, steps, model, optimizer):
    ddp = DistributedDataParallel(model, optimizer, comm=comm)
    for step in steps:
        loss = ddp(share(draw(12, HIDDEN, seed=step, dtype=torch.float64), comm)).square().sum() * comm.size / 12
        optimizer.zero_grad()
        loss.backward()
        moe.clip_grad_norm_(model, 0.3)
        optimizer.step()
    ddp.close()
    return global_state_dict(model), moe.global_optimizer_state(model, optimizer)


def test_a_training_continues_with_another_number_of_ranks():
    def start(comm):
        model = Model(comm, dtype=torch.float64, gamma=0.01)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def go_on(comm, state, optimizer_state):
        model, optimizer = start(comm)
        load_global_state_dict(model, state)
        moe.load_global_optimizer_state(model, optimizer, optimizer_state)
        return trained_on(comm, range(2, 5), model, optimizer)[0]

    whole = run_ranks(1, lambda comm: trained_on(comm, range(5), *start(comm)))[0][0]
    states = through_a_file(run_ranks(2, lambda comm: trained_on(comm, range(2), *start(comm)))[0])
    for p in (1, 3):
        for found in run_ranks(p, lambda comm: go_on(comm, *states)):
            for name, value in whole.items():
                torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def with_torch(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def test_gradients_are_clipped_by_the_norm_of_the_whole_model():
    def body(comm, clip):
        model = Model(comm, dtype=torch.float64, balance="loss")
        ddp = DistributedDataParallel(model, comm=comm)
        (ddp(share(draw(12, HIDDEN, dtype=torch.float64), comm)).sum() * comm.size).backward()
        norm = clip(model)
        ddp.close()
        return norm.item(), {name: p.grad for name, p in model.named_parameters()}

    expected, gradients = run_ranks(1, lambda comm: body(comm, with_torch))[0]
    assert expected > 0.5
    for p in (1, 2, 3):
        for norm, mine in run_ranks(p, lambda comm: body(comm, lambda model: moe.clip_grad_norm_(model, 0.5))):
            assert norm == pytest.approx(expected)
            for name, gradient in mine.items():
                torch.testing.assert_close(gradient, gradients[name])


SAME = nn.Linear(HIDDEN, HIDDEN)

# Mistakes of users ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden": 0}, "hidden is 0, expected an integer from 1"),
        ({"experts": 2.0}, "experts is 2.0, expected an integer"),
        ({"k": 5}, "k is 5, expected an integer from 1 to 4"),
        ({"k": 0}, "k is 0"),
        ({"make_expert": 3}, "make_expert is 3, expected a function"),
        ({"make_expert": lambda: 3}, "make_expert returned a int, expected a module"),
        ({"make_expert": lambda: SAME}, "expected new ones in each call"),
        ({"balance": "both"}, 'balance is \'both\', expected "bias" or "loss"'),
        ({"gamma": -1}, "gamma is -1, expected a number of at least 0"),
        ({"normalize": True, "k": 1}, "normalize is True, but k is 1"),
        ({"seed": "a"}, "seed is 'a', expected an integer or None"),
        ({"codec": "int8"}, "codec is 'int8', expected a Codec"),
    ],
)
def test_wrong_arguments_are_refused(settings, message):
    given = {"hidden": HIDDEN, "make_expert": make_expert, "experts": 4, **settings}
    with pytest.raises(ArrayError, match=message):
        run_ranks(1, lambda comm: MoE(comm=comm, **given))


def in_another_order(comm):
    layers = [MoE(HIDDEN, make_expert, 2, comm=comm) for _ in range(2)]
    layers[comm.rank](torch.ones(2, HIDDEN))


def of_another_dtype(comm):
    layer = MoE(HIDDEN, make_expert, 2, comm=comm, seed=0)
    with torch.autocast("cpu", torch.bfloat16, enabled=comm.rank == 0):
        layer(torch.ones(2, HIDDEN))


def over_some_of_the_ranks(comm):
    DistributedDataParallel(Model(comm.split(comm.rank // 2), experts=2), comm=comm)


@pytest.mark.parametrize(
    ("ranks", "body", "error", "words"),
    [
        (2, lambda comm: MoE(HIDDEN, make_expert, 4, k=1 + comm.rank, comm=comm), CommMismatch, "k is 1 .* 2 on"),
        (2, in_another_order, CommMismatch, "rank 0 calls layer 1 .*, but rank 1 layer 2"),
        (2, of_another_dtype, CommMismatch, "torch.bfloat16.*torch.float32|torch.float32.*torch.bfloat16"),
        (4, over_some_of_the_ranks, UnsupportedError, r"'moe\.experts' is spread over 2 ranks, expected all 4"),
    ],
)
def test_ranks_that_differ_raise_on_all(ranks, body, error, words):
    def refused(comm):
        with pytest.raises(error, match=words):
            body(comm)

    run_ranks(ranks, refused)


# Mistakes of users ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "message", "expert"),
    [
        (torch.ones(2, HIDDEN + 1), r"x is torch.float32\[2, 7\], expected .* \(..., 6\)", make_expert),
        (torch.ones(2, HIDDEN, dtype=torch.int64), "x is torch.int64", make_expert),
        ([1.0], "x is a list", make_expert),
        (torch.ones(2, HIDDEN), r"returned \[\d+, 2\], expected \[\d+, 6\]", lambda: nn.Linear(HIDDEN, 2)),
    ],
)
def test_inputs_and_outputs_that_are_no_tokens_are_refused(x, message, expert):
    with pytest.raises(ArrayError, match=message):
        run_ranks(1, lambda comm: MoE(HIDDEN, expert, 2, comm=comm)(x))


def test_it_is_not_copied_with_its_communicator():
    layer = run_ranks(1, lambda comm: MoE(HIDDEN, make_expert, 2, comm=comm))[0]
    for refused in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="it holds a communicator"):
            refused(layer)


def test_a_state_of_fewer_experts_is_refused():
    state = run_ranks(1, lambda comm: global_state_dict(MoE(HIDDEN, make_expert, 2, k=1, comm=comm)))[0]
    with pytest.raises(RuntimeError, match=r"Missing key.*experts\.2"):
        run_ranks(1, lambda comm: load_global_state_dict(MoE(HIDDEN, make_expert, 3, comm=comm), state))
    with pytest.raises(ArrayError, match="there is no MoE in this Linear"):
        global_state_dict(nn.Linear(2, 2))


# Over MPI ------------------------------------------------------------------------------------------------

SCRIPT = """
    import torch

    import bagua_torch
    from bagua_comm import CommMismatch
    from bagua_torch import functional
    from bagua_torch.moe import MoE

    with bagua_torch.connect(timeout_s=60) as comm:
        torch.set_num_threads(1)
        layer = MoE(6, lambda: torch.nn.Linear(6, 6), 5, 2, comm=comm, seed=0).double()
        x = torch.arange(72.0, dtype=torch.float64).view(12, 6).sin()
        y = layer(x.chunk(comm.size)[comm.rank])
        (y.square().sum() * comm.size).backward()
        gradients = {name: p.grad for name, p in layer.experts.named_parameters()}
        gate = functional.allreduce(comm, layer.gate.weight.grad, op="avg")
        every = {name: grad for part in comm.allgather_object(gradients) for name, grad in part.items()}
        if comm.rank == 0:
            torch.save((gate, every), "PATH")

        w = torch.ones(2, requires_grad=True)
        ys = [functional.allreduce(comm, w), functional.allreduce(comm, w)]
        try:
            ys[comm.rank % 2].sum().backward()
        except CommMismatch as exc:
            print("told:", exc)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_processes_get_the_gradients_of_one_process_and_mistakes_raise(tmp_path):
    def body(comm):
        layer = MoE(6, lambda: nn.Linear(6, 6), 5, 2, comm=comm, seed=0).double()
        layer(torch.arange(72.0, dtype=torch.float64).view(12, 6).sin()).square().sum().backward()
        return layer.gate.weight.grad, {name: p.grad for name, p in layer.experts.named_parameters()}

    file = tmp_path / "gradients.pt"
    result = run_python(2, script=(tmp_path / "script.py", SCRIPT.replace("PATH", str(file))), timeout_s=380)
    assert result.returncode == 0, result.stderr
    torch.testing.assert_close(torch.load(file), run_ranks(1, body)[0])
    assert result.stdout.count("told:") == 2
    assert "backward of functional.allreduce #" in result.stdout
