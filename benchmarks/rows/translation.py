"""The Transformer: target tokens per second, without padding. Pure data.

Batches have sentences of similar length.
"""

from __future__ import annotations

from dataclasses import replace

from ..contestants import Contestant, Ours, Peer, Reference, Row
from ..generated_text import DATA
from ..workload import Work
from .images import BACKENDS, WITHOUT_STATE, Backend

PRECISIONS = ("fp32", "bf16")

TINY = Work(
    "transformer:tiny",
    DATA,
    batch_size=None,
    batch_tokens=2048,
    learning_rate=1e-4,
    warmup=10,
    fewest_steps=20,
    optimizer="adam",
    beta2=0.98,
    epsilon=1e-9,
    same_loss=1e-3,
    same_mean=1e-3,
)

BASE = replace(TINY, model="transformer:base", batch_tokens=512, warmup=2, fewest_steps=4, most_repeats=3)

TINY_STEPS, BASE_STEPS = 50, 10

TINY_OPTIONS, BASE_OPTIONS = (*WITHOUT_STATE, "--steps-per-call", "10"), (*WITHOUT_STATE, "--steps-per-call", "2")
"""Steps between results, so that the clock can start after the warm-up."""

BY_HAND = {
    "torch": ("translation/torch_transformer.py", ("by hand", "nn.Transformer")),
    "tf": ("translation/tf_transformer.py", ("by hand",)),
}
"""A backend's hand-written loop, and its variants."""

TRAINERS, TRAINERS_REPEATS = (
    {"Lightning": "translation/torch_transformer_lightning.py", "MarianMT": "translation/torch_marian_trainer.py"},
    3,
)
"""Trainers that a user would pick, and their maximum number of repeats: they are far behind."""


def _by_hand(backend: Backend, name: str, scene: str, steps: int, *, exact: bool) -> dict[str, Contestant]:
    """Return the hand-written loops.

    Dropout differs between frameworks: without it they must have the same losses.
    """
    script, variants = BY_HAND[backend]
    losses = "each" if exact else "level"
    return {f"{name} {variant}": Peer(scene, script, name, steps, variant=variant, losses=losses) for variant in variants}


def _trained(backend: Backend, size: str, precision: str) -> dict[str, Contestant]:
    """A model of a size, with its dropout; torch also against two popular trainers."""
    work, steps, options = (TINY, TINY_STEPS, TINY_OPTIONS) if size == "tiny" else (BASE, BASE_STEPS, BASE_OPTIONS)
    name = scene = f"{backend} {size} {precision}"
    contestants: dict[str, Contestant] = {name: Ours(scene, backend, "sync", 1, steps, options, replace(work, precision=precision))}
    contestants |= _by_hand(backend, name, scene, steps, exact=False)
    if backend == "torch":
        for trainer, script in TRAINERS.items():
            contestants[f"{trainer} {size} {precision}"] = Peer(scene, script, name, steps, losses="level", most_repeats=TRAINERS_REPEATS)
    return contestants


def _without_dropout(backend: Backend, precision: str) -> dict[str, Contestant]:
    """Return contestants without dropout, whose losses must agree at every update.

    bf16 rounds more. One repeat is enough for that.
    """
    same = 1e-3 if precision == "fp32" else 3e-3
    work = replace(TINY, model="transformer:tiny?dropout=0", precision=precision, same_loss=same, same_mean=same, most_repeats=1)
    name = scene = f"{backend} tiny {precision}, no dropout"
    contestants: dict[str, Contestant] = {name: Ours(scene, backend, "sync", 1, TINY_STEPS, TINY_OPTIONS, work)}
    contestants |= _by_hand(backend, name, scene, TINY_STEPS, exact=True)
    if backend == "torch":
        contestants[f"Lightning tiny {precision}, no dropout"] = Peer(scene, TRAINERS["Lightning"], name, TINY_STEPS)
    return contestants


NODES, LINK, LINK_BYTES_PER_SECOND = 3, "1gbit", 125e6

