"""Lightning's Trainer on the small CNN in barebones mode: no logger, checkpoints or bars.

The data are tensors in memory; the loader's sampler yields whole batches of indices: one indexing for each batch, without collation.
"""

from __future__ import annotations

import logging
import warnings

import lightning
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from workload import Timer, Workload, read_workload


class SmallCNN(lightning.LightningModule):
    """The model, and the clock around a `fit`."""

    def __init__(self, work: Workload, timer: Timer) -> None:
        super().__init__()
        self._rate, self._timer = work.learning_rate, timer
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, work.spec.classes)),
        )
        self.losses: list[torch.Tensor] = []
        with torch.no_grad():
            for parameter, values in zip(self.layers.parameters(), work.initial.values(), strict=True):
                parameter.copy_(torch.from_numpy(values))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        inputs, labels = batch
        loss = cross_entropy(self.layers(inputs), labels)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self._rate, fused=True)

    def on_train_epoch_start(self) -> None:
        """Start the clock."""
        self._timer.begin()

    def on_train_epoch_end(self) -> None:
        """Stop the clock."""
        self._timer.end()


def main() -> None:
    """Train in one process: a `fit` for the warm-up, and one that counts."""
    work, timer = read_workload(), Timer()
    torch.set_num_threads(work.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    data = TensorDataset(torch.from_numpy(work.inputs_nchw), torch.from_numpy(work.labels))
    order = torch.from_numpy(work.order()).to(torch.int64)
    model = SmallCNN(work, timer)
    for batches in (order[: work.warmup], order[work.warmup :]):
        loader = DataLoader(data, sampler=batches, batch_size=None, num_workers=0)
        lightning.Trainer(accelerator="cpu", devices=1, barebones=True, max_epochs=1).fit(model, loader)
    timer.report(work, np.array([float(loss) for loss in model.losses]))


main()
