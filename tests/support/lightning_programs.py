"""Programs for Lightning's Trainer and Fabric on scikit-learn's digits, each beside Lightning's own DDPStrategy.

    python -m bagua_comm run -n 2 tests/support/lightning_programs.py lightning equal resume fabric

The first argument is the distribution. Every program prints its name once it has found what it expects.
"""

import importlib
import logging
import os
import sys
import tempfile
import warnings

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bagua_torch
from bagua_comm import (
    ArrayError,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    ErrorFeedback,
    GradientAllReduce,
    LowPrecisionDecentralized,
    Quantized,
)
from bagua_torch.lightning import FABRICS, TRAINERS, BaguaFabricStrategy, BaguaStrategy

PACKAGE = sys.argv[1]
L = importlib.import_module(TRAINERS[PACKAGE])
F = importlib.import_module(FABRICS[PACKAGE])
callbacks = importlib.import_module(f"{L.__name__}.callbacks")
Theirs = importlib.import_module(f"{L.__name__}.strategies").DDPStrategy
TheirsInFabric = importlib.import_module(f"{F.__name__}.strategies").DDPStrategy

comm = bagua_torch.connect(timeout_s=60)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
TRAINING, VALIDATION = TensorDataset(images[:640], labels[:640]), TensorDataset(images[640:900], labels[640:900])
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
ALGORITHMS = [None, GradientAllReduce(ErrorFeedback(Quantized())), LowPrecisionDecentralized()]


def layers(norm=False, dropout=0.0):
    return nn.Sequential(
        # A bias before BatchNorm has no gradient but rounding errors, of which Adam makes whole steps.
        nn.Linear(64, 32, bias=not norm),
        nn.BatchNorm1d(32) if norm else nn.Tanh(),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(32, 10),
    )


