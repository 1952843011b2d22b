"""A module with tied weights and buffers of all kinds; files of weights, also hostile ones."""

import pickle
import sys
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import nn


class Tied(nn.Module):
    """Linear layers with one weight, a norm, a frozen scale, and a buffer without persistence."""

    def __init__(self, channels, num_classes):
        super().__init__()
        self.body = nn.Linear(channels, channels, bias=False)
        self.tail = nn.Linear(channels, channels, bias=False)
        self.tail.weight = self.body.weight
        self.norm = nn.BatchNorm1d(channels)
        self.scale = nn.Parameter(torch.ones(channels), requires_grad=False)
        self.register_buffer("places", torch.arange(channels, dtype=torch.float32), persistent=False)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x):
        means = self.tail(torch.tanh(self.body(x.mean((2, 3)) + self.places))) * self.scale
        return self.head(self.norm(means))


class Code:
    """Runs when it is unpickled by a reader that runs code."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (self.mark, "w")


def write_all(folder):
    """Write files of weights into a folder."""
    torch.manual_seed(5)
    module = Tied(3, CLASSES)
    state = {name: torch.randn_like(value) if value.is_floating_point() else value for name, value in module.state_dict().items()}
    state["tail.weight"] = state["body.weight"]
    state["norm.running_var"] = state["norm.running_var"].abs()
    torch.save(state, folder / "fitting.pt")
    np.savez(folder / "fitting.npz", **{name: value.numpy() for name, value in state.items()})
    for name, content in {
        "code": {"a": torch.zeros(1), "b": Code(str(folder / "mark"))},
        "module": module,
        "nested": {"epoch": 3, "optimizer": {}, "weight": torch.zeros(1)},
        "list": [torch.zeros(1)],
        "expanded": {"a": torch.zeros(1).expand(10**6, 10**6)},
        "sparse": {"a": torch.eye(3).to_sparse()},
    }.items():
        torch.save(content, folder / f"{name}.pt")
    (folder / "truncated.pt").write_bytes((folder / "fitting.pt").read_bytes()[:-100])
    (folder / "random.pt").write_bytes(np.random.default_rng(0).bytes(5000))
    write_bomb(folder)
    (folder / "endless.pt").write_bytes(nested_key())


def write_bomb(folder):
    """Write a small file whose tensor has half a gigabyte once it is decompressed."""
    torch.save({"a": torch.zeros(1)}, folder / "small.pt")
    torch.save({"a": torch.zeros(2**27)}, folder / "large.pt")
    with zipfile.ZipFile(folder / "large.pt") as large, zipfile.ZipFile(folder / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        for entry in large.infolist():
            with large.open(entry) as source, bomb.open(entry.filename, "w", force_zip64=True) as target:
                while piece := source.read(1 << 24):
                    target.write(piece)
    (folder / "large.pt").unlink()


def nested_key():
    """Return a pickle of a mapping with a key whose hash takes 2 ** 60 steps."""
    key = b"\x80\x02)" + b"q\x00h\x00h\x00\x86" * 60 + b"q\x00}h\x00K\x01s."
    return b"".join(pickle.dumps(part, 2) for part in (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {})) + key


CLASSES = 10
if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
