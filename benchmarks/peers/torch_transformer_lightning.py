"""Lightning's Trainer on the Transformer, as a toolkit for translation built on it is: sentences padded by a loader, batches by a sampler.

Barebones mode: no logger, checkpoints, bars or checks. The model is the hand-written one with `scaled_dot_product_attention`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

import lightning
import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from torch_translator import Tensors, build, optimizer, smoothed_loss
from translation_batches import indices_of_updates
from workload import Timer, Workload, read_workload

from crosstrain.data.text import BEGIN

Pair = tuple[torch.Tensor, torch.Tensor]


class Sentences(Dataset[Pair]):
    """Source and target of each example."""

    def __init__(self, work: Workload) -> None:
        self._columns = [work.data.column("train", name) for name in ("source", "target")]

    def __getitem__(self, index: int) -> Pair:
        """Return one pair."""
        source, target = (torch.from_numpy(column.example(index).astype(np.int64)) for column in self._columns)
        return source, target


def collate(pairs: Sequence[Pair]) -> Tensors:
    """Pad a batch."""
    source, target = (pad_sequence(part, batch_first=True) for part in zip(*pairs, strict=True))
    return source, torch.nn.functional.pad(target, (1, 0), value=BEGIN)[:, :-1], target


class Translation(lightning.LightningModule):
    """The model, and the clock around a `fit`."""

    def __init__(self, work: Workload, timer: Timer) -> None:
        super().__init__()
        self._work, self._timer = work, timer
        self.model = build(work)
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Tensors, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        source, decoder, target = batch
        loss = smoothed_loss(self.model(source, decoder), target, self._work.spec.settings.smoothing)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The same Adam."""
        return optimizer(self.model, self._work)

    def on_train_epoch_start(self) -> None:
        """Start the clock."""
        self._timer.begin()

    def on_train_epoch_end(self) -> None:
        """Stop the clock."""
        self._timer.end()


def main() -> None:
    """Train in one process: a `fit` for the warm-up, and one that counts, with the state of Adam kept."""
    work, timer = read_workload(), Timer()
    torch.set_num_threads(work.threads)
    torch.manual_seed(work.seed)  # dropout
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    data, order = Sentences(work), [indices.tolist() for indices in indices_of_updates(work)]
    model = Translation(work, timer)
    adam = model.configure_optimizers()
    model.configure_optimizers = lambda: adam
    precision = "bf16-mixed" if work.precision == "bf16" else "32-true"
    for batches in (order[: work.warmup], order[work.warmup :]):
        loader = DataLoader(data, batch_sampler=batches, collate_fn=collate, num_workers=0)
        trainer = lightning.Trainer(accelerator="cpu", devices=1, barebones=True, max_epochs=1, precision=precision)
        trainer.fit(model, loader)
    timer.report(work, np.array([float(loss) for loss in model.losses]))


main()
