"""A hand-written DDP script for torchrun's elastic restarts: the small CNN.

It saves a checkpoint every few steps and resumes from the newest one. Rank 0 appends a line for each step to the progress file, and
every rank writes its process number into a separate file.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from crosstrain.data.store.stored_dataset import open_dataset

CLASSES = 10


def network() -> nn.Module:
    """Return the model that ``--model cnn`` is."""
    return nn.Sequential(
        *(nn.LazyConv2d(6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.LazyLinear(64), nn.ReLU(), nn.Linear(64, CLASSES)),
    )


def prepared() -> tuple[torch.Tensor, torch.Tensor, nn.Module]:
    """Return images, float32 [examples, 1, 28, 28] in 0 … 1, labels and the untrained model.

    They are equal on each worker.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stored = open_dataset("glyphs28")
    images = torch.from_numpy(stored.images("train")[:].copy()).float().div(255)
    labels = torch.from_numpy(stored.labels("train")[:].copy()).long()
    model = network()
    model(images[:1])
    return images, labels, model


def main() -> None:
    """Train for ever, until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="of progress, process numbers and checkpoints")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--checkpoint-every", type=int, default=200)
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    partial = options.folder / f"partial-{rank}"
    partial.write_text(str(os.getpid()))
    partial.replace(options.folder / f"pid-{rank}")  # whole, or not there
    dist.init_process_group("gloo")
    images, labels, model = prepared()
    saved = options.folder / "checkpoint.pt"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    wrapped = DistributedDataParallel(model)
    chosen = torch.Generator().manual_seed(rank)
    with (options.folder / f"progress-{rank}").open("a") as progress:
        step = first
        while True:
            batch = torch.randint(len(images), (options.batch_size,), generator=chosen)
            optimizer.zero_grad()
            cross_entropy(wrapped(images[batch]), labels[batch]).backward()
            optimizer.step()
            step += 1
            if rank == 0:
                if step % options.checkpoint_every == 0:
                    part = saved.with_suffix(".part")
                    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
                    part.replace(saved)
                print(step, file=progress, flush=True)


if __name__ == "__main__":
    main()
