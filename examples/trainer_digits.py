"""Train on scikit-learn's digits with Transformers' Trainer, and send a quarter of the bytes.

    bagua run -n 2 examples/trainer_digits.py

Trainer wraps the model in PyTorch's DistributedDataParallel; the callback sends gradients in eight bits. A third
of the images have no label, so ranks have unequal numbers of labels in a step. The callback weighs gradients by
them: all labels count the same, as in one process. Trainer's own way, average_tokens_across_devices=True, waits
for these numbers before each forward pass.
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset, random_split
from transformers import Trainer, TrainingArguments

from bagua_torch.transformers import BaguaCallback

UNKNOWN = -100  # the label that cross_entropy leaves out


class Digits(nn.Module):
    """A network of two layers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, image):
        """The argument is a column of the data."""
        return {"logits": self.net(image)}


class MeanLoss:
    """The mean loss of the labels of a step on this rank, and their number."""

    labels = None

    def __call__(self, outputs, labels, num_items_in_batch=None):
        """Trainer counts the labels of all batches of a step; in evaluation it does not."""
        if num_items_in_batch is None:
            return cross_entropy(outputs["logits"], labels)
        self.labels = int(num_items_in_batch)
        return cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


def load_images() -> tuple[Subset, Subset]:
    images, labels = load_digits(return_X_y=True)
    rows = [
        {"image": torch.tensor(image / 16, dtype=torch.float32), "labels": int(label)}
        for image, label in zip(images, labels, strict=True)
    ]
    training, validation = random_split(rows, [0.8, 0.2], torch.Generator().manual_seed(0))
    for i in training.indices[::3]:
        rows[i]["labels"] = UNKNOWN
    return training, validation


def main():
    training, validation = load_images()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=10,
            per_device_train_batch_size=32,
            learning_rate=0.003,
            ddp_find_unused_parameters=False,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            label_names=["labels"],  # of the loss, as the model does not take them
            average_tokens_across_devices=False,
        )
        loss = MeanLoss()
        trainer = Trainer(
            Digits(),
            arguments,
            train_dataset=training,
            eval_dataset=validation,
            compute_loss_func=loss,
            compute_metrics=lambda found: {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()},
        )
        trainer.add_callback(BaguaCallback(trainer, weight=lambda: loss.labels))
        trainer.train()
        accuracy = trainer.evaluate()["eval_accuracy"]
        if trainer.is_world_process_zero():
            print(f"{arguments.world_size} ranks: accuracy {accuracy:.3f}")
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
