"""Train on scikit-learn's digits with Accelerate, and send a quarter of the bytes.

    torchrun --nproc-per-node 2 examples/accelerate_digits.py

`prepare` wraps the model in PyTorch's DistributedDataParallel; the hook defines how gradients are averaged. A
third of the images have no label, so ranks have unequal numbers of labels in a step. The hook weighs their
gradients by them: all labels count the same, as in one process.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from bagua_comm import MinMaxUInt8, Quantized
from bagua_torch import comm_hook


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    training, validation = random_split(TensorDataset(images, labels), [0.8, 0.2])
    labels[training.indices[::3]] = -100  # cross_entropy leaves them out

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    model, optimizer, batches, rest = accelerator.prepare(
        model, optimizer, DataLoader(training, 32, shuffle=True), DataLoader(validation, 32)
    )
    if accelerator.num_processes > 1:
        model.register_comm_hook(None, comm_hook(Quantized(MinMaxUInt8()), weight=lambda: count))

    for _ in range(10):
        for x, y in batches:
            count = int((y != -100).sum())
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()

    model.eval()
    with torch.no_grad():
        right = torch.cat([accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in rest])
    accelerator.print(f"{accelerator.num_processes} ranks: accuracy {right.float().mean():.3f}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
