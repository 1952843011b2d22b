"""Imported modules against code written by hand and plain loops. Pure data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..contestants import Contestant, Ours, Peer, Row
from ..workload import Work

NET = Path(__file__).parents[2] / "examples/own_torch/net.py"
SMALL = "synthetic-images:size=32,classes=10,train=51200,test=256"
WITHOUT_STATE = ("--no-save-final",)

OWN = Work(f"{NET}:Net?dropout=0.0", SMALL, batch_size=64, learning_rate=0.001, warmup=20, same_loss=1e-3, same_mean=1e-3)
"""Without dropout, as each side would draw its own."""

RESNET = Work("torchvision:resnet18", SMALL, batch_size=32, learning_rate=0.001, warmup=5, fewest_steps=20, same_loss=1e-2, same_mean=1e-2)

CONTESTANTS: dict[str, Contestant] = {
    "tf module": Ours("tf, module", "tf", "sync", 1, 400, WITHOUT_STATE, OWN),
    "tf module by hand": Peer("tf, module", "imported/tf_own_torch.py", "tf module", 400),
    "torch module": Ours("torch, module", "torch", "sync", 1, 400, WITHOUT_STATE, OWN),
    "torch module loop": Peer("torch, module", "imported/torch_module.py", "torch module", 400),
    "tf torchvision ResNet-18": Ours("tf, ResNet-18", "tf", "sync", 1, 60, WITHOUT_STATE, RESNET),
    "tf ResNet-18": Ours("tf, ResNet-18", "tf", "sync", 1, 60, WITHOUT_STATE, replace(RESNET, model="resnet18")),
    "torch torchvision ResNet-18": Ours("torch, ResNet-18", "torch", "sync", 1, 60, WITHOUT_STATE, RESNET),
    "torch ResNet-18 loop": Peer(  # by level: rounding alone moves losses by percents after 40 updates
        "torch, ResNet-18", "imported/torch_module.py", "torch torchvision ResNet-18", 60, losses="level"
    ),
}

ROWS: dict[str, Row] = {
    "module-tf": Row("tf module", "tf module by hand", "steps_per_second", 0.97),
    "module-torch": Row("torch module", "torch module loop", "steps_per_second", 0.97),
    "module-tf-resnet18": Row("tf torchvision ResNet-18", "tf ResNet-18", "steps_per_second", 0.97),
    "module-torch-resnet18": Row("torch torchvision ResNet-18", "torch ResNet-18 loop", "steps_per_second", 0.97),
}
