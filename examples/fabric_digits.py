"""Train on scikit-learn's digits with Lightning Fabric, averaging weights instead of gradients.

    bagua run -n 2 examples/fabric_digits.py

Weights differ between ranks during training.
"""

import torch
from lightning.fabric import Fabric, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from bagua_comm import Decentralized
from bagua_torch.lightning import BaguaFabricStrategy


def main():
    fabric = Fabric(strategy=BaguaFabricStrategy(Decentralized("all")))
    fabric.launch()
    seed_everything(0, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    training, validation = random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2])

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.003))
    batches, rest = fabric.setup_dataloaders(DataLoader(training, 32, shuffle=True), DataLoader(validation, 32))

    for _ in range(10):
        for x, y in batches:
            optimizer.zero_grad()
            fabric.backward(cross_entropy(model(x), y))
            optimizer.step()

    fabric.strategy.average_weights(model)  # they differ between ranks
    model.eval()
    with torch.no_grad():
        right = torch.cat([model(x).argmax(1) == y for x, y in rest])
    accuracy = fabric.all_reduce(right.float().mean())
    fabric.print(f"{fabric.world_size} ranks: accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
