"""Objectives: what training minimises and what an evaluation counts, in any framework."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.errors import RunFailedError, TrainerError, UsageError
from ..core.suggestions import nearest
from ..core.units import Target
from ..data.columns import LENGTHS, TOKENS
from ..metrics import LOSS, Better, Metric, MetricInfo
from ..metrics.base import ACCURACY, MAX_METRICS, MAX_SUMS, SENTENCES
from .decoding import TranslationQuality, checked_sums

LOSS_SUM = "loss_sum"
CROSS_ENTROPY = "cross_entropy"
COUNTED = "examples"  # shows whether each example was counted exactly once
CLASS_WEIGHTS = "class_weights"  # the sum of the weights of the examples' classes
_COMPARISONS: Mapping[Better, str] = {"higher": ">=", "lower": "<="}


@dataclass(frozen=True, slots=True)
class StandardLoss:
    """A loss that `models.losses` computes for any model, with its options.

    - `name`: of the functions in ``models/losses/<backend>.py``.
    - `classes`: of the labels; 0 for targets of `outputs` numbers, or as many classes of which any may apply.
    - `class_weights`: factor of the loss by class; empty for 1 each. `smoothing`, `delta`: of cross entropy and Huber's loss.
    """

    name: str
    classes: int
    outputs: int = 1
    class_weights: tuple[float, ...] = ()
    smoothing: float = 0.0
    delta: float = 1.0


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss and the metrics of a model.

    The sums are named float64 numbers that workers add up in one vector, in the order of `sums`. Every backend computes ``loss_sum``,
    ``examples``, ``correct`` of a classifier, and ``COLUMN_tokens`` of a column of varying length that the model reads. Other sums come
    from a function of the model's forward module::

        def example_sums(logits_bk, y_b, context):  # tensors of the framework, for a batch
            return {"correct_in_5": …}              # [batch] numbers by the name of the sum

    A loss is the sum of what each example of the global batch adds, divided by the sum of what each counts (`weight`). Backends know the
    loss ``cross_entropy`` of one label per example. Any other is the name of a function in the forward module, which returns what each
    example adds: of a sequence, the sum over its tokens::

        def tagging_loss(logits_btk, targets, context):  # `targets` as for `ForwardContext`, of the column `ModelSpec.target`
            return …                                     # [batch], float32

    `context` is the `ForwardContext` of the forward pass that gave the logits. With `standard` the loss and the further sums come from
    `models.losses` instead, and the last sums, `tally`, as one vector of a batch.

    `metrics` are functions of `every_sum`, the headline first. With `translation` an evaluation also translates, and its metrics precede
    `metrics` (`every_metric`): the forward module then has `encode`, `empty_cache` and `decode_step` (`backends.decoding_functions`), and
    further sums are those of `models.decoding.TranslationQuality` or a subclass of it. Raises ValueError for missing sums, repeated or too
    many names, and a `weight` other than examples for ``cross_entropy``.
    """

    name: str
    loss: str
    sums: tuple[str, ...]
    metrics: tuple[Metric, ...]
    weight: str = COUNTED
    translation: TranslationQuality | None = None
    standard: StandardLoss | None = None
    tally: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        missing = {LOSS_SUM, COUNTED, self.weight} - set(self.sums)
        if missing:
            raise ValueError(f"objective {self.name!r}: its sums lack {', '.join(sorted(missing))}")
        if self.translation is not None and SENTENCES not in self.translation.sums:
            raise ValueError(f"objective {self.name!r}: the sums of its translation lack {SENTENCES}, by which sentences are counted")
        if len(self.every_sum) > MAX_SUMS or len(self.every_metric) > MAX_METRICS:
            most = f"at most {MAX_SUMS:,} sums and {MAX_METRICS} metrics"
            raise ValueError(f"objective {self.name!r}: {most}; it has {len(self.every_sum):,} and {len(self.every_metric)}")
        names = [metric.name for metric in self.every_metric]
        if len(set(names)) != len(names) or len(set(self.every_sum)) != len(self.every_sum):
            raise ValueError(f"objective {self.name!r}: names of sums and of metrics must differ from each other")
        if self.tally != self.sums[len(self.summed) :]:
            raise ValueError(f"objective {self.name!r}: the names of its tally are not its last sums")
        if self.loss == CROSS_ENTROPY and self.weight != COUNTED:
            raise ValueError(f"objective {self.name!r}: with the loss {CROSS_ENTROPY} each example counts 1; name a function of your own")

    @property
    def summed(self) -> tuple[str, ...]:
        """The `sums` that have a number for each example."""
        return self.sums[: len(self.sums) - len(self.tally)]

    @property
    def every_sum(self) -> tuple[str, ...]:
        """All sums of an evaluation: `sums`, from forward passes, and those of translations."""
        return self.sums if self.translation is None else (*self.sums, *self.translation.sums)

    @property
    def every_metric(self) -> tuple[Metric, ...]:
        """The metrics of an evaluation, the headline first."""
        return self.metrics if self.translation is None else (*self.translation.metrics, *self.metrics)

    @property
    def translation_names(self) -> list[str] | None:
        """Names of the translation metrics; None without translation."""
        return None if self.translation is None else [metric.name for metric in self.translation.metrics]

    @property
    def infos(self) -> tuple[MetricInfo, ...]:
        """Descriptions for a run's files, the loss last."""
        return (*(metric.info for metric in self.every_metric), LOSS)

    def info(self, name: str) -> MetricInfo:
        """Return the description of a metric or the loss. Raises KeyError for an unknown name."""
        return {info.name: info for info in self.infos}[name]

    def check(self, until: Target | None, keep_best: str | None) -> None:
        """Raise UsageError if a job's target or best metric is unknown, impossible or reversed."""
        names = [info.name for info in self.infos]
        allowed = f"a figure of the evaluation: {' or '.join(names)}"
        if keep_best is not None and keep_best not in names:
            raise UsageError.of("keep_best", keep_best, allowed, names)
        if until is None:
            return
        if until.metric not in names:
            near = nearest(until.metric, names)
            hint = "" if near is None else f" Did you mean {replace(until, metric=near).text!r}?"
            raise UsageError(f"until: got {until.text!r}; allowed: {allowed}, such as {self._goal(self.infos[0])}.{hint}")
        info = self.info(until.metric)
        bounds = self._bounds(info)
        if bounds is not None and not bounds[0] <= until.value <= bounds[1]:
            raise UsageError.of("until", until.text, f"{info.name} from {bounds[0]:g} to {bounds[1]:g}, such as {self._goal(info)}")
        if until.comparison != _COMPARISONS[info.better]:
            raise UsageError.of("until", until.text, f"{info.name}{_COMPARISONS[info.better]}…: {info.better} is better")

    def _goal(self, info: MetricInfo) -> str:
        least, most = self._bounds(info) or (0.0, 1.0)
        share = 0.9 if info.better == "higher" else 0.3
        if math.isinf(least):
            goal = 0.0 if math.isinf(most) else most - 1.0
        else:
            goal = least + 1.0 if math.isinf(most) else least + share * (most - least)
        return f"{info.name}{_COMPARISONS[info.better]}{goal:g}"

    def _bounds(self, info: MetricInfo) -> tuple[float, float] | None:
        return next((metric.bounds for metric in self.every_metric if metric.name == info.name), None)

    def common_parts(self, losses_b: Any, ones_b: Any, *columns: Any) -> dict[str, Any]:
        """Return the parts of `sums` that every model has.

        They are from its losses, [batch] ones, and its columns.
        """
        lengths = {
            name: value for column in columns if isinstance(column, dict) for name, value in column.items() if name.endswith(LENGTHS)
        }
        tokens = {name.removesuffix(LENGTHS) + TOKENS: value for name, value in lengths.items()}
        return {LOSS_SUM: losses_b, COUNTED: ones_b, **tokens}

    def check_parts(self, ranks: Mapping[str, int | None]) -> None:
        """Raise UsageError unless each sum has parts of shape [batch].

        `ranks`: dimensions by sum, None if it is no tensor.
        """
        if missing := [name for name in self.summed if name not in ranks]:
            raise UsageError(f"model: example_sums returned no {', '.join(missing)}, which the objective {self.name!r} adds up")
        for name in self.summed:
            if ranks[name] != 1:
                problem = "is no tensor" if ranks[name] is None else f"has {ranks[name]} dimensions"
                raise UsageError(f"model: {name!r} of example_sums {problem}; a number for each example is needed, [batch]")

    def named(self, sums: Sequence[float]) -> dict[str, float]:
        """Return a vector of `sums` by name. Raises ValueError for another length."""
        return dict(zip(self.sums, sums, strict=True))

    def wrong_with(self, sums: Mapping[str, float]) -> str | None:
        """Return why forward passes cannot have these sums, or None.

        With translation, bounds are unchecked.
        """
        if set(sums) != set(self.sums):
            return f"sums {', '.join(sorted(sums))}, instead of {', '.join(sorted(self.sums))}"
        for name in {COUNTED, self.weight}:
            if not (sums[name] > 0 and (name == CLASS_WEIGHTS or float(sums[name]).is_integer())):
                return f"{sums[name]:g} {name}"
        return self.out_of_bounds(sums) if self.translation is None else None

    def out_of_bounds(self, sums: Mapping[str, float]) -> str | None:
        """Return which metric of `every_sum` is out of its bounds, or None."""
        for metric in self.every_metric:
            value, (least, most) = self.value(metric, sums), metric.bounds or (-math.inf, math.inf)
            if value < least or value > most:  # false for NaN, from a diverged run
                return f"{metric.label} {value:g}, which lies between {least:g} and {most:g}"
        return None

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss and every metric by name, from `every_sum`."""
        return {LOSS.name: sums[LOSS_SUM] / sums[self.weight], **{metric.name: self.value(metric, sums) for metric in self.every_metric}}

    def translation_figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of `translation` by name; empty without translation."""
        metrics = () if self.translation is None else self.translation.metrics
        return {metric.name: self.value(metric, sums) for metric in metrics}

    def value(self, metric: Metric, sums: Mapping[str, float]) -> float:
        """Compute a metric.

        Raises RunFailedError, naming it, if its function fails or returns no number.
        """
        try:
            return float(metric.value(sums))
        except TrainerError:
            raise
        except Exception as error:
            sums_text = ", ".join(f"{name} {value:g}" for name, value in sums.items())
            raise RunFailedError(f"metric {metric.name!r} cannot be computed from {sums_text}: {type(error).__name__}: {error}") from error


