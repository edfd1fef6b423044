"""A trainer with snapshots, as in minGPT-ddp: rank 0 saves, and a second trainer continues from the file."""

import json
import os
import tempfile
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Snapshot:
    model_state: dict
    optimizer_state: dict
    finished_epoch: int


class Pairs(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(48, 12, generator=generator)
        self.labels = (self.inputs[:, :4].sum(1) > 0).long()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


class Trainer:
    def __init__(self, model, optimizer, dataset, path):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.loader = DataLoader(
            dataset,
            batch_size=6,
            pin_memory=False,
            shuffle=False,
            num_workers=1,
            sampler=DistributedSampler(dataset),
        )
        self.epochs_run, self.model, self.optimizer, self.path = 0, model, optimizer, path
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self._load_snapshot()
        self.model = DDP(self.model)

    def _load_snapshot(self):
        try:
            data = torch.load(self.path, weights_only=False)
        except FileNotFoundError:
            return
        snapshot = Snapshot(**data)
        self.model.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.epochs_run = snapshot.finished_epoch + 1

    def _run_batch(self, source, targets):
        with torch.set_grad_enabled(True):
            loss = nn.functional.cross_entropy(self.model(source), targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def _save_snapshot(self, epoch):
        model = self.model
        raw_model = model.module if hasattr(model, "module") else model
        snapshot = Snapshot(raw_model.state_dict(), self.optimizer.state_dict(), epoch)
        torch.save(asdict(snapshot), self.path)

    def train(self, epochs):
        losses = []
        for epoch in range(self.epochs_run, epochs):
            self.loader.sampler.set_epoch(epoch)
            losses += [self._run_batch(source, targets) for source, targets in self.loader]
            if self.global_rank == 0:
                self._save_snapshot(epoch)
        return losses


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def main():
    dist.init_process_group(backend="gloo")
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    path, dataset = os.path.join(name[0], "snapshot.pt"), Pairs()
    torch.manual_seed(10 + dist.get_rank())
    first = Trainer(*make(1), dataset, path).train(epochs=2)
    dist.barrier()
    again = Trainer(*make(2), dataset, path)
    torch.manual_seed(20 + dist.get_rank())
    second = again.train(epochs=3)
    if dist.get_rank() == 0:
        print("result:", json.dumps({"losses": first + second, "began": again.epochs_run}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
