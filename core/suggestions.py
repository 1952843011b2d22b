"""Suggestions for unknown names: the nearest in spelling, or what other tools call it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {  # in PyTorch, TensorFlow, their launchers and trainers, by our name
    "model": ("arch", "architecture", "net", "network name", "model name"),
    "data": ("dataset", "dataset name"),
    "data_dir": ("data path", "data root", "dataset dir", "dataset path", "data folder"),
    "tf": ("tensorflow", "tensor flow", "keras", "tf2"),
    "torch": ("pytorch", "py torch"),
    "backend": ("framework",),
    "sync": ("synchronous", "allreduce", "all reduce", "ddp", "mirrored"),
    "async": ("asynchronous", "parameter server"),
    "until": ("target", "target accuracy", "target loss", "target metric", "stop at"),
    "patience": ("early stopping", "early stopping patience", "early stop"),
    "epochs": ("num epochs", "max epochs", "n epochs", "train epochs", "num train epochs"),
    "examples": ("max examples", "num examples", "samples", "train samples", "max samples"),
    "steps": ("max steps", "num steps", "n steps", "total steps", "train steps", "iterations", "iters", "max iters", "updates"),
    "accumulate": ("gradient accumulation", "gradient accumulation steps", "accumulate grad batches", "accum count", "update freq"),
    "clip_norm": ("gradient clip", "clip grad norm", "max grad norm", "max gradient norm", "gradient clip val", "grad clip", "clipping"),
    "ema_decay": ("ema", "exponential moving average", "moving average decay"),
    "nodes": ("num nodes", "nnodes", "n nodes", "hosts", "num hosts", "machines", "num machines"),
    "procs_per_node": (
        *("workers", "num workers", "n workers", "world size", "nproc", "nproc per node", "num processes", "processes", "tasks per node"),
        *("gpus", "num gpus", "n gpus", "gpus per node", "workers per node"),
    ),
    "ps": ("num ps", "n ps", "parameter servers", "num parameter servers", "servers"),
    "threads": ("num threads", "n threads", "omp num threads", "threads per task", "threads per worker"),
    "cores_per_node": ("cores", "cpus", "num cpus", "cpus per node"),
    "rendezvous": ("master addr", "master address", "master port", "rdzv endpoint", "coordinator", "coordinator address", "init method"),
    "node_rank": ("rank", "node id", "machine rank"),
    "batch_size": ("batch", "bs", "minibatch", "mini batch size", "train batch size", "local batch size", "per device train batch size"),
    "global_batch_size": ("total batch size", "effective batch size"),
    "lr": ("learning rate", "initial lr", "base lr", "init lr", "eta"),
    "optimizer": ("optim", "opt", "optimiser", "solver", "update rule"),
    "sgd": ("stochastic gradient descent", "gradient descent", "gradientdescentoptimizer", "momentum", "nesterov"),
    "adam": ("adamoptimizer",),
    "adamw": ("adam w", "adamweightdecay", "decoupled adam"),
    "weight_decay": ("wd", "l2", "l2 regularization"),
    "beta1": ("adam beta1", "beta 1"),
    "beta2": ("adam beta2", "beta 2"),
    "epsilon": ("eps", "adam epsilon", "adam eps"),
    "schedule": ("scheduler", "lr scheduler", "lr schedule", "lr policy", "lr scheduler type"),
    "schedule_gamma": ("gamma", "lr gamma", "decay rate"),
    "schedule_step_epochs": ("step size", "lr step size", "decay epochs"),
    "warmup_steps": ("warmup", "num warmup steps", "warmup iters"),
    "cosine": ("cosineannealing", "cosineannealinglr", "cosine annealing"),
    "step": ("steplr", "multisteplr"),
    "augment": ("augmentation", "data augmentation", "transforms"),
    "precision": ("mixed precision", "amp", "dtype", "fp16", "bf16"),
    "fp32": ("float32", "float", "single", "32"),
    "fp16": ("float16", "half", "16", "mixed float16", "16 mixed"),
    "bf16": ("bfloat16", "mixed bfloat16", "bf16 mixed"),
    "device": ("accelerator",),
    "gpu": ("cuda", "gpus"),
    "seed": ("random seed", "manual seed", "global seed"),
    "eval_every": ("eval interval", "eval steps", "eval freq", "validate every", "validation interval", "val check interval"),
    "checkpoint_every": ("save every", "save interval", "save steps", "save freq", "checkpoint interval", "checkpoint freq"),
    "max_restarts": ("restarts", "retries", "max retries", "max failures", "elastic"),
    "min_nodes": ("min nnodes", "min workers"),
    "keep": ("max to keep", "save total limit", "keep checkpoints", "keep last"),
    "keep_best": ("save best", "save best only", "load best model at end"),
    "resume": ("resume from", "resume from checkpoint", "load checkpoint", "restore", "ckpt path"),
    "out": ("output", "output dir", "output path", "out dir", "log dir", "save dir", "work dir", "workdir", "logdir", "checkpoint dir"),
    "name": ("run name", "run id"),
    "mlflow": ("tracking uri", "mlflow tracking uri", "mlflow uri"),
    "mlflow_experiment": ("experiment", "experiment name", "mlflow experiment name"),
    "sample_interval": ("monitor interval",),
    "print_config": ("show config", "dump config"),
    "config": ("config file", "config path", "conf", "settings"),
    "json": ("format json",),
    "repeats": ("num runs", "trials", "num seeds", "seeds"),
}
MAX_GIVEN_CHARACTERS = 100  # a longer text is no name with a typing error, and comparing it takes long
MIN_PART = 3  # characters of a name that may match a part of another


def _plain(name: str) -> str:
    return re.sub("[-_ ]", "", name.lower())


_OURS: dict[str, list[str]] = {}  # our words by another tool's, in plain form; a word may be that of a setting and of a value

for _ours, _others in OTHER_NAMES.items():
    for _other in _others:
        _OURS.setdefault(_plain(_other), []).append(_plain(_ours))


def nearest(text: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name nearest to `given` in words or spelling, None if none is close."""
    if len(text) > MAX_GIVEN_CHARACTERS:
        return None
    wanted, words = _plain(text), _words(text)
    names: dict[str, str] = {}
    for name in allowed:
        names.setdefault(_plain(name), name)
    if not wanted:
        return None
    for exact in (wanted, *_OURS.get(wanted, ())):
        if exact in names:
            return names[exact]
    for name in names.values():
        if len(words) > 1 and words == _words(name):
            return name
    slips = {name: count for name in names if (count := _edit_distance(wanted, name)) <= _max_slips(wanted, name)}
    if slips:
        return names[min(slips, key=lambda name: (slips[name], not name.startswith(wanted)))]
    parts = [name for name, ours in names.items() if _has_prefix(wanted, name) or words <= _words(ours)]
    return names[min(parts, key=lambda name: abs(len(name) - len(wanted)))] if parts else None


