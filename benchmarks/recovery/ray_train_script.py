"""The script of `elastic_script.py` for Ray Train: the small CNN on three workers.

They resume from the newest checkpoint after a failure, in Ray Train's way: every worker reports, the first one with a checkpoint.
Progress and process numbers are written as by torchrun's workers.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, get_checkpoint, get_context, report
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch.nn.functional import cross_entropy

from .elastic_script import prepared

STATE = "checkpoint.pt"


def train(settings: dict[str, Any]) -> None:
    """Train for ever on one of the workers, until the process is ended."""
    folder, rank = Path(settings["folder"]), get_context().get_world_rank()
    partial = folder / f"partial-{rank}"
    partial.write_text(str(os.getpid()))
    partial.replace(folder / f"pid-{rank}")  # whole, or not there
    images, labels, model = prepared()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = 0
    if (saved := get_checkpoint()) is not None:
        with saved.as_directory() as place:
            state = torch.load(Path(place) / STATE)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    wrapped = prepare_model(model)
    chosen = torch.Generator().manual_seed(rank)
    with (folder / f"progress-{rank}").open("a") as progress:
        step = first
        while True:
            batch = torch.randint(len(images), (settings["batch_size"],), generator=chosen)
            optimizer.zero_grad()
            cross_entropy(wrapped(images[batch]), labels[batch]).backward()
            optimizer.step()
            step += 1
            if step % settings["checkpoint_every"] == 0:
                _save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, whole=rank == 0)
            if rank == 0:
                print(step, file=progress, flush=True)


def _save(state: dict[str, Any], *, whole: bool) -> None:
    """Report, which all workers have to do together; the first has the state."""
    if not whole:
        report({})
        return
    with tempfile.TemporaryDirectory() as place:
        torch.save(state, Path(place) / STATE)
        report({}, checkpoint=Checkpoint.from_directory(place))


def main() -> None:
    """Train on a cluster of so many nodes, one worker on each, until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="of progress, process numbers and checkpoints")
    parser.add_argument("--address", required=True, help="of the cluster's head, on this node")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--checkpoint-every", type=int, default=200)
    options = parser.parse_args()
    ray.init(address=options.address, _node_ip_address=options.address.rpartition(":")[0])
    TorchTrainer(
        train,
        train_loop_config={"folder": str(options.folder), "batch_size": options.batch_size, "checkpoint_every": options.checkpoint_every},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=options.nodes, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(
            name="recovery",
            storage_path=str(options.folder / "results"),
            failure_config=FailureConfig(max_failures=5),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main()
