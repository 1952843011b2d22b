"""Lightning's Trainer in barebones mode, which its documentation names for measuring.

No logger, checkpoints, bars or checks. The data are tensors in memory; the loader's sampler yields whole batches of indices: one indexing
for each batch, without collation.
"""

from __future__ import annotations

import logging
import warnings

import lightning
import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from workload import Timer, Workload, read_workload


class LogisticRegression(lightning.LightningModule):
    """The model, and the clock around a `fit`."""

    def __init__(self, work: Workload, timer: Timer) -> None:
        super().__init__()
        self._rate, self._timer = work.learning_rate, timer
        self.layer = torch.nn.Linear(work.inputs.shape[1], len(work.bias))
        self.losses: list[torch.Tensor] = []
        with torch.no_grad():
            self.layer.weight.copy_(torch.from_numpy(work.weight))
            self.layer.bias.copy_(torch.from_numpy(work.bias))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        inputs, labels = batch
        loss = cross_entropy(self.layer(inputs), labels)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self._rate)

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
    data = TensorDataset(torch.from_numpy(work.inputs), torch.from_numpy(work.labels))
    order = torch.from_numpy(work.order()).to(torch.int64)
    model = LogisticRegression(work, timer)
    for batches in (order[: work.warmup], order[work.warmup :]):
        loader = DataLoader(data, sampler=batches, batch_size=None, num_workers=0)
        lightning.Trainer(accelerator="cpu", devices=1, barebones=True, max_epochs=1).fit(model, loader)
    timer.report(work, np.array([float(loss) for loss in model.losses]))


main()
