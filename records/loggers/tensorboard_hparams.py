"""A run's settings in the form of TensorBoard's HParams view, which lays runs side by side by settings and figures.

The messages are those of tensorboard's own plugin; its functions that make them import tensorflow where it is installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...core.job import Job
from ...core.settings.job_fields import choices, schema
from ...metrics import MetricInfo
from ...metrics.language import NAMES
from .curve_points import END_FIGURES, NOT_SETTINGS, settings

__all__ = ["HParams", "figures"]

NOT_COMPARED = (
    *NOT_SETTINGS,
    *("data_dir", "tensorboard", "mllog", "keep", "keep_best", "save_final"),
    *(
        "launcher",
        "start_timeout",
        "stall_timeout",
        "node_timeout",
        "on_nan",
        "max_restarts",
        "restart_window",
        "min_nodes",
        "spare_processes",
    ),
)
"""Settings that change neither what is computed nor how fast."""

SHOWN_FIRST = ("backend", "mode", "model", "nodes", "global_batch_size")
"""The view shows five columns at first: those of which it is said that they differ, before all others."""


OURS = ("accuracy", *NAMES, "perplexity", "token_accuracy")
"""The metrics of this project's models. TensorBoard takes the view's figures from one run of a folder, which may be of another model."""


def figures(metrics: Sequence[MetricInfo]) -> tuple[str, ...]:
    """Return the view's figures of a run with these metrics, and of those beside it: of each its last point."""
    own = (*(f"eval/{info.name}" for info in metrics), *(f"summary/{name}" for name in END_FIGURES))
    return tuple(dict.fromkeys((*own, *(f"eval/{name}" for name in OURS))))


_STATUS = {"succeeded": "STATUS_SUCCESS", "failed": "STATUS_FAILURE", "interrupted": "STATUS_FAILURE"}


class HParams:
    """Makes the summaries about one run. Runs with the same metrics describe the view alike.

    TensorBoard takes its description from any one of them.
    """

    def __init__(self) -> None:
        """Import the plugin's messages: two milliseconds where tensorboard's writer has been imported."""
        package = "tensorboard.plugins.hparams"
        self._api: Any = importlib.import_module(f"{package}.api_pb2")
        self._data: Any = importlib.import_module(f"{package}.plugin_data_pb2")
        self._metadata: Any = importlib.import_module(f"{package}.metadata")
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")

    def start(self, job: Job, metrics: Sequence[MetricInfo], unix_seconds: float) -> Iterable[Any]:
        """Return the summaries for the start of a run: what the view shows, and this run's values."""
        names = list(settings(Job(), NOT_COMPARED))
        called = {tag: _words(tag) for tag in figures(metrics)} | {f"eval/{info.name}": f"eval {info.label}" for info in metrics}
        experiment = self._api.Experiment(
            name="crosstrain",
            time_created_secs=unix_seconds,
            hparam_infos=[self._setting(name) for name in names],
            metric_infos=[self._api.MetricInfo(name=self._api.MetricName(tag=tag), display_name=called[tag]) for tag in figures(metrics)],
        )
        begun = self._data.SessionStartInfo(start_time_secs=unix_seconds)
        for name, value in settings(job, NOT_COMPARED).items():
            _assign(begun.hparams[name], value)
        return [
            self._wrapped(self._metadata.EXPERIMENT_TAG, experiment=experiment),
            self._wrapped(self._metadata.SESSION_START_INFO_TAG, session_start_info=begun),
        ]

    def end(self, state: str, unix_seconds: float) -> Any:
        """Return the summary for the end of a run in this state."""
        status = self._api.Status.Value(_STATUS.get(state, "STATUS_UNKNOWN"))
        ended = self._data.SessionEndInfo(status=status, end_time_secs=unix_seconds)
        return self._wrapped(self._metadata.SESSION_END_INFO_TAG, session_end_info=ended)

    def _setting(self, name: str) -> Any:
        """Describe a setting; one of a closed list of texts with that list, so that the view offers them."""
        kind = "integer" if name == "workers" else schema(name).get("type")
        info = self._api.HParamInfo(name=name, differs=name in SHOWN_FIRST)
        info.type = {
            "integer": self._api.DATA_TYPE_FLOAT64,
            "number": self._api.DATA_TYPE_FLOAT64,
            "boolean": self._api.DATA_TYPE_BOOL,
        }.get(kind or "", self._api.DATA_TYPE_STRING)
        if name != "workers":
            for choice in choices(name):
                info.domain_discrete.values.add().string_value = choice
        return info

    def _wrapped(self, tag: str, **data: Any) -> Any:
        """Return a summary whose metadata holds the message, beside an empty tensor."""
        metadata = self._metadata.create_summary_metadata(self._data.HParamsPluginData(**data))
        value = self._summary.Summary.Value(tag=tag, metadata=metadata, tensor=self._metadata.NULL_TENSOR)
        return self._summary.Summary(value=[value])


def _words(tag: str) -> str:
    return tag.removeprefix("summary/").replace("_", " ").replace("/", " ")


def _assign(target: Any, value: Mapping[str, Any] | bool | int | float | str | None) -> None:
    """Set a protobuf value; None leaves it without one, which the view shows as empty."""
    if isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, int | float):
        target.number_value = value
    elif value is not None:
        target.string_value = str(value)
