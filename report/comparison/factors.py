"""A table of everything in which runs can differ, with the figures that such a difference makes incomparable, and the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..catalog.run import Run
from ..catalog.translations import signature_at_the_end, signature_while_training
from . import factor_values as read
from .ordering import BY_FIELD, by_saving, natural

__all__ = ["CHOSEN", "GROUPS", "RULES", "Factor"]

SPEED, STEPS, TIME, LOSS, METRICS, TRANSLATIONS, AT_THE_END, TARGET, RESOURCES = GROUPS = (
    "speed",
    "steps/s",
    "run time",
    "loss",
    "metrics",
    "translations",
    "translations at the end",
    "time to target",
    "resources",
)
"""Kinds of figures that become incomparable together. ``speed`` is examples/s; `Comparability.called` says which metrics the runs have.

``translations`` are the metrics of the translations that are made while a run trains, ``metrics`` those that need none.
"""

ALL = frozenset(GROUPS)
WORK = frozenset({SPEED, STEPS, TIME, TARGET, RESOURCES})
CLOCK = WORK - {RESOURCES}
LEARNT = frozenset({LOSS, METRICS, TRANSLATIONS, AT_THE_END})
LEARNING = LEARNT | {TARGET}
NOTHING: frozenset[str] = frozenset()

MEASURED = frozenset({"test_size", "translation_signature", "translation_signature_at_the_end"})
"""Settings of how is measured what was learnt, which do not change it."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A setting or circumstance in which two runs may differ.

    `value` is hashable; None where it was not recorded or does not apply, and then it counts as alike. `confounds` are the `GROUPS` that a
    difference makes not comparable, `why` says so in a few words. An `independent` factor is what runs are usually compared for: its
    difference is no fault. Values are compared only among runs alike in the factor whose key is `given`. `expected` ones should be there
    for every run, so that a lack has to be told. `order` gives what puts values in order. No figure depends on a setting that does not
    matter (`matters`): its difference is no fault, and only keeps runs apart. What else a difference confounds for a run says `also`.
    """

    key: str
    label: str
    value: Callable[[Run], Any]
    confounds: frozenset[str]
    why: str
    independent: bool = False
    given: str | None = None
    show: Callable[[Any], str] = read.shown
    expected: bool = False
    order: Callable[[Any], Any] = natural
    matters: bool = True
    also: Callable[[Run], frozenset[str]] | None = None

    def changes_learning(self, *runs: Run) -> bool:
        """Return whether these runs train differently where they differ in it: other updates, or another order or number of them."""
        if self.key in MEASURED:
            return False
        return bool(self.spoils(*runs) & LEARNT) or self.key in ("mode", "global_batch_size", "batch_size", "update_examples")

    def spoils(self, *runs: Run) -> frozenset[str]:
        """Return the kinds of figures of these runs that a difference between them makes not comparable."""
        return self.confounds if self.also is None else self.confounds.union(*map(self.also, runs))


def _independent(key: str, label: str, why: str, *, summary: str = "", confounds: frozenset[str] = NOTHING) -> Factor:
    return Factor(key, label, read.summary_field(summary or key), confounds, why, independent=True)


def _learning(key: str, label: str, applies: Callable[[Run], bool] | None = None) -> Factor:
    value = read.job_field(key) if applies is None else read.job_field_if(key, applies)
    return Factor(key, label, value, LEARNING, "trajectories differ")


def _beside(key: str, label: str, otherwise: str | None = None) -> Factor:
    value = read.job_field(key) if otherwise is None else read.job_field_or(key, otherwise)
    return Factor(key, label, value, NOTHING, "no figure depends on it", matters=False)


def _by_step(run: Run) -> bool:
    return run.job.get("schedule") == "step"


def _judged_by_translations(run: Run) -> frozenset[str]:
    return frozenset({TARGET}) if read.judged_by_translations(run) else NOTHING


def _ended_by_target(run: Run) -> frozenset[str]:
    return LEARNT | {TIME} if run.summary.get("target_reached") else NOTHING


def _ended_by_patience(run: Run) -> frozenset[str]:
    return LEARNING | {TIME} if read.ended_by_patience(run) else NOTHING


_ANOTHER_SCORE = "BLEU with another search, tokenizer, version or other sentences is not comparable"
_AN_UPDATE = frozenset({STEPS})
_PAUSES = frozenset({TIME, TARGET})
_TRANSLATING = "translating takes time"
_CORES = "the number of cores differs"
_GIVES_UP = "it only decides when a run fails"

_INDEPENDENT = (
    _independent("backend", "backend", "data order, initial values and formulas are the same on both"),
    _independent("mode", "mode", "an update is of the global batch in sync, of one worker's batch in async", confounds=_AN_UPDATE),
    _independent("nodes", "nodes", "--by nodes gives speed-up and efficiency"),
    _independent("workers", "workers", "they share the global batch, or make it larger"),
    _independent("ps", "parameter servers", "they share the parameters", summary="parameter_servers"),
    Factor("global_batch_size", "global batch", read.batch("global_batch_size"), NOTHING, "of all workers together", independent=True),
    Factor("batch_size", "batch per worker", read.batch("batch_size"), NOTHING, "larger batches keep a worker busier", independent=True),
    Factor(
        "update_examples",  # what the settings above come to, so it tells no runs apart that they do not
        "examples of an update",
        read.update_examples,
        _AN_UPDATE,
        "steps/s count other amounts of work; loss and metrics after as many epochs differ by design",
        independent=True,
        given="mode",
    ),
)

_LEARNING = (
    Factor("model", "model", read.summary_field("model"), ALL, "another network computes and learns differently"),
    Factor("data", "data", read.summary_field("data"), LEARNING, "training and evaluation use other examples"),
    Factor(
        "digest", "contents of the data", read.dataset("digest"), LEARNING, "other examples under one name", given="data", expected=True
    ),
    Factor("shape", "shape of the data", read.shape, WORK, "an example of another shape is another amount of work"),
    Factor("train_size", "training split", read.dataset("sizes", "train"), frozenset({RESOURCES}), "it is held in memory"),
    Factor("test_size", "evaluation split", read.evaluated, LEARNING, "the evaluations are over other examples"),
    Factor(
        "seed",
        "seed",
        read.summary_field("seed"),
        LEARNING,
        "results also differ by chance; compare means over several seeds (--repeats)",
        show=read.shown_seeds,
    ),
    Factor("optimizer", "optimizer", read.job_field("optimizer"), ALL, "another update rule has another cost and trajectory"),
    _learning("batch_tokens", "tokens of a batch"),
    _learning("lr", "learning rate"),
    _learning("momentum", "momentum", read.by_sgd),
    _learning("nesterov", "Nesterov momentum", read.by_sgd),
    _learning("weight_decay", "weight decay"),
    _learning("clip_norm", "gradient clipping norm"),
    _learning("beta1", "beta1", read.by_adam),
    _learning("beta2", "beta2", read.by_adam),
    _learning("epsilon", "epsilon", read.by_adam),
    _learning("schedule", "schedule"),
    _learning("schedule_step_epochs", "epochs between decays", _by_step),
    _learning("schedule_gamma", "decay", _by_step),
    _learning("schedule_coefficient", "factor of the schedule", lambda run: run.job.get("schedule") == "noam"),
    _learning("warmup_steps", "warm-up"),
    _learning("scale_lr", "learning-rate scaling"),
    _learning("base_batch_size", "batch of the learning rate", lambda run: run.job.get("scale_lr") != "none"),
    Factor(
        "ema_decay",
        "moving average of the weights",
        read.job_field("ema_decay"),
        ALL,
        "evaluations use the average, which takes time and memory",
    ),
    Factor("augment", "augmentation", read.job_field("augment"), ALL, "augmentation takes time and changes the training images"),
    Factor("precision", "precision", read.precision, ALL, "other arithmetic differs in speed and rounding"),
    Factor(
        "budget",
        "budget",
        read.budget,
        LEARNT | {TIME},
        "a longer run learns more",
        show=read.shown_budget,
    ),
    Factor(
        "until",
        "target",
        read.job_field_or("until", "none"),
        frozenset({TARGET}),
        "a run stops at its target",
        order=BY_FIELD["until"],
        also=_ended_by_target,
    ),
    Factor(
        "patience",
        "patience",
        read.job_field("patience"),
        NOTHING,
        "early stopping may end the run",
        also=_ended_by_patience,
    ),
    Factor(
        "translation_signature",
        "how translations are made and scored",
        signature_while_training,
        frozenset({TRANSLATIONS}),
        _ANOTHER_SCORE,
        also=_judged_by_translations,
    ),
    Factor(
        "translation_signature_at_the_end",
        "how translations at the end are made and scored",
        signature_at_the_end,
        frozenset({AT_THE_END}),
        _ANOTHER_SCORE,
    ),
    Factor("eval_sentences", "sentences an evaluation translates", read.job_field("eval_sentences"), _PAUSES, _TRANSLATING),
    Factor("beam", "beam", read.job_field("beam"), frozenset({TIME}), "the final translation takes time"),
    Factor("length_penalty", "length penalty", read.job_field("length_penalty"), NOTHING, "it only affects the final translations"),
    Factor(
        "eval_every",
        "evaluations",
        read.job_field("eval_every"),
        _PAUSES,
        "they take time, and targets are only checked there",
        order=BY_FIELD["eval_every"],
    ),
    Factor(
        "checkpoints",
        "checkpoints",
        read.saving,
        _PAUSES | {RESOURCES},
        "they pause training and take memory",
        show=read.shown_saving,
        order=by_saving,
    ),
)

_MACHINE = (
    Factor("threads", "threads per task", read.threads, WORK, "the number of compute threads differs"),
    Factor("cpu", "processor", read.host("cpu_model"), WORK, "another processor", expected=True),
    Factor("cores", "cores available", read.cores, WORK, _CORES, expected=True),
    Factor("cores_per_node", "limit of cores", read.job_field_or("cores_per_node", "none"), WORK, _CORES),
    Factor(
        "sharing",
        "nodes sharing cores",
        read.summary_field("nodes_sharing_cores"),
        WORK,
        "nodes that share cores are slower than separate machines (virtual nodes: --cores-per-node)",
    ),
    Factor("memory", "memory", read.memory, frozenset({RESOURCES}), "nodes with other memory", show=read.shown_bytes, expected=True),
    Factor("gpus", "GPUs", read.gpus, WORK, "other processors"),
    Factor("device", "device", read.device, WORK, "computed elsewhere"),
    Factor("kernel", "kernel", read.host("kernel"), WORK, "another kernel schedules and sends differently", expected=True),
    Factor("network", "network", read.network, WORK, "other links, counted at another place"),
    Factor("bandwidth", "bandwidth", read.bandwidth, WORK, "faster or slower links", show=read.shown_bandwidth),
    Factor("link", "link speed in bit/s", read.link, WORK, "faster or slower links"),
    Factor("framework", "framework version", read.framework, WORK, "it may be faster or slower", given="backend", expected=True),
    Factor("trainer", "trainer version", read.package("crosstrain"), ALL, "it may train and count differently", expected=True),
    Factor("python", "Python version", read.host("python"), CLOCK, "it may be faster or slower", expected=True),
    Factor(
        "distributed",
        "distributed wrapper",
        read.job_field_if("distributed", read.single_process),
        WORK,
        "the framework's wrapper takes time",
    ),
    Factor(
        "exchange",
        "exchange of gradients",
        read.exchange,
        WORK,
        "frameworks' collectives take longer for small messages",
    ),
    Factor("compile", "compiled steps", read.compiled, WORK, "compiled steps differ in speed and rounding"),
    Factor("steps_per_call", "steps per call", read.job_field_or("steps_per_call", "the backend's choice"), WORK, "fused steps cost less"),
    Factor("accumulate", "micro-batches", read.job_field("accumulate"), WORK, "a worker computes its batch in another number of parts"),
    Factor("deterministic", "deterministic kernels", read.job_field("deterministic"), WORK, "reproducible kernels are slower"),
    Factor("profile", "profiled steps", read.job_field("profile"), NOTHING, "speeds exclude them, and the run is marked"),
    Factor(
        "sample_interval", "sampling interval", read.job_field("sample_interval"), frozenset({RESOURCES}), "more samples find higher peaks"
    ),
    Factor("start_timeout", "time limit of the start", read.job_field("start_timeout"), NOTHING, _GIVES_UP),
    Factor("stall_timeout", "time limit of a stall", read.job_field("stall_timeout"), NOTHING, _GIVES_UP),
    Factor("node_timeout", "time limit of a silent node", read.job_field("node_timeout"), NOTHING, _GIVES_UP),
    Factor("max_restarts", "maximum restarts", read.job_field("max_restarts"), NOTHING, _GIVES_UP),
    Factor("restart_window", "time within which restarts count", read.job_field_or("restart_window", "the run"), NOTHING, _GIVES_UP),
    Factor("min_nodes", "minimum nodes", read.job_field_or("min_nodes", "all"), NOTHING, _GIVES_UP),
    Factor(
        "spare_processes",
        "spare processes",
        read.job_field("spare_processes"),
        frozenset({RESOURCES}),
        "they take memory, and cores to load",
    ),
    Factor("on_nan", "action on a non-finite loss", read.job_field("on_nan"), NOTHING, _GIVES_UP),
)

_BESIDE = (
    _beside("calibrate", "calibration"),
    _beside("keep", "checkpoints kept"),
    _beside("keep_best", "best checkpoint kept by", "none"),
    _beside("keep_best_count", "best checkpoints kept"),
    _beside("launcher", "launcher"),
    _beside("mllog", "MLPerf's log"),
    _beside("monitor", "samples of resources"),
    _beside("tensorboard", "TensorBoard's files"),
)

CHOSEN: tuple[Factor, ...] = (*_INDEPENDENT, *_LEARNING)
"""What somebody who compares runs has chosen for them, and would call them by."""

RULES: tuple[Factor, ...] = (*CHOSEN, *_MACHINE, *_BESIDE)
"""In the order in which differences are told: first what runs are usually compared for, last what does not matter."""
