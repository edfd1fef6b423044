"""Sharded training in other frameworks, as the guide says: `torchrun fsdp_frameworks.py NAME...`.

Each program checks that its framework trains through this library, and that the loss falls.
"""

import sys
import tempfile

import pytest
import torch
from fsdp_training import run_named  # a program beside this one
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import bagua_torch
import bagua_torch.fsdp
from bagua_comm import ArrayError, Quantized

EIGHT_BITS = Quantized(min_bytes=0)


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))


def check(handle, losses):
    """Check that all was sent in eight bits, and that the last loss is well below the first."""
    assert set(handle.counters.by_operation) == {"quantized_allgather", "quantized_reduce_scatter"}
    assert losses[-1] < losses[0] / 2, losses


def with_lightning(comm):
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    losses = []

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make()

        def configure_model(self):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
            self.handle = bagua_torch.fsdp.attach(self.net, EIGHT_BITS, EIGHT_BITS)

        def training_step(self, batch):
            x, y = batch
            loss = mse_loss(self.net(x), y)
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2)

    x = torch.randn(256, 8)
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=comm.size,
        strategy=ModelParallelStrategy(data_parallel_size=comm.size, tensor_parallel_size=1),
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(x, x[:, :1]), batch_size=16))
    check(model.handle, losses)


def shard_on_cpus(accelerator):
    """Have Accelerate shard on CPUs: of itself it does so on GPUs only, and ignores its FSDP plugin here."""
    from accelerate import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin


def with_accelerate(comm):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    ignoring, plain = Accelerator(cpu=True, fsdp_plugin=plugin), make()
    model, _ = ignoring.prepare(plain, torch.optim.Adam(plain.parameters()))
    with pytest.raises(ArrayError, match="fully_shard on it first"):
        bagua_torch.fsdp.attach(model)  # see the guide

    accelerator, model = ignoring, make()
    shard_on_cpus(accelerator)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 1e-2))
    assert isinstance(model, FSDPModule)
    handle, losses = bagua_torch.fsdp.attach(model, EIGHT_BITS, EIGHT_BITS), []
    for _ in range(40):
        x = torch.randn(16, 8)
        loss = mse_loss(model(x), x[:, :1])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    check(handle, losses)
    handle.close()


def with_trainer(comm):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Attach(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            self.handle = bagua_torch.fsdp.attach(model, EIGHT_BITS, EIGHT_BITS)

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(16).repeat(64, 1)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=30,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        attach = Attach()
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[attach])
        shard_on_cpus(trainer.accelerator)
        trainer.is_fsdp_enabled = True
        trainer.train()
    assert isinstance(trainer.model, FSDPModule)
    check(attach.handle, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


PROGRAMS = {"lightning": with_lightning, "accelerate": with_accelerate, "trainer": with_trainer}


if __name__ == "__main__":
    run_named(PROGRAMS, sys.argv[1:] or list(PROGRAMS))