def did_you_mean(text: str, allowed: Iterable[str]) -> str:
    """Return the sentence that suggests the nearest allowed name, with a leading space, if any."""
    near = nearest(text, allowed)
    return f" Did you mean {near!r}?" if near else ""


def _has_prefix(first: str, second: str) -> bool:
    shorter, longer = sorted((first, second), key=len)
    return len(shorter) >= MIN_PART and longer.startswith(shorter)


def _words(name: str) -> set[str]:
    return {word for word in re.split(r"[-_+ ]+", name.lower()) if len(word) >= MIN_PART} or {name}


def _max_slips(first: str, second: str) -> int:
    """Return the allowed typing errors: one in short names, none if little would remain."""
    shorter = min(len(first), len(second))
    return 0 if shorter < 2 else max(1, shorter // 3) if shorter > 2 else int(first[0] == second[0])


def _edit_distance(first: str, second: str) -> int:
    """Return the edit distance, with a swap as one edit (optimal string alignment)."""
    two_before: list[int] = []
    before = list(range(len(second) + 1))
    for row, character in enumerate(first, start=1):
        now = [row]
        for column, wanted in enumerate(second, start=1):
            best = min(before[column] + 1, now[column - 1] + 1, before[column - 1] + (character != wanted))
            if row > 1 and column > 1 and character == second[column - 2] and first[row - 2] == wanted:
                best = min(best, two_before[column - 2] + 1)
            now.append(best)
        two_before, before = before, now
    return before[-1]
