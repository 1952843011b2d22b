"""Settings and environment of a run as hashable values.

None if unrecorded or not applicable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...core.job import DEFAULT_EPOCHS, Job, saved_every, split_digest
from ...core.plugins import BUILT_IN
from ...core.units import Target, parse_bandwidth
from ...records.text import bytes_text
from ..runs.columns import reach
from ..runs.run import Run, batch_text, count_examples, real_batch

Value = Callable[[Run], Any]
# Packages of built-in backends, for runs that do not record them.
_PACKAGES: Mapping[str, str] = {plugin.name: plugin.requires for plugin in BUILT_IN["backend"]}


def shown(value: Any) -> str:
    """Return a value as text; all values of several nodes."""
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
    """Return the schedule of checkpoints as text."""
    every, at_end = value
    if every == "end":
        return "at the end" if at_end else "none"
    return f"every {every}{'' if at_end else ', none at the end'}"


def job_field(key: str, none: str | None = None, applies: Callable[[Run], bool] | None = None) -> Value:
    """Read a field of the job, `none` if it is None, if it `applies`.

    Its default if the run is older than the field.
    """
    default = Job.model_fields[key].default

    def value(run: Run) -> Any:
        if applies is not None and not applies(run):
            return None
        recorded = run.job.get(key, default)
        return none if recorded is None else tuple(recorded) if isinstance(recorded, list) else recorded

    return value


def initial_weights(run: Run) -> str:
    """Read the beginning of the digest of the initial weights' file."""
    recorded = run.job.get("initial_weights")
    digest = None if recorded is None else split_digest(Path(str(recorded)))[1]
    return "of the seed" if recorded is None else (digest or str(recorded))[:12]


def summary_field(*path: str) -> Value:
    """Read a field of the summary."""
    return lambda run: reach(run.summary, path)


def dataset(*path: str) -> Value:
    """Read a value of the dataset's description."""
    return lambda run: reach(run.job.get("dataset"), path)


def batch(key: str) -> Value:
    """Read a number of examples; the mean as text for token batches."""

    def value(run: Run) -> Any:
        tokens = run.job.get("batch_tokens")
        return run.summary.get(key) if tokens is None else batch_text(run.summary.get(key), tokens)

    return value


def update_examples(run: Run) -> Any:
    """Read the examples of an update: the global batch (sync), one worker's batch (async)."""
    key = "global_batch_size" if run.summary["mode"] == "sync" else "batch_size"
    size = run.summary.get(key)
    return batch(key)(run) if size is None or run.job.get("batch_tokens") is not None else real_batch(run.job, size)


def _occurring(values: Iterable[Any]) -> tuple[Any, ...] | None:
    return tuple(sorted({value for value in values if value is not None})) or None


def host(key: str) -> Value:
    """Read a value of the nodes, from ``env.json``."""
    return lambda run: _occurring(node.get(key) for node in run.nodes)


def package(name: str) -> Value:
    """Read the release of a package on the nodes."""
    return lambda run: _occurring((node.get("packages") or {}).get(name) for node in run.nodes)


def framework(run: Run) -> Any:
    """Read the releases of the backend's packages; unknown for external backends of older runs."""
    backend = str(run.summary["backend"])
    names = run.job.get("framework_packages")
    if names is None:
        names = [_PACKAGES[backend]] if backend in _PACKAGES else []
    if len(names) <= 1:
        return package(names[0])(run) if names else None
    releases = [[(name, (node.get("packages") or {}).get(name)) for name in names] for node in run.nodes]
    known = [packages for packages in releases if all(release is not None for _, release in packages)]
    return _occurring(", ".join(f"{name} {release}" for name, release in packages) for packages in known)


def cores(run: Run) -> Any:
    """Read the nodes' available cores, without the job's own limit."""
    return host("cores_available" if run.job.get("cores_per_node") is None else "cores_affinity")(run)


def gpus(run: Run) -> Any:
    """Read the names of all nodes' GPUs."""
    listed = [node["gpus"] for node in run.nodes if node.get("gpus") is not None]
    return tuple(sorted(str(gpu["name"]) for node in listed for gpu in node)) if listed else None


def memory(run: Run) -> Any:
    """Read the nodes' available memory in bytes."""
    return _occurring(node.get("memory_limit_bytes") or node.get("memory_total_bytes") for node in run.nodes)