class Digits(L.LightningModule):
    def __init__(self, norm=False, dropout=0.0, lr=0.01):
        super().__init__()
        self.net, self.lr = layers(norm, dropout), lr

    def training_step(self, batch):
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch):
        out = self.net(batch[0])
        self.log("val_loss", cross_entropy(out, batch[1]), sync_dist=True)
        self.log("right", (out.argmax(1) == batch[1]).sum().float(), sync_dist=True, reduce_fx="sum")

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class TwoOptimizers(Digits):
    """Manual optimization: two backward passes in a step, each of other parameters."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization, self.other = False, nn.Linear(64, 10)

    def training_step(self, batch):
        for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            loss = cross_entropy(net(batch[0]), batch[1])
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (self.net, self.other)]


def fit(strategy, make, *, epochs=2, ckpt_path=None, **settings):
    L.seed_everything(3, verbose=False)
    module = make()
    ours = isinstance(strategy, BaguaStrategy)
    settings = {"enable_checkpointing": False, **({} if ours else {"devices": comm.size}), **settings}
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", max_epochs=epochs, **QUIET, **settings)
    loaders = DataLoader(TRAINING, 16, shuffle=True), DataLoader(VALIDATION, 32)
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    comm.check_consistency(bagua_torch.as_array(flat(module)))
    return trainer, module


def flat(module):
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def folder():
    return comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None, root=0)


def equal():
    """Weights and metrics equal those of Lightning's own strategy: bit for bit on two ranks, else rounded."""
    programs = {
        "plain": (lambda: Digits(dropout=0.1), {}, {}),
        "norm": (lambda: Digits(norm=True), {}, {}),
        "clipped": (Digits, {"gradient_clip_val": 0.1}, {}),
        "accumulated": (Digits, {"accumulate_grad_batches": 3}, {}),
        "bfloat16": (Digits, {"precision": "bf16-mixed"}, {}),
        "manual": (TwoOptimizers, {}, {"find_unused_parameters": True}),
        "stopped early": (
            lambda: Digits(lr=0.5),
            # In float64: so large a step makes much of a rounding error.
            {
                "epochs": 20,
                "precision": "64-true",
                "callbacks": lambda: [callbacks.EarlyStopping("val_loss", patience=1)],
            },
            {},
        ),
    }
    for name, (make, settings, options) in programs.items():
        found = []
        for strategy in (BaguaStrategy(**options), Theirs(process_group_backend="gloo", **options)):
            given = {key: value() if key == "callbacks" else value for key, value in settings.items()}
            trainer, module = fit(strategy, make, **given)
            metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
            found.append((flat(module), metrics, trainer.global_step, trainer.current_epoch, trainer.world_size))
        (mine, my_metrics, *my_numbers), (theirs, their_metrics, *their_numbers) = found
        # More than two ranks are summed in another order than gloo's, which rounds otherwise in each of 20 steps;
        # in bfloat16 that may round an activation otherwise, and Adam then moves a weight by up to a step, 0.01.
        tolerance = 0 if comm.size == 2 else 1e-2 if name == "bfloat16" else 1e-5
        torch.testing.assert_close(
            mine, theirs, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert my_numbers == their_numbers, (name, my_numbers, their_numbers)
        assert my_numbers[-1] == comm.size
        assert my_metrics.keys() == their_metrics.keys()
        for key, value in my_metrics.items():
            assert abs(value - their_metrics[key]) <= 4 * tolerance * max(1, abs(value)), (name, key, found)
        if name == "stopped early":
            assert my_numbers[1] < 20


def resume():
    """Training continues bit for bit from the Trainer's checkpoint; evaluation is the same on all ranks."""
    for algorithm in ALGORITHMS:
        place = folder()
        saving = callbacks.ModelCheckpoint(dirpath=place, filename="{epoch}", save_top_k=-1)
        trainer, module = fit(
            BaguaStrategy(algorithm), Digits, epochs=3, enable_checkpointing=True, callbacks=[saving]
        )
        path = os.path.join(place, "epoch=1.ckpt")
        _, again = fit(BaguaStrategy(algorithm), Digits, epochs=3, ckpt_path=path)
        assert torch.equal(flat(module), flat(again)), algorithm
        _, shorter = fit(BaguaStrategy(algorithm), Digits, epochs=2)
        loaded = Digits()
        loaded.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        assert torch.equal(flat(loaded), flat(shorter)), algorithm
        (validated,) = trainer.validate(module, DataLoader(VALIDATION, 32), verbose=False)
        assert validated["right"] >= 180
        assert all(found == validated for found in comm.allgather_object(validated))


def weights():
    """Ranks' weights are the same where they are looked at, and differ where they are trained."""

    class Look(callbacks.Callback):
        differed = False

        def on_train_batch_end(self, trainer, module, *_):
            theirs = comm.allgather_object(flat(module))
            self.differed = self.differed or any(not torch.equal(theirs[0], other) for other in theirs)

        def on_validation_batch_start(self, trainer, module, *_):
            comm.check_consistency(bagua_torch.as_array(flat(module)))

    for algorithm in (Decentralized("all"), AsyncModelAverage(interval_s=0.0, warmup_steps=3)):
        look = Look()
        fit(BaguaStrategy(algorithm), Digits, callbacks=[look], val_check_interval=5)
        assert look.differed, algorithm


def norms():
    """BatchNorm over all ranks: training equals that of one process on the batches of all ranks together."""
    generator = torch.Generator().manual_seed(1)
    initial = {
        name: torch.randn(value.shape, generator=generator, dtype=torch.float64) / 4
        if value.is_floating_point() and "running" not in name
        else value
        for name, value in layers(norm=True).double().state_dict().items()
    }
    reference = layers(norm=True).double()
    reference.load_state_dict(initial)
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.01)
    for _ in range(2):
        for x, y in DataLoader(TRAINING, 16 * comm.size):
            optimizer.zero_grad()
            cross_entropy(reference(x.double()), y).backward()
            optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.7
    expected = reference.state_dict()

    def check(net, tolerance=1e-9):
        for name, value in net.state_dict().items():
            assert torch.allclose(value, expected[name], rtol=0, atol=tolerance), name
        comm.check_consistency(bagua_torch.as_array(flat(net)))

    class Normed(Digits):
        def on_train_start(self):
            self.during = type(self.net[1])

    sampler = DistributedSampler(TRAINING, comm.size, comm.rank, shuffle=False)  # the batches that the loop has
    loader = DataLoader(TRAINING, 16, sampler=sampler)
    settings = {"accelerator": "cpu", "max_epochs": 2, "precision": "64-true", "enable_checkpointing": False}
    trainer = L.Trainer(
        strategy=BaguaStrategy(), sync_batchnorm=True, use_distributed_sampler=False, **settings, **QUIET
    )
    module = Normed(norm=True)
    module.net.double().load_state_dict(initial)
    trainer.fit(module, loader, DataLoader(VALIDATION, 32))
    assert module.during is bagua_torch.SyncBatchNorm
    assert type(module.net[1]) is nn.BatchNorm1d  # again
    check(module.net)

    layer_sync = importlib.import_module(f"{L.__name__}.plugins.layer_sync")

    class Own(layer_sync.TorchSyncBatchNorm):
        applied = 0

        def apply(self, model):
            self.applied += 1
            return model

        def revert(self, model):
            return model

    own = Own()
    fit(BaguaStrategy(), lambda: Digits(norm=True), epochs=1, plugins=[own], sync_batchnorm=True)
    assert own.applied == 1

    strategy = BaguaFabricStrategy()
    fabric = F.Fabric(accelerator="cpu", strategy=strategy, precision="64-true")
    fabric.launch()
    model = layers(norm=True).double()
    model.load_state_dict(initial)
    model = bagua_torch.sync_batchnorm.convert(model, fabric.strategy.comm)
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(cross_entropy(model(x.double()), y))
            optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.7
    check(model.module, tolerance=1e-6)  # Fabric gives outputs in float32