BASE_PARAMETERS = 48_199_680
"""Of `base` with 8,000 pieces: what an update exchanges, 4 bytes each."""

RING = Reference(2 * (NODES - 1) / NODES * 4 * BASE_PARAMETERS / LINK_BYTES_PER_SECOND, "a ring all-reduce at the speed of the link")
"""Each node sends and receives 2 (n − 1) / n times the bytes of the gradients (Patarasuk and Yuan 2009)."""

EXCHANGES: dict[str, tuple[str, ...]] = {"": (), "-direct": ("--exchange", "direct")}
"""Suffixes of the rows of exchanges, and their options."""

NETWORK: dict[str, Contestant] = {
    f"{backend} base ×3{named}": Ours(
        f"{backend}, base, three nodes{named}",
        backend,
        "sync",
        NODES,
        4,
        (*BASE_OPTIONS, "--bandwidth", LINK, *options),
        replace(BASE, fewest_steps=4),
    )
    for backend in BACKENDS
    for named, options in EXCHANGES.items()
}

DECODING = replace(TINY, warmup=2, fewest_steps=4, same_loss=1e-4, same_mean=1e-4)
"""A step translates 32 sentences."""

DECODERS: dict[str, Contestant] = {
    "torch tiny decoding": Ours(
        "torch, decoding", "torch", "sync", 1, 10, (), DECODING, script="translation/torch_decoding.py", variant="cached"
    ),
    "torch tiny decoding without cache": Peer(
        "torch, decoding", "translation/torch_decoding.py", "torch tiny decoding", 10, variant="uncached"
    ),
    "CTranslate2 tiny decoding": Peer("torch, decoding", "translation/ctranslate2_decoding.py", "torch tiny decoding", 10),
}

CONTESTANTS: dict[str, Contestant] = {
    **DECODERS,
    **NETWORK,
    **{
        name: contestant
        for backend in BACKENDS
        for precision in PRECISIONS
        for part in (
            _without_dropout(backend, precision),
            _trained(backend, "tiny", precision),
            _trained(backend, "base", precision),
        )
        for name, contestant in part.items()
    },
}


def _trainers(backend: Backend, further: str) -> tuple[str, ...]:
    """Return the trainers compared by speed with the hand-written loops.

    MarianMT is another model, so its losses are not compared.
    """
    return () if backend != "torch" else ("Lightning",) if further else tuple(TRAINERS)


def _speed_rows(backend: Backend, size: str, precision: str, further: str = "") -> dict[str, Row]:
    key, name = (
        f"translation-{size}-{backend}-{precision}{further.replace(', ', '-').replace(' ', '-')}",
        f"{backend} {size} {precision}{further}",
    )
    rows: dict[str, Row] = {}
    for variant in BY_HAND[backend][1]:
        rows[key if variant == "by hand" else f"{key}-nn"] = Row(name, f"{name} {variant}", "target_tokens_per_second", 1.0)
    for trainer in _trainers(backend, further):
        rows[f"{key}-{trainer.removesuffix('MT').lower()}"] = Row(
            name, f"{trainer} {size} {precision}{further}", "target_tokens_per_second", 1.3
        )
    return rows


ROWS: dict[str, Row] = {
    **{
        name: row
        for backend in BACKENDS
        for precision in PRECISIONS
        for size, further in (("tiny", ""), ("tiny", ", no dropout"), ("base", ""))
        for name, row in _speed_rows(backend, size, precision, further).items()
    },
    **{
        f"translation-exchange-{backend}{named}": Row(f"{backend} base ×3{named}", RING, "exchange_seconds", 1.2, "at_most")
        for backend in BACKENDS
        for named in EXCHANGES
    },
    "translation-decoding-cache": Row("torch tiny decoding", "torch tiny decoding without cache", "target_tokens_per_second", 5.0),
    "translation-decoding-ctranslate2": Row("torch tiny decoding", "CTranslate2 tiny decoding", "target_tokens_per_second"),
    **{f"translation-{size}-padding": Row(f"torch {size} fp32", None, "padding_share", 0.25, "at_most") for size in ("tiny", "base")},
}
