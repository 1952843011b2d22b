"""The settings and the environment of a run as values that can be compared with those of another run.

Each is hashable; None where it was not recorded or does not apply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...core.job import DEFAULT_EPOCHS, Job, saved_every
from ...core.plugins import BUILT_IN
from ...core.units import Target, parse_bandwidth
from ...records.text.numbers import bytes_text
from ..catalog.batches import batch_text, examples_of, real_batch
from ..catalog.run import Run

__all__ = [
    "bandwidth",
    "batch",
    "budget",
    "by_adam",
    "by_sgd",
    "compiled",
    "cores",
    "dataset",
    "device",
    "ended_by_patience",
    "evaluated",
    "exchange",
    "framework",
    "gpus",
    "host",
    "job_field",
    "job_field_if",
    "job_field_or",
    "judged_by_translations",
    "link",
    "memory",
    "network",
    "package",
    "precision",
    "saving",
    "shape",
    "shown",
    "shown_bandwidth",
    "shown_budget",
    "shown_bytes",
    "shown_saving",
    "shown_seeds",
    "single_process",
    "summary_field",
    "threads",
    "update_examples",
]

Value = Callable[[Run], Any]

_PACKAGES: Mapping[str, str] = {plugin.name: plugin.requires for plugin in BUILT_IN["backend"]}
"""Of our own backends, for runs that do not record it."""


def shown(value: Any) -> str:
    """Return a value as text; of several nodes, all that occur."""
    if isinstance(value, tuple):
        return " and ".join(map(shown, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def shown_bytes(value: tuple[int, ...]) -> str:
    """Return amounts of bytes as text."""
    return " and ".join(map(bytes_text, value))


def shown_seeds(value: int | tuple[int, ...]) -> str:
    """Return one seed or several as text."""
    seeds = value if isinstance(value, tuple) else (value,)
    if len(seeds) > 1 and seeds == tuple(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]} to {seeds[-1]}"
    return "+".join(map(str, seeds))


def shown_bandwidth(bits_per_second: float) -> str:
    """Return the limit of a link as text."""
    return "no limit" if math.isinf(bits_per_second) else f"{bits_per_second / 1e6:g} Mbit/s"


def shown_budget(value: tuple[str, int]) -> str:
    """Return a budget as text."""
    unit, amount = value
    return f"{amount:,} {unit.removesuffix('s') if amount == 1 else unit}"


def shown_saving(value: tuple[str, bool]) -> str:
    """Return as text when checkpoints are saved."""
    every, at_end = value
    if every == "end":
        return "at the end" if at_end else "none"
    return f"every {every}{'' if at_end else ', none at the end'}"


def job_field(key: str) -> Value:
    """Read a field of the job: what it was, or its default in a run that is older than the field."""
    default = Job.model_fields[key].default

    def value(run: Run) -> Any:
        found = run.job.get(key, default)
        return tuple(found) if isinstance(found, list) else found

    return value


def job_field_or(key: str, otherwise: str) -> Value:
    """Read a field of the job; `otherwise` stands for None, which is what a field has that was not given."""
    field = job_field(key)

    def value(run: Run) -> Any:
        found = field(run)
        return otherwise if found is None else found

    return value


def job_field_if(key: str, applies: Callable[[Run], bool]) -> Value:
    """Read a field of the job where it does something."""
    field = job_field(key)
    return lambda run: field(run) if applies(run) else None


def summary_field(key: str) -> Value:
    """Read a field of the summary."""
    return lambda run: run.summary.get(key)


def batch(key: str) -> Value:
    """Read a number of examples of the summary; of batches that are filled by tokens, that it is a mean, in words."""

    def value(run: Run) -> Any:
        tokens = run.job.get("batch_tokens")
        return run.summary.get(key) if tokens is None else batch_text(run.summary.get(key), tokens)

    return value


def update_examples(run: Run) -> Any:
    """Read how many examples an update is of: the global batch in sync mode, one worker's batch in async mode."""
    key = "global_batch_size" if run.summary["mode"] == "sync" else "batch_size"
    found = run.summary.get(key)
    return batch(key)(run) if found is None or run.job.get("batch_tokens") is not None else real_batch(run.job, found)


def _occurring(values: Iterable[Any]) -> tuple[Any, ...] | None:
    """Return the different values in order; None where there is none."""
    known = {value for value in values if value is not None}
    return tuple(sorted(known)) if known else None


def host(key: str) -> Value:
    """Read what the nodes are, from ``env.json``."""
    return lambda run: _occurring(node.get(key) for node in run.nodes)


def package(name: str) -> Value:
    """Read the release of a package on the nodes."""
    return lambda run: _occurring((node.get("packages") or {}).get(name) for node in run.nodes)


def framework(run: Run) -> Any:
    """Read the releases of the packages that the run's backend declares, as the run records it.

    None where that is not known: in a run of an earlier release, on a backend that is not ours.
    """
    backend = str(run.summary["backend"])
    names = run.job.get("framework_packages")
    if names is None:
        names = [_PACKAGES[backend]] if backend in _PACKAGES else []
    if len(names) <= 1:
        return package(names[0])(run) if names else None
    return _occurring(_together(node.get("packages") or {}, names) for node in run.nodes)


def _together(releases: Mapping[str, str | None], names: Sequence[str]) -> str | None:
    """Write the releases of several packages; None where one is not known."""
    return None if any(releases.get(name) is None for name in names) else ", ".join(f"{name} {releases[name]}" for name in names)