class Backbone(Digits):
    """Its backbone is frozen before it is wrapped; the optimizer gets the head alone."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = self.net[:-1], self.net[-1]

    def configure_optimizers(self):
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=self.lr)


class Finetuning(callbacks.BackboneFinetuning):
    def __init__(self):
        super().__init__(1, lambda epoch: 1.0, backbone_initial_lr=0.005, should_align=False)

    def on_train_start(self, trainer, module):
        """Lightning's own callback leaves the backbone frozen if a fit resumes after it was unfrozen."""
        if len(trainer.optimizers[0].param_groups) > 1:
            module.backbone.requires_grad_(True)


def unfreezing():
    """BackboneFinetuning unfreezes on all ranks what was frozen on wrapping, as in one process; resuming, too."""
    L.seed_everything(3, verbose=False)
    module, reference = Backbone().double(), Backbone().double()
    reference.load_state_dict(module.state_dict())
    sampler = DistributedSampler(TRAINING, comm.size, comm.rank, shuffle=False)
    trainer = L.Trainer(
        strategy=BaguaStrategy(),
        accelerator="cpu",
        max_epochs=3,
        precision="64-true",
        enable_checkpointing=False,
        use_distributed_sampler=False,
        callbacks=[Finetuning()],
        **QUIET,
    )
    trainer.fit(module, DataLoader(TRAINING, 16, sampler=sampler))
    optimizer = torch.optim.Adam(reference.head.parameters(), lr=0.01)
    for epoch in range(3):
        if epoch == 1:
            optimizer.add_param_group({"params": reference.backbone.parameters(), "lr": 0.005})
        for x, y in DataLoader(TRAINING, 16 * comm.size):
            reference.zero_grad()
            cross_entropy(reference.net(x.double()), y).backward()
            optimizer.step()
    comm.check_consistency(bagua_torch.as_array(flat(module)))
    assert torch.allclose(flat(module), flat(reference), rtol=0, atol=1e-9)
    for algorithm in ALGORITHMS[1:]:
        place = folder()
        saving = callbacks.ModelCheckpoint(dirpath=place, filename="{epoch}", save_top_k=-1)
        given = {"epochs": 3, "enable_checkpointing": True}
        _, module = fit(BaguaStrategy(algorithm), Backbone, callbacks=[Finetuning(), saving], **given)
        for epoch in (0, 1):  # the first checkpoint is from before, the other from after
            path = os.path.join(place, f"epoch={epoch}.ckpt")
            _, again = fit(BaguaStrategy(algorithm), Backbone, epochs=3, callbacks=[Finetuning()], ckpt_path=path)
            assert torch.equal(flat(module), flat(again)), (algorithm, epoch)


