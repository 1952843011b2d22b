"""Settings that a backend supports; others are refused before the run starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..core.cluster import Role
from ..core.errors import UsageError
from ..core.job import Job
from ..exchange.authentication import gpu_error, refuse_too_many

Mode = Literal["sync", "async"]
Precision = Literal["fp32", "bf16", "fp16"]
Device = Literal["cpu", "gpu"]
Exchange = Literal["native", "direct"]


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """Format of exported models.

    `usage` is Python code that loads it, IMAGES being an image batch's shape. `text_…` are for models that translate.
    """

    summary: str
    usage: str
    text_summary: str = ""
    text_usage: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend declares. The defaults are the minimum: sync training in fp32 on the CPU.

    - `modes`, `precisions`, `devices`, `exchanges`: supported values of the options; ``--device auto`` is always possible.
    - `compiling`, `augmentation`, `profiling`, `accumulation`, `clipping`, `weight_averaging`, `losses`, `decay_exceptions`: whether it
      supports ``--compile``, ``--augment``, ``--profile``, ``--accumulate``, ``--clip-norm``, ``--ema-decay``, ``--loss``,
      ``--weight-decay-except``.
    - `deterministic`: with ``--deterministic`` two sync runs of a job are bit-identical, also after a resume.
    - `packages`: the imported top-level modules, each with the distributions that provide it; all are needed, and their versions recorded.
    - `install`: the command that installs them; `gpu_install`: what to do if the framework does not find an existing GPU.
    - `host_network_warning`: what users must know when several tasks share the host's network, such as open ports.
    - `forks`: a process that has only run `preload` may be forked into tasks. What that imports starts no thread, opens no device, keeps
      nothing that a child must not share; a second call in the child, maybe for another job, has the effect of a single one.
    - `survives`: roles of non-leading tasks without which training continues; any other task's death fails the attempt.
    - `rejoins`: roles of non-leading async tasks that can be restarted separately during training. Others do a lost task's work, and
      no update is applied twice. A leading session then also implements `ReplacesWorkers`.
    - `export_formats`: what its `export` can write, by the value of ``trainer export --format``.
    """

    modes: frozenset[Mode] = frozenset({"sync"})
    precisions: frozenset[Precision] = frozenset({"fp32"})
    devices: frozenset[Device] = frozenset({"cpu"})
    exchanges: frozenset[Exchange] = frozenset({"native"})
    compiling: bool = False
    augmentation: bool = False
    deterministic: bool = False
    profiling: bool = False
    accumulation: bool = False
    clipping: bool = False
    weight_averaging: bool = False
    losses: bool = False
    decay_exceptions: bool = False
    packages: Mapping[str, Sequence[str]] = field(default_factory=dict)
    install: str = ""
    gpu_install: str = ""
    host_network_warning: str = ""
    forks: bool = False
    survives: frozenset[Role] = frozenset()
    rejoins: frozenset[Role] = frozenset()
    export_formats: Mapping[str, ExportFormat] = field(default_factory=dict)


COMPLETE = Capabilities(
    modes=frozenset({"sync", "async"}),
    precisions=frozenset({"fp32", "bf16", "fp16"}),
    devices=frozenset({"cpu", "gpu"}),
    exchanges=frozenset({"native", "direct"}),
    compiling=True,
    augmentation=True,
    deterministic=True,
    profiling=True,
    accumulation=True,
    clipping=True,
    weight_averaging=True,
    losses=True,
    decay_exceptions=True,
    forks=True,
    rejoins=frozenset({"worker"}),
)  # supports every setting


def refuse_unsupported(job: Job, backend: str, capabilities: Capabilities) -> None:
    """Raise UsageError for the first setting that the backend does not support.

    The message begins with the field's name.
    """
    for name, value, supported in _asked(job, capabilities):
        if value not in supported:
            listed = ", ".join(supported) or "nothing"
            raise UsageError(f"{name}: got {value!r}, which backend {backend} does not support; supported there: {listed}.")
    if job.exchange == "direct" and job.mode == "sync" and job.wrapped:
        refuse_too_many(job.workers)
        if job.device == "gpu":
            raise gpu_error()


def check_precision(job: Job, *, gpu: bool) -> None:
    """Raise UsageError for fp16 without a GPU."""
    if job.precision == "fp16" and not gpu:
        raise UsageError("precision: got 'fp16', which needs a GPU, and this run computes on the CPU; allowed here: fp32, bf16. Use bf16.")


def unused_precision(precision: str, model: str, backend: str) -> UsageError:
    """Return the error about a model that computes nothing in `precision`, which is below fp32."""
    return UsageError(
        f"precision: got {precision!r}, but the forward function of model {model!r} on {backend} computes nothing in it; "
        "allowed there: fp32. Choose fp32, or let the function compute its products in context.compute (docs/adding-a-model.md)."
    )


def _asked(job: Job, capabilities: Capabilities) -> Iterator[tuple[str, str, Sequence[str]]]:
    yield "mode", job.mode, sorted(capabilities.modes)
    yield "precision", job.precision, sorted(capabilities.precisions, reverse=True)
    yield "device", job.device, ["auto", *sorted(capabilities.devices)]
    yield "exchange", job.exchange, sorted(capabilities.exchanges, reverse=True)
    yield "compile", job.compile, ["off", *(["on", "auto"] if capabilities.compiling else [])]
    for name, value, without, supported in (
        ("augment", job.augment, "none", capabilities.augmentation),
        ("deterministic", str(job.deterministic).lower(), "false", capabilities.deterministic),
        ("profile", str(job.profile), "0", capabilities.profiling),
        ("accumulate", f"{job.accumulate:g}", "1", capabilities.accumulation),
        ("clip_norm", f"{job.clip_norm:g}", "0", capabilities.clipping),
        ("ema_decay", f"{job.ema_decay:g}", "0", capabilities.weight_averaging),
        ("loss", job.loss or "none", "none", capabilities.losses),
        ("weight_decay_except", job.weight_decay_except or "none", "none", capabilities.decay_exceptions),
    ):
        yield name, value, [without, value] if supported else [without]