def link(run: Run) -> Any:
    """Read the nodes' fastest interface in bit/s; unrecorded for virtual ones."""
    speeds = ([interface.get("speed_bits_per_second") or 0 for interface in (node.get("interfaces") or {}).values()] for node in run.nodes)
    return _occurring(max(node_speeds) or None for node_speeds in speeds if node_speeds)


def shape(run: Run) -> Any:
    """Read image shape and number of classes, or vocabulary sizes."""
    described = run.job.get("dataset")
    if not described:
        return None
    classes = f" in {described['classes']} classes" if described.get("classes") else ""
    if described.get("vocabulary_sizes") is not None:
        sizes = sorted(described["vocabulary_sizes"].items())
        return ", ".join(f"{name} of {size:,} different tokens" for name, size in sizes) + classes
    if described.get("columns") is not None:
        return f"{len(described['columns'])} columns{classes}"
    if described.get("input_shape") is None or not classes:
        return None
    return f"{'×'.join(map(str, described['input_shape']))}{classes}"


def precision(run: Run) -> Any:
    """Read the precision that was used."""
    return run.summary.get("precision_used") or run.summary["precision"]


def device(run: Run) -> Any:
    """Read the used kind of device; in older runs the requested one."""
    requested = run.job.get("device")
    return run.summary.get("device_used") or (requested if requested in ("cpu", "gpu") else None)


def threads(run: Run) -> Any:
    """Read the threads per task of the nodes."""
    return _occurring(run.job.get("threads_per_task") or ())


def judged_by_translations(run: Run) -> bool:
    """Return whether target or best evaluation are by a translation metric."""
    until, best = run.job.get("until"), run.job.get("keep_best")
    judged = [] if until is None else [Target.parse(until).metric]
    judged += [best] if best is not None else [run.metrics[0].name] if ended_by_patience(run) else []
    return not run.translation_metrics.isdisjoint(judged)


def ended_by_patience(run: Run) -> bool:
    """Return whether a run ended by early stopping."""
    return bool((run.summary.get("patience") or {}).get("exhausted"))


def budget(run: Run) -> tuple[str, int]:
    """Read the budget, unit and amount: epochs, or examples if these or updates are limited."""
    steps, examples = run.job.get("steps"), run.job.get("examples")
    if examples is not None:
        return "examples", examples
    if steps is None:
        return "epochs", run.job.get("epochs") or DEFAULT_EPOCHS
    batch = run.summary["global_batch_size"] if run.summary["mode"] == "sync" else run.summary["batch_size"]
    return "examples", count_examples(run.job, steps, batch)


def single_process(run: Run) -> bool:
    """Return whether the run had a single process."""
    return bool(run.summary["workers"] == 1 and run.summary["mode"] == "sync")


def exchange(run: Run) -> str | None:
    """Read the all-reduce of several sync workers."""
    if run.summary["mode"] != "sync" or run.summary["workers"] == 1:
        return None
    return str(run.job.get("exchange") or "native")


def compiled(run: Run) -> str:
    """Read whether steps were compiled; in older runs the requested setting."""
    known = run.summary.get("compiled")
    return str(run.job.get("compile") or "off") if known is None else "on" if known else "off"


def method(run: Run) -> str | None:
    """Read how the backend carried the model out, and whether its cost is unknown."""
    how = run.summary.get("model_method")
    if how not in (None, "native", "translated"):  # layers of its own, which cost frameworks unequal parts of a step
        how = f"{how} on {run.summary['backend']}"
    is_known = how in (None, "native") or run.summary.get("adapter_cost") is not None
    return how if is_known else f"{how} (cost not measured)"


def network(run: Run) -> str | None:
    """Read the kind of network between the nodes."""
    source = run.summary.get("network_source")
    if single_process(run) or source is None:
        return None
    names = {"interface": "an interface for each node", "sockets": "the host's, shared"}
    return names.get(source, "several kinds") if isinstance(source, str) else "several kinds"


def bandwidth(run: Run) -> float | None:
    """Read the bandwidth limit in bit/s; infinity if unlimited."""
    limit = run.job.get("bandwidth")
    if run.summary["nodes"] == 1:
        return None
    return math.inf if limit is None else parse_bandwidth(limit)


def saving(run: Run) -> tuple[str, bool]:
    """Read how often checkpoints were saved, and whether at the end."""
    every = saved_every(run.job.get("checkpoint_every"), run.job.get("max_restarts", 0))
    return every or "end", bool(job_field("save_final")(run)) or every == "end"
