"""Train on scikit-learn's digits with Lightning's Trainer, and send a quarter of the bytes.

    bagua run -n 2 examples/lightning_digits.py

The import, the strategy and the weight are the only lines that differ from a program for one process. A third of
the images have no label, so ranks have unequal numbers of labels in a step. Gradients are weighed by them: all
labels count the same, as in one process.
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

import bagua_torch  # noqa: F401 - registers the strategy's name


class Digits(lightning.LightningModule):
    """A network of two layers, with its loss and optimizer."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch):
        """Return the loss of a batch."""
        x, y = batch
        self.trainer.strategy.model.weight = int((y != -100).sum())
        return cross_entropy(self.net(x), y)

    def validation_step(self, batch):
        """Log the mean accuracy of all ranks."""
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.003)


def main():
    lightning.seed_everything(0, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    training, validation = random_split(TensorDataset(images, labels), [0.8, 0.2])
    labels[training.indices[::3]] = -100  # cross_entropy leaves them out
    trainer = lightning.Trainer(
        strategy="bagua_bytegrad",
        max_epochs=10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(training, 32, shuffle=True), DataLoader(validation, 32))
    if trainer.is_global_zero:
        print(f"{trainer.world_size} ranks: accuracy {trainer.callback_metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
