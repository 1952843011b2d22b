"""Translation: target tokens per second of the Transformer; decoding; the exchange of three nodes; the large size on a GPU. Pure data.

`tiny` has batches of 2,048 target tokens, `base` of 512. Nothing is dropped, so that a peer has to find the same losses; beside it, `tiny`
with dropout, where only their level is alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from .contestants import Contestant, Ours, Peer, Row
from .parallel_text import TEXT
from .workload import Work

__all__ = ["BASE", "BIG", "CONTESTANTS", "GPU_CONTESTANTS", "GPU_ROWS", "ROWS", "TINY"]

Backend = Literal["tf", "torch"]

BACKENDS: tuple[Backend, ...] = ("tf", "torch")

PRECISIONS = ("fp32", "bf16")

TINY = Work(
    "transformer:tiny?dropout=0",
    TEXT,
    batch_size=0,
    learning_rate=3e-4,
    warmup=10,
    fewest_steps=10,
    same_loss=1e-3,
    same_mean=1e-3,
    batch_tokens=2048,
    optimizer="adam",
    beta2=0.98,
    epsilon=1e-9,
)
"""A constant rate: the schedule costs nothing that could be measured, and the peers need none."""

BASE = replace(TINY, model="transformer:base?dropout=0", batch_tokens=512, learning_rate=1e-4, warmup=2, fewest_steps=4, most_repeats=3)

BIG = replace(TINY, model="transformer:big?dropout=0", batch_tokens=8192, learning_rate=1e-4, warmup=20, precision="bf16")

STEPS = {"tiny": 60, "base": 10}

OPTIONS = ("--no-save-final", "--beam", "1")
"""The peers save nothing, and translate nothing at the end."""

LINK = ("--bandwidth", "1gbit")

DECODED = 3
"""Batches of sentences that are translated, in the rows of decoding."""


def _training(backend: Backend) -> dict[str, Contestant]:
    """A scene for each size and precision."""
    found: dict[str, Contestant] = {}
    for size, work in (("tiny", TINY), ("base", BASE)):
        for precision in PRECISIONS:
            name, steps = f"{backend} {size} {precision}", STEPS[size]
            scene = f"{backend}, {size} {precision}"
            found[name] = Ours(scene, backend, "sync", 1, steps, OPTIONS, replace(work, precision=precision))
            found[f"{name} loop"] = Peer(scene, f"{backend}_transformer.py", name, steps)
            if backend == "torch":
                found[f"{name} nn.Transformer"] = Peer(scene, "torch_transformer.py", name, steps, variant="modules")
                found[f"{name} Lightning"] = Peer(scene, "torch_transformer_lightning.py", name, steps)
                found[f"{name} Marian"] = Peer(scene, "torch_marian_trainer.py", name, steps, losses="none")
    return found


def _dropping(backend: Backend) -> dict[str, Contestant]:
    """With the size's own dropout, which each side draws as it likes."""
    scene, name = f"{backend}, tiny dropping", f"{backend} tiny dropping"
    return {
        name: Ours(scene, backend, "sync", 1, STEPS["tiny"], OPTIONS, replace(TINY, model="transformer:tiny")),
        f"{name} loop": Peer(scene, f"{backend}_transformer.py", name, STEPS["tiny"], losses="level"),
    }


def _on_three_nodes(backend: Backend) -> dict[str, Contestant]:
    """A step computes for seconds, the exchange of 200 MB takes two more."""
    return {f"{backend} base ×3": Ours(f"{backend}, base, three nodes", backend, "sync", 3, 4, (*OPTIONS, *LINK), BASE)}


def _decoding(backend: Backend) -> dict[str, Contestant]:
    """Scripts that decode, in the scene of a run that tells them their threads; the first is the product's own decoder."""
    if backend == "tf":
        return {}
    scene, like = "torch, tiny fp32", "torch tiny fp32"
    scripts = {"decoding": ("torch_decoding.py", "cached"), "decoding anew": ("torch_decoding.py", "anew")}
    scripts["CTranslate2"] = ("ctranslate2_decoding.py", "")
    return {
        f"torch tiny {name}": Peer(scene, script, like, DECODED, losses="none", variant=variant)
        for name, (script, variant) in scripts.items()
    }


CONTESTANTS: dict[str, Contestant] = {
    name: contestant
    for make in (_training, _decoding, _dropping, _on_three_nodes)
    for backend in BACKENDS
    for name, contestant in make(backend).items()
}


def _rows(backend: Backend) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for size in STEPS:
        for precision in PRECISIONS:
            key, name = f"{size}-{backend}-{precision}", f"{backend} {size} {precision}"
            rows[key] = Row(name, f"{name} loop", "tokens_per_second", 1.0)
            if backend == "torch":
                rows[f"{key}-modules"] = Row(name, f"{name} nn.Transformer", "tokens_per_second", 1.0)
                rows[f"{key}-lightning"] = Row(name, f"{name} Lightning", "tokens_per_second", 1.3)
                rows[f"{key}-marian"] = Row(name, f"{name} Marian", "tokens_per_second", 1.3)
        rows[f"{size}-{backend}-padding"] = Row(f"{backend} {size} fp32", None, "padding_share", 0.25, "at_most")
    rows[f"tiny-{backend}-dropout"] = Row(f"{backend} tiny dropping", f"{backend} tiny dropping loop", "tokens_per_second", 1.0)
    if backend == "torch":
        rows["decoding-torch-cache"] = Row("torch tiny decoding", "torch tiny decoding anew", "tokens_per_second", 5.0)
        rows["decoding-torch-ctranslate2"] = Row("torch tiny decoding", "torch tiny CTranslate2", "tokens_per_second")
    rows[f"base-{backend}-3-exchange"] = Row(f"{backend} base ×3", None, "exchange_over_bound", 1.2, "at_most")
    return rows


ROWS: dict[str, Row] = {name: row for backend in BACKENDS for name, row in _rows(backend).items()}

GPU_CONTESTANTS: dict[str, Contestant] = {
    "big on the GPU": Ours("GPU, big", "torch", "sync", 1, 200, (*OPTIONS, "--device", "gpu"), BIG, gpu=True),
    "big on the GPU, loop": Peer("GPU, big", "torch_transformer.py", "big on the GPU", 200, losses="level", gpu=True),
    "big's products alone": Peer("GPU, big", "torch_gpu_ceiling.py", "big on the GPU", 200, losses="none", gpu=True),
}

GPU_ROWS: dict[str, Row] = {
    "gpu-big": Row("big on the GPU", "big on the GPU, loop", "tokens_per_second", 0.97),
    "gpu-big-ceiling": Row("big on the GPU", "big's products alone", "tokens_per_second"),
}
