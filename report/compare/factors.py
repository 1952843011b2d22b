"""Settings and circumstances in which runs differ, and the figures that each confounds."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.job import PAUSES
from ...core.setting import (
    ALL,
    AT_THE_END,
    LEARNING,
    LEARNT,
    LOSS,
    NOTHING,
    RESOURCES,
    STEPS,
    TARGET,
    TIME,
    TRANSLATIONS,
    WORK,
    Requirement,
)
from ...core.settings.job_fields import DECLARED
from ...core.units import Cadence, Target, parse_bandwidth
from ..runs.run import Run
from ..runs.translation_scores import signature_at_the_end, signature_while_training
from . import factor_values as read

MAX_NAMED = 4
_COUNTED = frozenset({"nodes", "workers", "parameter servers"})
_SWITCHES = frozenset({"on", "off", "true", "false", "none"})


def setting_text(label: str, text: str) -> str:
    """Return a setting in a name: numbers and switches with their label, such as ``lr 0.1``."""
    if label in _COUNTED and text.replace(",", "").isdigit():
        return f"{text} {label.removesuffix('s') if text == '1' else label}"
    speaks = text.replace("-", "").isalpha() and text not in _SWITCHES
    return text if speaks else f"{label} {text}"


def some_of(names: Sequence[str]) -> str:
    """Return names in a row, of many the first few and a count."""
    more = [f"{len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
    return ("; " if any("," in name for name in names) else ", ").join([*names[:MAX_NAMED], *more])


_UNITS = ("steps", "seconds", "epochs", "end")


def natural(value: Any) -> tuple[Any, ...]:
    """Return a sort key: numbers, then lists by elements, then texts with numbers as numbers."""
    if isinstance(value, int | float):
        return 0, value
    if isinstance(value, tuple | list):
        return (1, *map(natural, value))
    parts = re.split("([0-9]+)", str(value))
    return (2, *(int(part) if index % 2 else part for index, part in enumerate(parts)))


def by_cadence(text: str) -> tuple[int, float]:
    """Return a sort key of ``500steps``, ``30s``, ``1epoch`` and ``end``, by unit and amount."""
    cadence = Cadence.parse(text)
    return _UNITS.index(cadence.unit), cadence.amount


def by_saving(value: tuple[str, bool]) -> tuple[Any, ...]:
    """Return a sort key of `factor_values.saving`, from often to never."""
    every, at_end = value
    return (*by_cadence(every), not at_end)


def by_target(text: str) -> tuple[Any, ...]:
    """Return a sort key of goals by figure and value; ``none`` comes first."""
    if text == "none":
        return (0,)
    target = Target.parse(text)
    return 1, target.metric, target.comparison, target.value


BY_FIELD: Mapping[str, Callable[[Any], Any]] = {
    "bandwidth": parse_bandwidth,
    "checkpoint_every": by_cadence,
    "eval_every": by_cadence,
    "until": by_target,
}  # for text fields that mean amounts
CLOCK = WORK - {RESOURCES}
# Settings of the evaluation, without effect on training.
MEASURED = frozenset({"test_size", "translation_signature", "translation_signature_at_the_end"})


@dataclass(frozen=True, slots=True)
class Factor:
    """A setting or circumstance in which two runs may differ."""

    key: str
    label: str
    value: Callable[[Run], Any]  # hashable; None (unrecorded or not applicable) equals any value
    confounds: frozenset[str]  # the `GROUPS` that a difference makes incomparable
    why: str  # reason, in a few words
    independent: bool = False  # an experimental variable, whose difference is no fault
    given: str | None = None  # key of a factor; values are compared only among runs equal in it
    show: Callable[[Any], str] = read.shown
    expected: bool = False  # reported if missing
    order: Callable[[Any], Any] = natural  # sort key
    matters: bool = True  # else it affects no figure, and only keeps runs apart
    also: Callable[[Run], frozenset[str]] | None = None  # further confounded groups of a run
    always: frozenset[str] = NOTHING  # groups that an intended difference confounds, too

    def changes_learning(self, *runs: Run) -> bool:
        """Return whether a difference between these runs changes their updates or order."""
        if self.key in MEASURED:
            return False
        return bool(self.confounded_groups(*runs) & LEARNT) or self.key in ("mode", "global_batch_size", "batch_size", "update_examples")

    def confounded_groups(self, *runs: Run) -> frozenset[str]:
        """Return the kinds of figures that a difference between these runs confounds."""
        return self.confounds if self.also is None else self.confounds.union(*map(self.also, runs))


def _independent(key: str, label: str, why: str, *, summary: str = "", confounds: frozenset[str] = NOTHING) -> Factor:
    return Factor(key, label, read.summary_field(summary or key), confounds, why, independent=True)


def _declared(key: str) -> Factor:
    rule = DECLARED[key].compare
    if rule is None:
        raise KeyError(f"the setting {key} declares no comparison rule")
    value = read.job_field(key, rule.none, None if rule.only_if is None else _meeting(rule.only_if))
    order, always = BY_FIELD.get(key, natural), frozenset({LOSS}) if key == "loss" else NOTHING
    return Factor(key, rule.label, value, rule.confounds, rule.why, order=order, matters=rule.matters, always=always)


def _meeting(requirement: Requirement) -> Callable[[Run], bool]:
    return lambda run: requirement.field in run.job and requirement.holds(run.job)


def _judged_by_translations(run: Run) -> frozenset[str]:
    return frozenset({TARGET}) if read.judged_by_translations(run) else NOTHING


def _ended_by_target(run: Run) -> frozenset[str]:
    return LEARNT | {TIME} if run.summary.get("target_reached") else NOTHING


def _ended_by_patience(run: Run) -> frozenset[str]:
    return LEARNING | {TIME} if read.ended_by_patience(run) else NOTHING


_ANOTHER_SCORE = "BLEU with another search, tokenizer, version or other sentences is not comparable"
_AN_UPDATE = frozenset({STEPS})
_CORES = "the number of cores differs"
_INDEPENDENT = (
    _independent("backend", "backend", "data order, initial values and formulas are the same on both"),
    _independent("mode", "mode", "an update is of the global batch in sync, of one worker's batch in async", confounds=_AN_UPDATE),
    _independent("nodes", "nodes", "--by nodes gives speed-up and efficiency"),
    _independent("workers", "workers", "they share the global batch, or make it larger"),
    _independent("ps", "parameter servers", "they share the parameters", summary="parameter_servers"),
    Factor("global_batch_size", "global batch", read.batch("global_batch_size"), NOTHING, "of all workers together", independent=True),
    Factor("batch_size", "batch per worker", read.batch("batch_size"), NOTHING, "larger batches keep a worker busier", independent=True),
    Factor(
        "update_examples",  # follows from the settings above
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
    Factor("test_size", "evaluation split", read.summary_field("eval", "examples"), LEARNING, "the evaluations are over other examples"),
    Factor(
        "seed",
        "seed",
        read.summary_field("seed"),
        LEARNING,
        "results also differ by chance; compare means over several seeds (--repeats)",
        show=read.shown_seeds,
    ),
    Factor("initial_weights", "initial weights", read.initial_weights, LEARNING, "training begins elsewhere"),
    *map(
        _declared,
        (
            *("initial_weights_except", "loss", "optimizer", "batch_tokens", "lr", "momentum", "nesterov"),
            *("weight_decay", "weight_decay_except", "clip_norm", "beta1", "beta2", "epsilon"),
            *("schedule", "schedule_step_epochs", "schedule_gamma", "schedule_coefficient", "warmup_steps"),
            *("scale_lr", "base_batch_size", "ema_decay", "augment"),
        ),
    ),
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
        read.job_field("until", none="none"),
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
    *map(_declared, ("eval_sentences", "beam", "length_penalty", "eval_every")),
    Factor(
        "checkpoints",
        "checkpoints",
        read.saving,
        PAUSES | {RESOURCES},
        "they pause training and take memory",
        show=read.shown_saving,
        order=by_saving,
    ),
)

_MACHINE = (
    Factor("threads", "threads per task", read.threads, WORK, "the number of compute threads differs"),
    Factor("cpu", "processor", read.host("cpu_model"), WORK, "another processor", expected=True),
    Factor("cores", "cores available", read.cores, WORK, _CORES, expected=True),
    _declared("cores_per_node"),
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
    Factor(
        "model_method",
        "how the model is carried out",
        read.method,
        NOTHING,
        "a translation or another library's layers may cost time; `models check` measures it",
        independent=True,
    ),
    Factor("framework", "framework version", read.framework, WORK, "it may be faster or slower", given="backend", expected=True),
    Factor("trainer", "trainer version", read.package("crosstrain"), ALL, "it may train and count differently", expected=True),
    Factor("python", "Python version", read.host("python"), CLOCK, "it may be faster or slower", expected=True),
    Factor(
        "distributed",
        "distributed wrapper",
        read.job_field("distributed", applies=read.single_process),
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
    *map(
        _declared,
        (
            *("steps_per_call", "accumulate", "deterministic", "profile", "sample_interval", "start_timeout", "stall_timeout"),
            *("node_timeout", "max_restarts", "restart_window", "min_nodes", "spare_processes", "on_nan"),
        ),
    ),
)

_WITHOUT_EFFECT = tuple(
    map(_declared, ("calibrate", "keep", "keep_best", "keep_best_count", "launcher", "mllog", "monitor", "tensorboard"))
)
_LISTED = frozenset(factor.key for factor in (*_INDEPENDENT, *_LEARNING, *_MACHINE, *_WITHOUT_EFFECT))
_OTHERS = tuple(_declared(key) for key, setting in DECLARED.items() if setting.compare is not None and key not in _LISTED)
# Settings that users choose, and that name configurations.
CHOSEN: tuple[Factor, ...] = (*_INDEPENDENT, *_LEARNING, *(factor for factor in _OTHERS if factor.confounds & LEARNT))
# In the order of reports: experimental variables first, irrelevant settings last.
RULES: tuple[Factor, ...] = (*CHOSEN, *_MACHINE, *(factor for factor in _OTHERS if not factor.confounds & LEARNT), *_WITHOUT_EFFECT)
