"""What a backend can do of all that a job may ask for; whatever it does not declare is refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..core.cluster import Role
from ..core.errors import UsageError
from ..core.job import Job
from ..exchange.limits import gpu_error, refuse_too_many

__all__ = ["Capabilities", "Device", "Exchange", "ExportFormat", "Mode", "Precision", "refuse_unsupported", "unused_precision"]

Mode = Literal["sync", "async"]
Precision = Literal["fp32", "bf16", "fp16"]
Device = Literal["cpu", "gpu"]
Exchange = Literal["native", "direct"]


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """A format. `summary` says what it is in a line; `usage` is Python code that loads it from the current folder, for its README.

    The word IMAGES in the code becomes the shape of a batch of one image. `text_summary` and `text_usage` say the same where a model that
    translates is written in another way.
    """

    summary: str
    usage: str
    text_summary: str = ""
    text_usage: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend declares. The defaults are the least that a backend can be: sync training in fp32 on the CPU.

    - `modes`, `precisions`, `devices`: the values of ``--mode``, ``--precision`` and ``--device`` that it carries out; ``--device auto`` is
      always possible.
    - `exchanges`: the values of ``--exchange``; ``direct`` adds up gradients of CPUs by `exchange.mesh`.
    - `compiling`: it compiles its steps where ``--compile`` asks for it, and measures whether that pays (`backends.compiling`).
    - `augmentation`: it applies the changes of its batches (``--augment``).
    - `deterministic`: two runs of one sync job are equal to the bit where ``--deterministic`` asks for it, also one that was resumed.
    - `profiling`: it writes traces (``--profile``).
    - `accumulation`: it computes an update in micro-batches (``--accumulate``).
    - `clipping`: it limits the norm of an update's gradient (``--clip-norm``).
    - `weight_averaging`: it keeps a moving average of the weights and evaluates with it (``--ema-decay``).
    - `packages`: the top-level modules that it imports, each with the distributions that it may come in. Where one is lacking the backend
      counts as not installed; the releases of all are recorded with each run.
    - `install`: the command that installs them; `gpu_install`: what to do where a GPU is there and the framework does not see it.
    - `host_network_warning`: what users have to know where several tasks share the host's own network, such as open ports.
    - `forks`: a process that has carried out `preload` and nothing else may be forked, and each child can become a task. So nothing that
      `preload` imports starts a thread, opens a device or keeps what a child must not share, and a second call in the child, maybe for
      another job, leaves it as one call for that job would.
    - `survives`: the roles of those tasks whose death training goes on without; the death of any other is the failure of its attempt. None
      of them leads, since leading tasks answer every command.
    - `rejoins`: the roles of those tasks of an async run that can be started anew alone: another process takes the place of one that was
      lost, in the cluster that stands, and training goes on meanwhile. What the lost one was doing is done by others, and no update is
      applied twice. None of them leads. A leading session has what `ReplacesWorkers` has then.
    - `export_formats`: what its `export` can write, by the name that ``trainer export --format`` takes.
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
    packages: Mapping[str, Sequence[str]] = field(default_factory=dict)
    install: str = ""
    gpu_install: str = ""
    host_network_warning: str = ""
    forks: bool = False
    survives: frozenset[Role] = frozenset()
    rejoins: frozenset[Role] = frozenset()
    export_formats: Mapping[str, ExportFormat] = field(default_factory=dict)


def refuse_unsupported(job: Job, backend: str, capabilities: Capabilities) -> None:
    """Raise UsageError, which begins with the field's name, for the first thing that a job asks for and its backend does not declare."""
    for name, asked, supported in _asked(job, capabilities):
        if asked not in supported:
            listed = ", ".join(supported) or "nothing"
            raise UsageError(f"{name}: got {asked!r}, which backend {backend} does not support; supported there: {listed}.")
    if job.exchange == "direct" and job.mode == "sync" and job.wrapped:
        refuse_too_many(job.workers)
        if job.device == "gpu":
            raise gpu_error()


def unused_precision(precision: str, model: str, backend: str) -> UsageError:
    """Return the error about a model whose forward function computes nothing in the format of `precision`, which is below fp32."""
    return UsageError(
        f"precision: got {precision!r}, but the forward function of model {model!r} on {backend} computes nothing in it; "
        "allowed there: fp32. Choose fp32, or let the function compute its products in context.compute (docs/adding-a-model.md)."
    )


def _asked(job: Job, capabilities: Capabilities) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yield each field of a job that a backend has to carry out: its name, its value, and the values that the backend supports."""
    yield "mode", job.mode, sorted(capabilities.modes)
    yield "precision", job.precision, sorted(capabilities.precisions, reverse=True)
    yield "device", job.device, ["auto", *sorted(capabilities.devices)]
    yield "exchange", job.exchange, sorted(capabilities.exchanges, reverse=True)
    yield "compile", job.compile, ["off", *(["on", "auto"] if capabilities.compiling else [])]
    yield "augment", job.augment, ["none", *([job.augment] if capabilities.augmentation else [])]
    yield "deterministic", _switch(job.deterministic), ["false", *(["true"] if capabilities.deterministic else [])]
    yield "profile", str(job.profile), ["0", *([str(job.profile)] if capabilities.profiling else [])]
    for name, without, supported in (
        ("accumulate", 1, capabilities.accumulation),
        ("clip_norm", 0, capabilities.clipping),
        ("ema_decay", 0, capabilities.weight_averaging),
    ):
        asked = getattr(job, name)
        yield name, f"{asked:g}", [f"{without}", *([f"{asked:g}"] if supported else [])]


def _switch(value: bool) -> str:
    return str(value).lower()