def cores(run: Run) -> Any:
    """Read the cores that the nodes may use, apart from a limit that the job itself sets."""
    return host("cores_available" if run.job.get("cores_per_node") is None else "cores_affinity")(run)


def gpus(run: Run) -> Any:
    """Read the names of all nodes' GPUs."""
    listed = [node["gpus"] for node in run.nodes if node.get("gpus") is not None]
    return tuple(sorted(str(gpu["name"]) for node in listed for gpu in node)) if listed else None


def memory(run: Run) -> Any:
    """Read the bytes of memory that the nodes may use."""
    return _occurring(node.get("memory_limit_bytes") or node.get("memory_total_bytes") for node in run.nodes)


def link(run: Run) -> Any:
    """Read the speed of each node's fastest interface, in bits per second; that of a virtual one is not recorded."""
    speeds = ([one.get("speed_bits_per_second") or 0 for one in (node.get("interfaces") or {}).values()] for node in run.nodes)
    return _occurring(max(found) or None for found in speeds if found)


def dataset(*path: str) -> Value:
    """Read what the job says of its data."""

    def value(run: Run) -> Any:
        found: Any = run.job.get("dataset")
        for key in path:
            found = found.get(key) if found else None
        return found

    return value


def shape(run: Run) -> Any:
    """Read channels, height and width of an image and the number of classes, or of text the sizes of its vocabularies."""
    described = run.job.get("dataset")
    if not described:
        return None
    if described.get("vocabulary_sizes") is not None:
        return ", ".join(f"{name} of {size:,} different tokens" for name, size in sorted(described["vocabulary_sizes"].items()))
    if described.get("input_shape") is None or described.get("classes") is None:
        return None
    return f"{'×'.join(map(str, described['input_shape']))} in {described['classes']} classes"


def evaluated(run: Run) -> Any:
    """Read how many examples the last evaluation was over."""
    return (run.summary.get("eval") or {}).get("examples")


def precision(run: Run) -> Any:
    """Read the number format that was computed in."""
    return run.summary.get("precision_used") or run.summary["precision"]


def device(run: Run) -> Any:
    """Read the kind of device that was computed on; of a run that does not tell, what it asked for, where that names one."""
    asked = run.job.get("device")
    return run.summary.get("device_used") or (asked if asked in ("cpu", "gpu") else None)


def threads(run: Run) -> Any:
    """Read the threads of a task, on the nodes."""
    return _occurring(run.job.get("threads_per_task") or ())


def judged_by_translations(run: Run) -> bool:
    """Return whether a run's target, or the best of its evaluations, is a matter of the translations that it makes while it trains."""
    until, best = run.job.get("until"), run.job.get("keep_best")
    judged = [] if until is None else [Target.parse(until).metric]
    judged += [best] if best is not None else [run.metrics[0].name] if ended_by_patience(run) else []
    return not run.translation_metrics.isdisjoint(judged)


def ended_by_patience(run: Run) -> bool:
    """Return whether a run stopped because it had not improved for so long; most limits of patience never come to that."""
    return bool((run.summary.get("patience") or {}).get("exhausted"))


def budget(run: Run) -> tuple[str, int]:
    """Read how far the run was to train at most, unit and amount: epochs, or examples where these or updates were counted."""
    steps, examples = run.job.get("steps"), run.job.get("examples")
    if examples is not None:
        return "examples", examples
    if steps is None:
        return "epochs", run.job.get("epochs") or DEFAULT_EPOCHS
    batch = run.summary["global_batch_size"] if run.summary["mode"] == "sync" else run.summary["batch_size"]
    return "examples", examples_of(run.job, steps, batch)


def single_process(run: Run) -> bool:
    """Return whether a single process did it all."""
    return bool(run.summary["workers"] == 1 and run.summary["mode"] == "sync")


def exchange(run: Run) -> str | None:
    """Read how sync workers added up their gradients; None where there was nothing to add up, and for async ones."""
    if run.summary["mode"] != "sync" or run.summary["workers"] == 1:
        return None
    return str(run.job.get("exchange") or "native")


def compiled(run: Run) -> str:
    """Read whether steps were compiled; of a run that does not tell, what it asked for."""
    known = run.summary.get("compiled")
    return str(run.job.get("compile") or "off") if known is None else "on" if known else "off"


def network(run: Run) -> str | None:
    """Read what joined the nodes."""
    source = run.summary.get("network_source")
    if single_process(run) or source is None:
        return None
    names = {"interface": "an interface for each node", "sockets": "the host's, shared"}
    return names.get(source, "several kinds") if isinstance(source, str) else "several kinds"


def bandwidth(run: Run) -> float | None:
    """Read the limit of the nodes' links in bits per second; infinity where there is none."""
    limit = run.job.get("bandwidth")
    if run.summary["nodes"] == 1:
        return None
    return math.inf if limit is None else parse_bandwidth(limit)


def saving(run: Run) -> tuple[str, bool]:
    """Read when checkpoints were saved: how often, and whether at the end."""
    every = saved_every(run.job.get("checkpoint_every"), run.job.get("max_restarts", 0))
    return every or "end", bool(job_field("save_final")(run)) or every == "end"


def by_adam(run: Run) -> bool:
    """Return whether the optimiser is Adam or AdamW."""
    return str(run.job.get("optimizer")).startswith("adam")


def by_sgd(run: Run) -> bool:
    """Return whether the optimiser is SGD."""
    return run.job.get("optimizer") == "sgd"
