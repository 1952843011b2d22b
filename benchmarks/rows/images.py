"""The image models AlexNet (a second per step) and the small CNN, and checkpoints.

Pure data.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ..contestants import Contestant, Ours, Peer, Reference, Row
from ..workload import Work

Backend = Literal["tf", "torch"]

BACKENDS: tuple[Backend, ...] = ("tf", "torch")

CNN_BATCHES = (16, 64, 256)

ALEXNET = Work("alexnet", "synthetic-images", batch_size=64, learning_rate=0.01, momentum=0.9, warmup=2, fewest_steps=6)
"""512 random images of 3×224×224 and 1000 classes."""

CNN = Work(
    "cnn",
    "synthetic-images:size=32,classes=10,train=51200,test=256",
    batch_size=64,
    learning_rate=0.001,
    warmup=100,
    same_loss=1e-3,
    same_mean=1e-3,
)
"""An epoch is a whole number of batches of each size, which spares the peers the short last batch.

Nothing can be learnt from random images, and at a rate ten times as high the loss leaps within some hundred updates: where it does,
rounding alone sets two programs 3% apart.
"""

CNN_ON_GLYPHS = replace(CNN, data="glyphs", batch_size=16, learning_rate=0.05)

REFERENCE = Reference(8112, "three machines")
"""Examples a second of the CNN with batches of 16 on each of three real machines, as published with the original experiment."""

WITHOUT_STATE = ("--no-save-final",)
"""The peers save nothing, so that a copy of the state would be in our memory alone."""

CHECKPOINT_SECONDS = 30.0


def _alexnet(backend: Backend) -> dict[str, Contestant]:
    """Eight runs of about twenty seconds on two cores.

    A step with bf16 takes half as long, so it has more of them.
    """
    scene, contestants = f"{backend}, AlexNet", {}
    for precision, steps in (("fp32", 12), ("bf16", 18)):
        name = f"{backend} AlexNet {precision}"
        work = replace(ALEXNET, precision=precision)
        contestants[name] = Ours(scene, backend, "sync", 1, steps, WITHOUT_STATE, work)
        contestants[f"{name} loop"] = Peer(scene, f"images/{backend}_alexnet.py", name, steps, losses="level")
    return contestants


def _cnn(backend: Backend) -> dict[str, Contestant]:
    """A scene for each batch size; `model.fit` and Lightning are slower and get half the steps."""
    trainer, script = {"tf": ("model.fit", "images/tf_cnn_fit.py"), "torch": ("Lightning", "images/torch_cnn_lightning.py")}[backend]
    steps = dict(zip(CNN_BATCHES, (12_800, 3200, 800), strict=True))
    contestants: dict[str, Contestant] = {}
    for batch in CNN_BATCHES:
        scene, name = f"{backend}, CNN {batch}", f"{backend} CNN {batch}"
        contestants[name] = Ours(scene, backend, "sync", 1, steps[batch], WITHOUT_STATE, replace(CNN, batch_size=batch))
        contestants[f"{name} loop"] = Peer(scene, f"images/{backend}_cnn.py", name, steps[batch])
        contestants[f"{trainer} CNN {batch}"] = Peer(scene, script, name, steps[batch] // 2)
    return contestants


def _cnn_on_three_nodes(backend: Backend) -> dict[str, Contestant]:
    """The published experiment, with its batch and its limit of steps.

    About 2,000 suffice on glyphs, so a quick pass is not shorter.
    """
    options = (*WITHOUT_STATE, "--until", "accuracy>=0.9", "--eval-every", "250steps")
    work = replace(CNN_ON_GLYPHS, fewest_steps=14_500)
    return {
        f"{backend} CNN ×3": Ours(f"{backend}, CNN, three nodes", backend, "sync", 3, 2500, WITHOUT_STATE, CNN_ON_GLYPHS),
        f"{backend} CNN ×3 to 90%": Ours(f"{backend}, CNN to 90%", backend, "sync", 3, 14_500, options, work),
    }


def _checkpoints(backend: Backend) -> dict[str, Contestant]:
    """Runs of 40 (CNN) to 100 (AlexNet) seconds on two cores, with and without checkpoints."""
    contestants: dict[str, Contestant] = {}
    for model, work, steps in (("CNN", CNN, 17_000), ("AlexNet", replace(ALEXNET, fewest_steps=24), 72)):
        plain = Ours(f"{backend}, {model}, checkpoints", backend, "sync", 1, steps, WITHOUT_STATE, work)
        contestants[f"{backend} {model}, saving"] = replace(plain, checkpoint_seconds=CHECKPOINT_SECONDS)
        contestants[f"{backend} {model}, not saving"] = plain
    return contestants


CONTESTANTS: dict[str, Contestant] = {
    name: contestant
    for make in (_alexnet, _cnn, _cnn_on_three_nodes, _checkpoints)
    for backend in BACKENDS
    for name, contestant in make(backend).items()
}


def _alexnet_rows(backend: Backend) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for precision in ("fp32", "bf16"):
        key, name = f"alexnet-{backend}-{precision}", f"{backend} AlexNet {precision}"
        rows[key] = Row(name, f"{name} loop", "examples_per_second", 0.97)
        rows[f"{key}-memory"] = Row(name, f"{name} loop", "peak_memory_bytes", 1.1, "at_most")
        rows[f"{key}-data-wait"] = Row(name, None, "data_wait_fraction", 0.02, "at_most")
    rows[f"alexnet-{backend}-bf16-over-fp32"] = Row(f"{backend} AlexNet bf16", f"{backend} AlexNet fp32", "examples_per_second", 1.4)
    return rows


def _cnn_rows(backend: Backend) -> dict[str, Row]:
    trainer = {"tf": "model.fit", "torch": "Lightning"}[backend]
    rows: dict[str, Row] = {}
    for batch in CNN_BATCHES:
        key, name = f"cnn-{backend}-{batch}", f"{backend} CNN {batch}"
        rows[key] = Row(name, f"{name} loop", "steps_per_second", 0.97)
        rows[f"{key}-{trainer.rpartition('.')[2].lower()}"] = Row(name, f"{trainer} CNN {batch}", "steps_per_second", 1.5)
    rows[f"cnn-{backend}-3"] = Row(f"{backend} CNN ×3", REFERENCE, "examples_per_second")
    rows[f"cnn-{backend}-3-to-90"] = Row(f"{backend} CNN ×3 to 90%", None, "time_to_target_seconds")
    return rows


def _checkpoint_rows(backend: Backend) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for model, target in (("CNN", 0.99), ("AlexNet", 0.97)):
        key, saving, plain = f"checkpoint-{model.lower()}-{backend}", f"{backend} {model}, saving", f"{backend} {model}, not saving"
        rows[key] = Row(saving, plain, "examples_per_second", target)
        if model == "AlexNet":  # the CNN's state is too small to show
            rows[f"{key}-cost"] = Row(saving, None, "save_cost_seconds", (1 - target) * CHECKPOINT_SECONDS, "at_most")
            rows[f"{key}-stall"] = Row(saving, None, "stall_seconds", 0.1, "at_most")
            rows[f"{key}-memory"] = Row(saving, plain, "tree_memory_bytes", 1.0, "at_most", relation="copies")
    return rows


ROWS: dict[str, Row] = {
    name: row for make in (_alexnet_rows, _cnn_rows, _checkpoint_rows) for backend in BACKENDS for name, row in make(backend).items()
}
