"""Weights in buckets that users convert, share and save."""

import io

import pytest
import torch
from support.memory_formats import EXACT, WEIGHTS
from support.torch_training import batch, final_weights, make_model, train_step, weights, wrapped
from torch import nn

from bagua_comm import ArrayError, DiLoCo
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel, fuse


def convert_and_back(model):
    model.half().float()


def copy_all(model):
    for p in model.parameters():
        p.data = p.data.clone()


def evaluate_in_half(model):
    model.half().eval()
    with torch.no_grad():
        model(batch(0, 0).half())
    model.float().train()


def wrapped_with(comm, algorithm, kind, fusing):
    """A model, its optimizer, which may be fused, and the wrapper that trains them. Collective."""
    model = make_model()
    optimizer = kind(model.parameters(), lr=0.05)
    optimizer = fuse(optimizer) if fusing else optimizer
    return model, optimizer, DistributedDataParallel(model, optimizer, algorithm, comm=comm)


@pytest.mark.covering(1)
@pytest.mark.parametrize("change", [convert_and_back, copy_all, evaluate_in_half])
@pytest.mark.parametrize("keep", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("fusing", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("algorithm", [EXACT, WEIGHTS, DiLoCo(local_steps=1)], ids=str)
def test_a_model_may_be_converted_and_back_between_two_steps(algorithm, fusing, keep, change):
    def trained(comm, algorithm, change, fusing):
        model, optimizer, ddp = wrapped_with(comm, algorithm, torch.optim.SGD, fusing)
        for step in range(4):
            train_step(ddp, optimizer, batch(comm.rank, step))
            if not keep:
                optimizer.zero_grad()
            if step == 1:
                change(model)
        ddp.average_weights()
        ddp.close()
        return weights(model)

    def rounded(model):  # like a conversion, without moving anything
        if change is not copy_all:
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(p.half())

    def settled(model):  # hooks of the wrapper write back what was exchanged first
        model.state_dict()
        rounded(model)

    def body(comm):
        model = trained(comm, algorithm, change, fusing)
        other = trained(comm, algorithm, rounded, fusing)
        before_exchange = trained(comm, algorithm, settled, fusing)
        return model, other, before_exchange

    (first, *others), (second, *_) = run_ranks(2, body)
    assert torch.equal(first, second)
    errors = [(first - other).abs().max().item() for other in others]
    assert min(errors) < 2e-3, errors  # float16 rounds before or after the exchange


@pytest.mark.parametrize("algorithm", [EXACT, WEIGHTS], ids=str)
def test_a_model_that_stays_converted_is_refused_by_name(algorithm):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm, lr=0.05)
        train_step(ddp, optimizer, batch(comm.rank, 0))
        model.half()
        optimizer.zero_grad()
        with pytest.raises(ArrayError, match=r"float16.*convert it back"):
            ddp(batch(comm.rank, 1).half()).sum().backward()
        ddp._steps.detach()

    run_ranks(2, body)


def share(model):
    model.share_memory()


def through_a_queue(model):
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    queue.put({name: p.data for name, p in model.named_parameters()})
    queue.get()


@pytest.mark.covering(1)
@pytest.mark.parametrize("change", [share, through_a_queue])
@pytest.mark.parametrize("fusing", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("algorithm", [EXACT, WEIGHTS, DiLoCo(local_steps=1)], ids=str)
def test_weights_that_are_shared_between_processes_stay_shared_and_are_exchanged(algorithm, fusing, change):
    def trained(comm, change):
        model, optimizer, ddp = wrapped_with(comm, algorithm, torch.optim.Adam, fusing)
        for step in range(5):
            train_step(ddp, optimizer, batch(comm.rank, step))
            if step == 1:
                change(model)
                places = [p.data_ptr() for p in model.parameters()]
            if step > 1 and change is not nothing:
                assert all(p.is_shared() for p in model.parameters())
                assert [p.data_ptr() for p in model.parameters()] == places
        model.state_dict()
        ddp.close()
        return weights(model)

    def nothing(model):
        pass

    def body(comm):
        torch.testing.assert_close(trained(comm, change), trained(comm, nothing))

    run_ranks(2, body)


def test_weights_that_are_shared_before_stay_shared_in_other_buckets_and_with_other_algorithms():
    def trained(comm, change):
        model = make_model()
        change(model)
        places = [p.data_ptr() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        ddp = DistributedDataParallel(model, optimizer, WEIGHTS, comm=comm)
        for step in range(6):
            if step == 2:
                ddp.replan(bucket_bytes=100)
            if step == 4:
                ddp.switch(DiLoCo(local_steps=1))
            train_step(ddp, optimizer, batch(comm.rank, step))
        model.state_dict()
        assert change is not share or [p.data_ptr() for p in model.parameters()] == places
        return final_weights(ddp)

    def body(comm):
        torch.testing.assert_close(trained(comm, share), trained(comm, lambda model: None))

    run_ranks(2, body)


def test_a_module_whose_weights_another_wrapper_has_taken_is_refused():
    def body(comm):
        shared = nn.Linear(4, 4)
        one, other = nn.Sequential(shared, nn.Linear(4, 1)), nn.Sequential(shared, nn.Linear(4, 2))
        wrappers = [
            DistributedDataParallel(module, torch.optim.SGD(module.parameters(), lr=0.1), WEIGHTS, comm=comm)
            for module in (one, other)
        ]
        with pytest.raises(ArrayError, match=r"'0.bias' of shape .* was resized, moved or wrapped"):
            wrappers[0](torch.ones(1, 4))
        for wrapper in wrappers:
            wrapper._steps.detach()

    run_ranks(2, body)


# Saving -----------------------------------------------------------------------------------------------------


def wrapped_for_saving(comm, algorithm, fusing, model=None):
    model = make_model() if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    optimizer = fuse(optimizer) if fusing else optimizer
    ddp = DistributedDataParallel(model, optimizer, algorithm, comm=comm)
    return model, optimizer, ddp


every_home = pytest.mark.parametrize(
    ("algorithm", "fusing"), [(WEIGHTS, False), (EXACT, True), (WEIGHTS, True)], ids=["weights", "fused", "both"]
)


@every_home
def test_every_weight_is_saved_and_nothing_else(algorithm, fusing, tmp_path):
    def body(comm):
        model, optimizer, ddp = wrapped_for_saving(comm, algorithm, fusing)
        train_step(ddp, optimizer, batch(comm.rank, 0))
        for p in model.parameters():
            assert p.untyped_storage().nbytes() == p.nbytes
            assert p.grad.untyped_storage().nbytes() == p.grad.nbytes
        one, alone = io.BytesIO(), io.BytesIO()
        torch.save(model[0].bias, one)
        torch.save(nn.Parameter(model[0].bias.detach().clone()), alone)
        assert len(one.getvalue()) == len(alone.getvalue())
        ddp.close()

    run_ranks(2, body)


@pytest.mark.needs("transformers")
@every_home
def test_safetensors_finds_no_tied_weights(algorithm, fusing, tmp_path):
    from safetensors.torch import load_file, save_model

    def body(comm):
        model, optimizer, ddp = wrapped_for_saving(comm, algorithm, fusing)
        train_step(ddp, optimizer, batch(comm.rank, 0))
        file = str(tmp_path / f"{comm.rank}.safetensors")
        save_model(model, file)
        found = load_file(file)
        expected = model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        ddp.close()

    run_ranks(2, body)


@pytest.mark.needs("accelerate")
def test_accelerate_saves_every_weight(tmp_path):
    from accelerate import Accelerator
    from safetensors.torch import load_file

    def body(comm):
        model, optimizer, ddp = wrapped_for_saving(comm, WEIGHTS, False)
        train_step(ddp, optimizer, batch(comm.rank, 0))
        Accelerator(cpu=True).save_model(model, tmp_path)
        found = load_file(tmp_path / "model.safetensors")
        assert {name: value.tolist() for name, value in found.items()} == {
            name: value.tolist() for name, value in model.state_dict().items()
        }
        ddp.close()

    run_ranks(1, body)


@pytest.mark.slow
@pytest.mark.needs("transformers")
def test_transformers_saves_every_weight(tmp_path):
    from safetensors.torch import load_file
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )

    def body(comm):
        model, _, ddp = wrapped_for_saving(comm, WEIGHTS, False, BertForSequenceClassification(config))
        model.save_pretrained(tmp_path)
        found = load_file(tmp_path / "model.safetensors")
        expected = model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        ddp.close()

    run_ranks(1, body)