CLASSIFICATION = Objective("classification", CROSS_ENTROPY, (LOSS_SUM, "correct", COUNTED), (ACCURACY,))  # one label per example


TRIALS = 20  # attempts per metric: some made-up sums may rightly have no value
MAX_SIZE = 1000


def _made_up_sums(objective: Objective) -> Iterator[dict[str, float]]:
    names = objective.every_sum
    yield dict.fromkeys(names, 1.0)
    yield {name: float(place) for place, name in enumerate(names, 1)}
    yield {name: float(len(names) - place) for place, name in enumerate(names)}
    draw = random.Random(0)
    for _ in range(TRIALS - 3):
        yield {name: float(draw.randint(1, MAX_SIZE)) for name in names}


def refuse_uncomputable(objective: Objective) -> None:
    """Raise UsageError for a metric that fails on all made-up sums, or invalid translation sums."""
    try:
        if objective.translation is not None:
            checked_sums(objective.translation, ["a made-up sentence"], ["a made-up Sentence, as it should be"])
        for metric in objective.every_metric:
            _try(objective, metric)
    except RunFailedError as error:
        raise UsageError(f"model: {error}") from error


def _try(objective: Objective, metric: Metric) -> None:
    failed: RunFailedError | None = None
    for sums in _made_up_sums(objective):
        try:
            objective.value(metric, sums)
            return
        except RunFailedError as error:
            failed = failed or error
    if failed is not None:
        raise failed