def failing():
    """An error on all ranks ends the fit, and the next one works."""

    class Fails(Digits):
        def training_step(self, batch):
            raise ValueError("my own error")

    with pytest.raises(ValueError, match="my own error"):
        fit(BaguaStrategy(ByteGrad()), Fails)
    fit(BaguaStrategy(ByteGrad()), Digits, epochs=1)


def train_in_fabric(strategy, algorithm_saves=None, loads=None, **settings):
    torch.manual_seed(0)
    fabric = F.Fabric(accelerator="cpu", strategy=strategy, **settings)
    fabric.launch()
    model = layers(norm=True)
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), 0.01))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if loads:
        assert fabric.load(loads, state) == {}
        assert state["step"] == 6
    batches = list(fabric.setup_dataloaders(DataLoader(TRAINING, 16)))
    for step in range(state["step"], 12):
        x, y = batches[step % len(batches)]
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            fabric.backward(cross_entropy(model(x), y))
        if step % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        if step == 5 and algorithm_saves:
            fabric.save(algorithm_saves, {**state, "step": 6})
    if isinstance(strategy, BaguaFabricStrategy):
        strategy.average_weights(model)
    assert fabric.all_reduce(torch.tensor(float(fabric.global_rank)), reduce_op="sum") == sum(range(comm.size))
    assert fabric.all_gather(torch.tensor([fabric.global_rank])).ravel().tolist() == list(range(comm.size))
    assert fabric.broadcast(fabric.global_rank, src=1) == 1
    comm.check_consistency(bagua_torch.as_array(flat(model)))
    return flat(model)


def fabric():
    """Like Fabric's own strategy, with accumulation and bfloat16; it continues bit for bit from a checkpoint."""
    mine = train_in_fabric(BaguaFabricStrategy(), precision="bf16-mixed")
    theirs = train_in_fabric(
        TheirsInFabric(process_group_backend="gloo"), devices=comm.size, precision="bf16-mixed"
    )
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0 if comm.size == 2 else 1e-2)
    for algorithm in ALGORITHMS:
        path = os.path.join(folder(), "fabric.ckpt")
        whole = train_in_fabric(BaguaFabricStrategy(algorithm), algorithm_saves=path)
        assert torch.equal(whole, train_in_fabric(BaguaFabricStrategy(algorithm), loads=path)), algorithm
    alone = F.Fabric(accelerator="cpu", strategy=BaguaFabricStrategy(Decentralized("all")))
    alone.launch()
    with pytest.raises(ArrayError, match=r"fabric.setup\(model, optimizer\)"):
        alone.setup_module(nn.Linear(2, 2))


def manual():
    """What Lightning's own strategy does of a pass in manual optimization, and of accumulation."""
    overrides = importlib.import_module(f"{L.__name__}.overrides.distributed")
    control = importlib.import_module(f"{F.__name__}.strategies.ddp")._DDPBackwardSyncControl()
    model = nn.Linear(2, 1)
    ddp = bagua_torch.DistributedDataParallel(model, comm=comm)
    with control.no_backward_sync(ddp, True):
        assert not ddp.require_backward_grad_sync
        loss = ddp(torch.full((1, 2), float(comm.rank))).sum()
    overrides.prepare_for_backward(ddp, loss)
    loss.backward()
    assert model.weight.grad.tolist() == [[(comm.size - 1) / 2] * 2]
    ddp.reducer._delay_all_reduce()
    with pytest.raises(AttributeError, match="the reducer of bagua_torch has no attribute"):
        _ = ddp.reducer._install_post_backward_futures
    ddp.close()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    for name in sys.argv[2:]:
        globals()[name]()
        if comm.rank == 0:
            print("found as expected:", name, flush=True)
