"""PyTorch's imagenet example in small: BatchNorm, evaluation on all ranks, resuming from a file."""

import json
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()

    @property
    def avg(self):
        return self.sum / self.count


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.classifier = nn.Linear(8 * 3 * 3, 4)

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


def images(n, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (n,), generator=generator)
    return TensorDataset(torch.randn(n, 1, 8, 8, generator=generator) + labels.view(-1, 1, 1, 1), labels)


def train(loader, model, criterion, optimizer):
    losses = AverageMeter()
    model.train()
    for images_of, target in loader:
        loss = criterion(model(images_of), target)
        losses.update(loss.item(), len(target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses.avg


def validate(loader, model):
    right = AverageMeter()

    def run_validate(batches):
        with torch.no_grad():
            for images_of, target in batches:
                right.update((model(images_of).argmax(1) == target).float().mean().item(), len(target))

    model.eval()
    run_validate(loader)
    right.all_reduce()
    seen = len(loader.sampler) * dist.get_world_size()
    if seen < len(loader.dataset):  # what the sampler drops
        run_validate(DataLoader(Subset(loader.dataset, range(seen, len(loader.dataset))), batch_size=8))
    return right.avg


def main():
    dist.init_process_group(backend="gloo", init_method="env://")
    rank = dist.get_rank()
    name = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(name)
    path = os.path.join(name[0], "checkpoint.pth.tar")
    torch.manual_seed(rank)  # the wrapper makes weights equal
    model = Network()
    model = DDP(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    train_set, val_set = images(64, 5), images(19, 6)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16 // dist.get_world_size(), sampler=sampler)
    val_loader = DataLoader(
        val_set, batch_size=8, sampler=DistributedSampler(val_set, shuffle=False, drop_last=True)
    )
    history, best = [], -1.0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        loss = train(loader, model, criterion, optimizer)
        accuracy = validate(val_loader, model)
        scheduler.step()
        history.append([loss, accuracy] if rank == 0 else [])
        is_best, best = accuracy > best, max(accuracy, best)
        if rank == 0:
            state = {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "best_acc1": best,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            torch.save(state, path)
            if is_best:
                shutil.copyfile(path, path + ".best")
    dist.barrier()
    checkpoint = torch.load(path, map_location="cpu")
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    sampler.set_epoch(checkpoint["epoch"])
    history.append(train(loader, model, criterion, optimizer))
    if rank == 0:
        print("result:", json.dumps({"history": history, "names": sorted(checkpoint["state_dict"])}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
