"""What training lowers and what an evaluation counts: the objective of a model, apart from any framework.

The sums of an objective are named float64 numbers that workers add up in one vector, in the order of `sums`. Two of them every backend
computes itself: ``loss_sum`` (of the examples' losses) and ``examples``. ``correct``, of a classifier, it knows too. Any other sum comes
from the model's forward module, which then has a function beside `forward`::

    def example_sums(logits_bk, y_b, context):  # tensors of the framework, for a batch
        return {"correct_in_5": …}              # [batch] numbers by the name of the sum

``COLUMN_tokens``, of a column that the model reads and whose length varies, backends count as well.

A loss is Σ over the examples of the global batch of what each adds, divided by the sum of what each counts (`weight`). The loss
``cross_entropy`` of one label an example backends know. Any other is the name of a function in the forward module, which says what each
example adds: of a sequence, the sum over its tokens::

    def tagging_loss(logits_btk, targets, context):  # `targets` as `models.base` has it for the column `ModelSpec.target`
        return …                                     # [batch], float32

`context` is the `ForwardContext` of the forward pass that gave the logits.

An evaluation of an objective with `translation` also translates: its forward module then has, beside `forward`, `encode`, `empty_cache` and
`decode_step` (`backends.decoding_functions`), and further sums are those of `models.decoding.quality`, or of a subclass of the model's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..core.errors import RunFailedError, TrainerError, UsageError
from ..core.suggestions import nearest
from ..core.units import Target
from ..metrics import LOSS, Better, Metric, MetricInfo
from ..metrics.base import MOST_METRICS, MOST_SUMS
from ..metrics.classification import ACCURACY
from ..metrics.language import SENTENCES
from .decoding.quality import TranslationQuality

__all__ = ["CLASSIFICATION", "COUNTED", "CROSS_ENTROPY", "LOSS_SUM", "Objective"]

LOSS_SUM = "loss_sum"
CROSS_ENTROPY = "cross_entropy"
COUNTED = "examples"
"""The sum that tells whether each example was counted exactly once."""

_COMPARISONS: Mapping[Better, str] = {"higher": ">=", "lower": "<="}


@dataclass(frozen=True, slots=True)
class Objective:
    """`loss` names the function whose weighted mean training lowers; `weight` is the sum that the losses' sum is divided by.

    `metrics` are functions of `every_sum`, the first of them the headline. With `translation` an evaluation also translates sentences, and
    the metrics of that stand before `metrics` (`every_metric`). Raises ValueError where a sum is missing, names repeat or
    there are too many, and where labels that count 1 each would be weighted otherwise.
    """

    name: str
    loss: str
    sums: tuple[str, ...]
    metrics: tuple[Metric, ...]
    weight: str = COUNTED
    translation: TranslationQuality | None = None

    def __post_init__(self) -> None:
        missing = {LOSS_SUM, COUNTED, self.weight} - set(self.sums)
        if missing:
            raise ValueError(f"objective {self.name!r}: its sums lack {', '.join(sorted(missing))}")
        if self.translation is not None and SENTENCES not in self.translation.sums:
            raise ValueError(f"objective {self.name!r}: the sums of its translation lack {SENTENCES}, by which sentences are counted")
        if len(self.every_sum) > MOST_SUMS or len(self.every_metric) > MOST_METRICS:
            most = f"at most {MOST_SUMS:,} sums and {MOST_METRICS} metrics"
            raise ValueError(f"objective {self.name!r}: {most}; it has {len(self.every_sum):,} and {len(self.every_metric)}")
        names = [metric.name for metric in self.every_metric]
        if len(set(names)) != len(names) or len(set(self.every_sum)) != len(self.every_sum):
            raise ValueError(f"objective {self.name!r}: names of sums and of metrics must differ from each other")
        if self.loss == CROSS_ENTROPY and self.weight != COUNTED:
            raise ValueError(f"objective {self.name!r}: with the loss {CROSS_ENTROPY} each example counts 1; name a function of your own")

    @property
    def every_sum(self) -> tuple[str, ...]:
        """What an evaluation adds up: `sums`, which forward passes give, and those of translations."""
        return self.sums if self.translation is None else (*self.sums, *self.translation.sums)

    @property
    def every_metric(self) -> tuple[Metric, ...]:
        """The figures of an evaluation, the headline first."""
        return self.metrics if self.translation is None else (*self.translation.metrics, *self.metrics)

    @property
    def translation_names(self) -> list[str] | None:
        """The names of the metrics that come from translations, None where nothing is translated."""
        return None if self.translation is None else [metric.name for metric in self.translation.metrics]

    @property
    def infos(self) -> tuple[MetricInfo, ...]:
        """What a run's files say of its figures, the metrics first and the loss last."""
        return (*(metric.info for metric in self.every_metric), LOSS)

    def info(self, name: str) -> MetricInfo:
        """Return a metric, or the loss, by name. Raises KeyError where there is none of that name."""
        return {info.name: info for info in self.infos}[name]

    def check(self, until: Target | None, keep_best: str | None) -> None:
        """Raise UsageError where a job stops at, or keeps the best by, a figure that evaluations do not have, or where its goal is none.

        None is a value that the metric cannot have, and one that it is the better the further it is from.
        """
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
        """Return a goal as an example."""
        least, most = self._bounds(info) or (0.0, 1.0)
        share = 0.9 if info.better == "higher" else 0.3
        if math.isinf(least):
            goal = 0.0 if math.isinf(most) else most - 1.0
        else:
            goal = least + 1.0 if math.isinf(most) else least + share * (most - least)
        return f"{info.name}{_COMPARISONS[info.better]}{goal:g}"

    def _bounds(self, info: MetricInfo) -> tuple[float, float] | None:
        return next((metric.bounds for metric in self.every_metric if metric.name == info.name), None)

    def check_parts(self, ranks: Mapping[str, int | None]) -> None:
        """Raise UsageError where what each example adds to the sums is missing, or is no vector [batch].

        `ranks` has its number of dimensions by the sum's name, None for what is no tensor.
        """
        if missing := [name for name in self.sums if name not in ranks]:
            raise UsageError(f"model: example_sums returned no {', '.join(missing)}, which the objective {self.name!r} adds up")
        for name in self.sums:
            if ranks[name] != 1:
                found = "is no tensor" if ranks[name] is None else f"has {ranks[name]} dimensions"
                raise UsageError(f"model: {name!r} of example_sums {found}; a number for each example is needed, [batch]")

    def named(self, sums: Sequence[float]) -> dict[str, float]:
        """Return a vector of what forward passes add up by name. Raises ValueError where it is not as long as `sums`."""
        return dict(zip(self.sums, sums, strict=True))

    def wrong_with(self, sums: Mapping[str, float]) -> str | None:
        """Return why forward passes cannot have these sums, or None: others than the objective's, no counts, a metric out of bounds.

        Where sentences are translated as well, metrics may need the sums of that: see `out_of_bounds`.
        """
        if set(sums) != set(self.sums):
            return f"sums {', '.join(sorted(sums))}, instead of {', '.join(sorted(self.sums))}"
        for name in {COUNTED, self.weight}:
            if not (sums[name] > 0 and float(sums[name]).is_integer()):
                return f"{sums[name]:g} {name}"
        return self.out_of_bounds(sums) if self.translation is None else None

    def out_of_bounds(self, sums: Mapping[str, float]) -> str | None:
        """Return which metric of `every_sum` is out of its bounds, or None."""
        for metric in self.every_metric:
            value, (least, most) = self.value(metric, sums), metric.bounds or (-math.inf, math.inf)
            if value < least or value > most:  # a NaN, of a run that diverged, is neither
                return f"{metric.label} {value:g}, which lies between {least:g} and {most:g}"
        return None

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss and every metric by name, from `every_sum`."""
        return {LOSS.name: sums[LOSS_SUM] / sums[self.weight], **{metric.name: self.value(metric, sums) for metric in self.every_metric}}

    def translation_figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of `translation` by name, from its sums alone; none where nothing is translated."""
        metrics = () if self.translation is None else self.translation.metrics
        return {metric.name: self.value(metric, sums) for metric in metrics}

    def value(self, metric: Metric, sums: Mapping[str, float]) -> float:
        """Compute a metric. Raises RunFailedError, naming it, where its function fails or returns no number."""
        try:
            return float(metric.value(sums))
        except TrainerError:
            raise
        except Exception as error:
            found = ", ".join(f"{name} {value:g}" for name, value in sums.items())
            raise RunFailedError(f"metric {metric.name!r} cannot be computed from {found}: {type(error).__name__}: {error}") from error


CLASSIFICATION = Objective("classification", CROSS_ENTROPY, (LOSS_SUM, "correct", COUNTED), (ACCURACY,))
"""One label an example: the cross entropy of the logits' softmax, and the share of labels that were right."""
