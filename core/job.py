"""The job: the validated, immutable description of one run.

One name each: ``--batch-size``, ``TRAINER_BATCH_SIZE``, ``batch_size`` in TOML, and the field, whose description is the help text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from .cluster import parse_procs_per_node, workers_by_node
from .console import is_plain_name, is_text
from .patterns import read_patterns
from .schedules import SCHEDULES, schedules_with
from .setting import (
    ALL,
    LEARNING,
    NOTHING,
    RESOURCES,
    TARGET,
    TIME,
    WORK,
    ComparisonRule,
    Requirement,
    no_effect,
    setting,
    stops_run,
    trajectory,
)
from .topics import Topic
from .units import MAX_AMOUNT, Cadence, Target, decimal_number, parse_bandwidth

DEFAULT_BATCH_SIZE = 32
DEFAULT_EPOCHS = 10
RESTARTS_CADENCE = "10s"  # default of a run with restarts: at least this far apart (`engine.policies`)
MAX_RESTARTS = 100_000  # of a run; no run that trains in between reaches it
MAX_NODES = 4096  # of a run; also of tasks of a kind and of threads of a task
MAX_RUN_NAME_BYTES = 200  # file systems allow 255, and --repeats adds a number

# An upper bound on every number keeps typing errors out of arrays, thread pools and timers.
MAX_NUMBER = MAX_AMOUNT
MAX_ACCUMULATED = 65_536
MAX_EXAMPLES = 2**53  # of an update: what a float64 counts exactly
MAX_SIZE = 1e30  # a float32 holds it, also times some factors


def _check_number(value: object) -> object:
    """Refuse a text that is no decimal number; pydantic would read 1_0 as 10."""
    if isinstance(value, str):
        try:
            decimal_number(value)
        except ValueError:
            raise PydanticCustomError("decimal_number", "no decimal number") from None  # the field shows what is allowed
    return value


TYPED = BeforeValidator(_check_number)  # after a number's bounds, which help and messages show


def _read_by(read: Callable[[str], object]) -> AfterValidator:
    """Check a text by a function that raises ValueError."""

    def check(text: str | None) -> str | None:
        if text is not None:
            read(text)
        return text

    return AfterValidator(check)


def _read_cadence(text: str) -> None:
    try:
        Cadence.parse(text)
    except ValueError as error:
        raise ValueError(f"{error}. To save no checkpoint, give --no-save-final without --checkpoint-every") from None


def _check_schedule(value: object) -> object:
    if not isinstance(value, str) or value not in SCHEDULES:
        *names, last = map(repr, SCHEDULES)
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": f"{', '.join(names)} or {last}"})
    return value


def _require_schedule(name: str) -> Requirement:
    return Requirement("schedule", schedules_with(name))


_common = partial(setting, Topic.COMMON)
_data = partial(setting, Topic.DATA)
_optimiser = partial(setting, Topic.OPTIMISER)
_evaluation = partial(setting, Topic.EVALUATION)
_cluster = partial(setting, Topic.CLUSTER)
_checkpoints = partial(setting, Topic.CHECKPOINTS)
_speed = partial(setting, Topic.SPEED)
_records = partial(setting, Topic.RECORDS)
SGD, ADAM = Requirement("optimizer", ("sgd",)), Requirement("optimizer", ("adam", "adamw"))
SCALED_LR = Requirement("scale_lr", ("linear", "sqrt"))
RESTARTED = Requirement("max_restarts", above_zero=True, shown="3")
PAUSES = frozenset({TIME, TARGET})
Positive = Annotated[int, Field(ge=1, le=MAX_NUMBER), TYPED]
UpToMostNodes = Annotated[int, Field(ge=1, le=MAX_NODES), TYPED]
Fraction = Annotated[float, Field(ge=0, lt=1), TYPED]
Finite = Annotated[float, Field(ge=0, le=MAX_SIZE), TYPED]
AboveZero = Annotated[float, Field(gt=0, le=MAX_SIZE), TYPED]
Patience = Annotated[float, Field(gt=0, le=365 * 86_400), TYPED]


def without_password(uri: str) -> str:
    """Return a URI without user and password."""
    place = urlsplit(uri).netloc
    return uri.replace(place, place.rpartition("@")[2], 1)  # urlunsplit would take slashes from sqlite:////tmp/x.db


_DIGEST = re.compile(r"(?P<path>.+)\?sha256=(?P<digest>[0-9a-f]{64})", re.DOTALL)


def with_digest(path: Path, digest: str) -> Path:
    """Return a path with the SHA-256 of the file's content, as ``PATH?sha256=DIGEST``."""
    return Path(f"{path}?sha256={digest}")


def split_digest(path: Path) -> tuple[Path, str | None]:
    """Return the path and the digest of ``PATH[?sha256=DIGEST]``."""
    match = _DIGEST.fullmatch(str(path))
    return (path, None) if match is None else (Path(match["path"]), match["digest"])


def saved_every(checkpoint_every: str | None, max_restarts: int) -> str | None:
    """Return how often a job saves: as set, else by time if it restarts; None: only at its end."""
    return checkpoint_every or (RESTARTS_CADENCE if max_restarts else None)


class Job(BaseModel):
    """One training run; every field is a flag, environment variable and TOML key."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=False, protected_namespaces=())

    backend: str = _common("auto", "Framework: a name from `trainer backends`; auto uses the first installed one.")
    mode: Literal["sync", "async"] = _common(
        "sync", "sync: one update per global batch (all-reduce); async: one update per worker batch (parameter server)."
    )
    distributed: Literal["auto", "always"] = _speed(
        "auto",
        "Sync: always uses the framework's distributed wrapper on a single worker too, to measure its overhead.",
        requires=Requirement("mode", ("sync",)),
    )
    exchange: Literal["native", "direct"] = _speed(
        "native",
        "Sync: all-reduce of the gradients. native: the framework's collectives; direct: built-in TCP all-reduce, with lower latency "
        "for small models, on CPUs, with at most 64 workers.",
        requires=Requirement("mode", ("sync",)),
    )
    compile: Literal["off", "on", "auto"] = _speed(
        "off", "Compile each worker's step with XLA (tf) or torch.compile: on, or auto, which times both during the start, for at most 5 s."
    )
    model: str = _common(
        "logreg",
        "A name from `trainer models`; an nn.Module class, a Keras model or a function that returns one, as FILE.py:NAME, "
        "package.module:NAME or torchvision:NAME; a configuration of transformers, hf:CONFIG.json; or a module with a spec and forward functions: "
        "my_package.my_model. Arguments may follow: ?key=value&key=value.",
        foreign="run the code of the module {}",
    )
    data: str = _common(
        "digits", "A name from `trainer data list`; some take arguments, such as synthetic-images:64.", foreign="read what {} names"
    )
    data_dir: Path | None = _data(None, "Folder with the dataset's original files.", role="operation", foreign="read the folder {}")
    vocabulary: Annotated[int, Field(ge=2, le=65_535), TYPED] | None = _data(
        None, "Text: vocabulary size; it becomes part of the dataset's name."
    )

    nodes: UpToMostNodes = _common(1, "Number of nodes (virtual nodes on this machine with the local launcher).")
    procs_per_node: Annotated[UpToMostNodes | tuple[UpToMostNodes, ...], BeforeValidator(parse_procs_per_node)] = _cluster(
        1, "Workers per node: one number, or one for each node, such as 1,2."
    )
    ps: UpToMostNodes = _cluster(1, "Async: number of parameter servers; the first is on node 0.", requires=Requirement("mode", ("async",)))

    batch_size: Positive | None = _common(
        None,
        "Examples per worker and micro-batch. A sync update uses batch size * accumulate * workers examples, an async update "
        f"batch size * accumulate (default {DEFAULT_BATCH_SIZE}).",
    )
    global_batch_size: Positive | None = _optimiser(
        None, "Examples per update of all workers, instead of --batch-size; need not divide evenly."
    )
    accumulate: Annotated[int, Field(ge=1, le=MAX_ACCUMULATED), TYPED] = _optimiser(
        1,
        "Gradient accumulation: micro-batches per worker and update. The update of a large batch with the memory of a small one.",
        compare=ComparisonRule("micro-batches", WORK, "a worker computes its batch in another number of parts"),
        mllog="gradient_accumulation_steps",
    )
    batch_tokens: Positive | None = _optimiser(
        None,
        "Text: tokens per worker and micro-batch, padding included, in batches of similar sentence length, instead of --batch-size.",
        compare=trajectory("tokens of a batch"),
    )
    epochs: Positive | None = _common(None, f"Stop after this many passes over the training data (default {DEFAULT_EPOCHS}).")
    steps: Positive | None = _evaluation(None, "Stop after this many updates, instead of --epochs.")
    examples: Positive | None = _evaluation(
        None, "Stop after the update that completes this many examples, instead of --epochs: the same budget in both modes."
    )
    until: Annotated[str | None, _read_by(Target.parse)] = _evaluation(  # the model's objective knows the metrics
        None, "Stop when an evaluation reaches this target, such as 'accuracy>=0.9'."
    )

    loss: str | None = _optimiser(
        None,
        "Loss, by default that of the model and data. Classes: cross_entropy, binary_cross_entropy (a single output, for two classes), "
        "multi_label (a binary loss per class). Numbers: mse, mae, huber?delta=1. "
        "Options: cross_entropy?smoothing=0.1&class_weights=balanced, or a weight for each class.",
        compare=ComparisonRule(
            "loss", LEARNING, "losses by other formulas are not comparable, and trajectories differ", none="the model's"
        ),
    )
    optimizer: Literal["sgd", "adam", "adamw"] = _optimiser(
        "sgd",
        "Update rule; the formulas are torch's on every backend.",
        compare=ComparisonRule("optimizer", ALL, "another update rule has another cost and trajectory"),
        mllog="opt_name",
    )
    lr: AboveZero = _common(
        0.05, "Learning rate before --scale-lr and the schedule.", compare=trajectory("learning rate"), mllog="opt_base_learning_rate"
    )
    momentum: Fraction = _optimiser(0.0, "SGD: momentum.", compare=trajectory("momentum", SGD), mllog="sgd_opt_momentum")
    nesterov: bool = _optimiser(False, "SGD: Nesterov momentum.", compare=trajectory("Nesterov momentum", SGD))
    weight_decay: Finite = _optimiser(
        0.0, "Weight decay: added to the gradient (sgd, adam), decoupled (adamw).", compare=trajectory("weight decay")
    )
    weight_decay_except: str | None = _optimiser(
        None,
        "With --weight-decay: parameters without it, as patterns of their names, such as '*.bias,*norm*'.",
        requires=Requirement("weight_decay", above_zero=True, shown="0.01"),
        compare=trajectory("parameters without weight decay", none="none"),
    )
    beta1: Fraction = _optimiser(
        0.9, "Adam, AdamW: decay of the first moment.", requires=ADAM, compare=trajectory("beta1"), mllog="opt_{optimizer}_beta_1"
    )
    beta2: Fraction = _optimiser(
        0.999, "Adam, AdamW: decay of the second moment.", requires=ADAM, compare=trajectory("beta2"), mllog="opt_{optimizer}_beta_2"
    )
    epsilon: AboveZero = _optimiser(
        1e-8,
        "Adam, AdamW: added to the root of the second moment.",
        requires=ADAM,
        compare=trajectory("epsilon"),
        mllog="opt_{optimizer}_epsilon",
    )
    schedule: Annotated[str, BeforeValidator(_check_schedule), WithJsonSchema({"enum": list(SCHEDULES), "type": "string"})] = _optimiser(
        "constant",
        "Learning-rate schedule: step multiplies the rate by gamma every few epochs; cosine lowers it to 0 at the planned last update; "
        "noam is lr * coefficient / sqrt(width) * min(1 / sqrt(update), update / warmup^1.5).",
        compare=trajectory("schedule"),
        mllog="opt_learning_rate_decay_schedule",
    )
    schedule_step_epochs: Annotated[float, Field(gt=0, le=MAX_NUMBER), TYPED] = _optimiser(
        1.0,
        "Schedule step: epochs between two decays.",
        requires=_require_schedule("schedule_step_epochs"),
        compare=trajectory("epochs between decays"),
    )
    schedule_gamma: Annotated[float, Field(gt=0, le=1), TYPED] = _optimiser(
        0.1,
        "Schedule step: factor of each decay.",
        requires=_require_schedule("schedule_gamma"),
        compare=trajectory("decay"),
        mllog="opt_learning_rate_decay_factor",
    )
    schedule_coefficient: AboveZero = _optimiser(
        1.0,
        "Schedule noam: factor of the learning rate.",
        requires=_require_schedule("schedule_coefficient"),
        compare=trajectory("factor of the schedule"),
    )
    warmup_steps: Annotated[int, Field(ge=0, le=MAX_NUMBER), TYPED] = _optimiser(
        0,
        "Linear warm-up from 0 over this many updates, before any schedule; part of noam's formula.",
        compare=trajectory("warm-up"),
        mllog="opt_learning_rate_warmup_steps",
    )
    scale_lr: Literal["none", "linear", "sqrt"] = _optimiser(
        "none", "Scale the learning rate with global batch / --base-batch-size.", compare=trajectory("learning-rate scaling")
    )
    base_batch_size: Positive = _optimiser(
        DEFAULT_BATCH_SIZE,
        "The global batch for which --lr was chosen; used by --scale-lr.",
        requires=SCALED_LR,
        compare=trajectory("batch of the learning rate"),
    )

    clip_norm: Finite = _optimiser(
        0.0, "Clip the global gradient norm to this value. 0 disables clipping.", compare=trajectory("gradient clipping norm")
    )
    ema_decay: Fraction = _optimiser(
        0.0,
        "Decay per update of an exponential moving average of the weights, used for evaluations. 0 disables it.",
        compare=ComparisonRule("moving average of the weights", ALL, "evaluations use the average, which takes time and memory"),
    )

    augment: Literal["none", "crop", "flip", "crop+flip"] = _data(
        "none",
        "Random augmentation of training images, the same on every backend: shifts by up to an eighth, mirroring, or both.",
        compare=ComparisonRule("augmentation", ALL, "augmentation takes time and changes the training images"),
    )
    precision: Literal["fp32", "bf16", "fp16"] = _speed(
        "fp32", "Number format of convolutions and matrix products; weights stay fp32. fp16 (GPU) scales the loss."
    )
    device: Literal["auto", "cpu", "gpu"] = _speed("auto", "Device; auto uses a GPU if the framework finds one.")
    threads: UpToMostNodes | None = _speed(
        None,
        "Compute threads of each task, a worker or parameter-server process (default: cores of the node divided by its tasks, at least 1; "
        "1 for very small steps).",
    )
    steps_per_call: Positive | None = _speed(
        None,
        "Maximum number of steps per framework call (default: the backend's choice); 1 disables fusing.",
        compare=ComparisonRule("steps per call", WORK, "fused steps cost less", none="the backend's choice"),
    )
    seed: Annotated[int, Field(ge=0, lt=2**63), TYPED] = _data(0, "Seeds initial weights, data order and dropout.", mllog="seed")
    initial_weights: Path | None = _data(
        None,
        "File of the initial weights, instead of those of the seed: safetensors, or a torch state_dict (.pt, .pth). The run records the "
        "digest of its content.",
        foreign="read the weights in {}",
    )
    initial_weights_except: str | None = _data(
        None,
        "With --initial-weights: parameters and buffers that begin as the seed has them, as patterns of names, such as 'head.*,*.bias'.",
        requires=Requirement("initial_weights", shown="FILE"),
        compare=trajectory("weights that begin as the seed has them", none="none"),
    )
    deterministic: bool = _speed(
        False,
        "Use bitwise reproducible kernels (sync only).",
        compare=ComparisonRule("deterministic kernels", WORK, "reproducible kernels are slower"),
    )

    eval_every: Annotated[str, _read_by(Cadence.parse)] = _evaluation(
        "1epoch",
        "How often to evaluate on the test split: 1epoch, 500steps, 30s, or end. There is no validation split, so --until, --patience "
        "and --keep-best use the test split too.",
        compare=ComparisonRule("evaluations", PAUSES, "they take time, and targets are only checked there"),
    )
    eval_sentences: Positive = _evaluation(
        500,
        "Translation: maximum number of sentences per evaluation, decoded greedily.",
        compare=ComparisonRule("sentences an evaluation translates", PAUSES, "translating takes time"),
    )
    beam: Annotated[int, Field(ge=1, le=64), TYPED] = _evaluation(
        4,
        "Translation: beam size at the end of the run; 1 is greedy.",
        compare=ComparisonRule("beam", frozenset({TIME}), "the final translation takes time"),
    )
    length_penalty: Annotated[float, Field(ge=0, le=10), TYPED] = _evaluation(
        0.6,
        "Translation: log-probabilities are divided by ((5 + length) / 6) to this power.",
        compare=ComparisonRule("length penalty", NOTHING, "it only affects the final translations"),
    )
    checkpoint_every: Annotated[str | None, _read_by(_read_cadence)] = _checkpoints(
        None,
        "How often to save a checkpoint: 1epoch, 500steps, 100s, or end (default: end; with --max-restarts about every "
        "10 s, less often if saving would pause training for more than 0.5 % of the time).",
    )
    keep: Positive = _checkpoints(5, "Number of newest checkpoints to keep.", compare=no_effect("checkpoints kept"), role="operation")
    keep_best: str | None = _checkpoints(
        None,
        "Also keep the checkpoints of the best evaluations by this metric: loss, or a metric such as accuracy.",
        compare=no_effect("best checkpoint kept by", "none"),
        role="operation",
    )
    keep_best_count: Positive = _checkpoints(
        1,
        "With --keep-best: number of best checkpoints to keep, in addition to the newest.",
        requires=Requirement("keep_best"),
        compare=no_effect("best checkpoints kept"),
    )
    patience: Annotated[int, Field(ge=0, le=MAX_NUMBER), TYPED] = _evaluation(
        0,
        "Early stopping: evaluations without improvement of the --keep-best metric, or of the first metric. 0 disables it.",
        requires=Requirement("eval_every", unlike="end", shown="1epoch"),
    )
    profile: Annotated[int, Field(ge=0, le=MAX_NUMBER), TYPED] = _records(
        0,
        "Trace this many steps after warm-up into the run directory, for TensorBoard's or Chrome's trace viewer. Excluded from all speeds.",
        compare=ComparisonRule("profiled steps", NOTHING, "speeds exclude them, and the run is marked"),
    )
    calibrate: bool = _records(
        True,
        "After training, time the parts of a step separately (some seconds), to show where the time goes.",
        compare=no_effect("calibration"),
    )
    mllog: bool = _records(
        False, "Also write MLPerf's event log (:::MLLOG), as mllog.txt.", compare=no_effect("MLPerf's log"), role="operation"
    )

    launcher: str = _cluster(
        "auto",
        "How to start the nodes: local (virtual nodes), ssh (on --hosts), slurm (in an allocation), ray (in a cluster) or a launcher "
        "plugin; auto picks the first available of these four, and also detects torchrun, TF_CONFIG, the pods of a Job and --rendezvous.",
        compare=no_effect("launcher"),
        role="operation",
    )
    network: Literal["auto", "isolated", "host"] = _cluster(
        "auto", "isolated: virtual nodes with their own addresses and counters; host: all on 127.0.0.1."
    )
    bandwidth: Annotated[str | None, _read_by(parse_bandwidth)] = _cluster(
        None, "Limit each virtual node's link in both directions, such as 100mbit."
    )
    cores_per_node: tuple[Annotated[float, Field(ge=0.05, le=4096), TYPED], ...] | None = _cluster(
        None,
        "Limit each node's CPU cores: one number, or one for each node, such as 2,1,1.",
        compare=ComparisonRule("limit of cores", WORK, "the number of cores differs", none="none"),
    )
    start_timeout: Patience = _cluster(
        120.0, "Seconds for the cluster to form and warm up.", compare=stops_run("time limit of the start"), role="operation"
    )
    stall_timeout: Patience = _cluster(
        120.0,
        "Declare a run stalled after this many seconds without progress.",
        compare=stops_run("time limit of a stall"),
        role="operation",
    )
    node_timeout: Annotated[float, Field(ge=3, le=365 * 86_400), TYPED] = _cluster(
        10.0,
        "Declare a node lost after this many seconds without a heartbeat (sent every second).",
        compare=stops_run("time limit of a silent node"),
        role="operation",
    )
    max_restarts: Annotated[int, Field(ge=0, le=MAX_RESTARTS), TYPED] = _checkpoints(
        0,
        "Maximum automatic restarts from the newest checkpoint after a task or node failure, or a stall; "
        "0: the first failure ends the run.",
        compare=stops_run("maximum restarts"),
        role="operation",
    )
    restart_window: Patience | None = _checkpoints(
        None,
        "With --max-restarts: count only the restarts of the last so many seconds (default: of the whole run).",
        requires=RESTARTED,
        compare=stops_run("time within which restarts count", "the run"),
        role="operation",
    )
    min_nodes: UpToMostNodes | None = _checkpoints(
        None,
        "With --max-restarts: if lost nodes are not replaced, continue with at least this many, with the same examples per "
        "update, and with all nodes when they return (default: all nodes).",
        requires=RESTARTED,
        compare=stops_run("minimum nodes", "all"),
        role="operation",
    )
    spare_processes: bool = _checkpoints(
        False,
        "With --max-restarts: keep warm standby processes on each node, so that a restart does not wait for the framework's import; "
        "they need memory, and cores while they load.",
        requires=RESTARTED,
        compare=ComparisonRule("spare processes", frozenset({RESOURCES}), "they take memory, and cores to load"),
        role="operation",
    )
    on_nan: Literal["fail", "continue"] = _evaluation(
        "fail",
        "If the loss becomes NaN or infinite: fail the run, or log a warning and continue.",
        compare=stops_run("action on a non-finite loss"),
        role="operation",
    )

    sample_interval: Annotated[float, Field(ge=0.05, le=86_400), TYPED] = _records(
        0.5,
        "Seconds between two resource samples of a node.",
        requires=Requirement("monitor", (True,)),
        compare=ComparisonRule("sampling interval", frozenset({RESOURCES}), "more samples find higher peaks"),
    )
    monitor: bool = _records(True, "Sample the nodes' resources during training.", compare=no_effect("samples of resources"))
    out: Path = _records(Path("runs"), "Folder for run directories.", role="destination")
    name: str | None = _common(None, "Name of the run directory, instead of one from date, job and a suffix.", role="destination")
    save_final: bool = _checkpoints(
        True,
        "Save a checkpoint after the last step.",
        requires=Requirement("checkpoint_every", unlike="end", shown="1epoch"),
        role="operation",
    )
    tensorboard: bool = _records(True, "Also write TensorBoard event files.", compare=no_effect("TensorBoard's files"), role="operation")
    mlflow: str | None = _records(
        None,
        "Also log the run to MLflow at this tracking URI, such as http://127.0.0.1:5000 or sqlite:///mlflow.db.",
        role="destination",
        foreign="send its records to {}",
    )
    mlflow_experiment: Annotated[str, Field(min_length=1, max_length=500)] = _records(
        "crosstrain", "The MLflow experiment of the run; created if missing.", requires=Requirement("mlflow"), role="destination"
    )

    @field_validator("*", mode="before")
    @classmethod
    def _in_utf8(cls, value: object, info: ValidationInfo) -> object:
        if info.field_name != "out" and isinstance(value, str | Path) and not is_text(str(value)):  # it is read again from a run's files
            raise ValueError("text in UTF-8; rename a file or folder with another name, or give a link to it")
        return value

    @field_validator("data_dir", "initial_weights", "out", mode="before")
    @classmethod
    def _path(cls, value: object) -> object:
        if value == "":
            raise ValueError("a path, such as . for this folder")  # pathlib reads '' as this folder
        return value

    @field_validator("epochs", "steps", "examples", mode="before")
    @classmethod
    def _absolute(cls, value: object) -> object:
        if isinstance(value, str) and value.strip().startswith("+"):
            raise ValueError("a whole number of at least 1; one with + adds to what a run has done, and needs --resume")
        return value

    @field_validator("name")
    @classmethod
    def _name(cls, value: str | None) -> str | None:
        if value is None:
            return value
        size = len(value.encode(errors="replace"))
        if size > MAX_RUN_NAME_BYTES:
            raise ValueError(f"a folder name of at most {MAX_RUN_NAME_BYTES} bytes (this one has {size})")
        if not is_plain_name(value) or not value.strip() or value.startswith((".", "-")):
            raise ValueError("a folder name of visible characters, without slashes, that does not start with a dot or a dash")
        return value

    @field_validator("keep_best")
    @classmethod
    def _figure(cls, value: str | None) -> str | None:
        if value is None:
            return None
        name = value.strip().lower()
        if not re.fullmatch(r"[ -~]{1,64}", name):
            raise ValueError("a figure of the evaluation by its name, such as loss, accuracy or bleu")
        return name

    @field_validator("initial_weights")
    @classmethod
    def _absolute_path(cls, value: Path | None) -> Path | None:
        try:
            return None if value is None else value.expanduser().absolute()
        except (RuntimeError, OSError) as error:  # an unknown user's home; a removed working directory
            raise ValueError(f"an absolute path here ({error})") from error

    @field_validator("initial_weights_except", "weight_decay_except")
    @classmethod
    def _patterns(cls, value: str | None) -> str | None:
        if value is not None:
            read_patterns(value)
        return value

    @field_validator("mlflow")
    @classmethod
    def _tracking_uri(cls, value: str | None) -> str | None:
        if value is None or not value.strip():  # an empty one overrides that of a file or a resumed run
            return None
        if not re.match(r"[a-z][a-z0-9+.-]*:.", value, re.IGNORECASE):
            raise ValueError("an MLflow tracking URI, such as http://127.0.0.1:5000 or sqlite:///mlflow.db")
        return value

    @field_validator("cores_per_node", mode="before")
    @classmethod
    def _cores(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(","))
        if isinstance(value, int | float):
            return (value,)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for problem in _problems(self):
            raise ValueError(problem)
        return self

    @property
    def workers(self) -> int:
        """Number of workers on all nodes together."""
        return sum(self.workers_by_node)

    @property
    def workers_by_node(self) -> tuple[int, ...]:
        """The number of workers of each node, in node order."""
        return workers_by_node(self.procs_per_node, self.nodes)

    @property
    def global_batch(self) -> int:
        """Examples of all workers per update; with `batch_tokens` at most as many as tokens."""
        if self.batch_tokens is not None:
            return self.batch_tokens * self.accumulate * self.workers
        if self.global_batch_size is not None:
            return self.global_batch_size
        return (self.batch_size or DEFAULT_BATCH_SIZE) * self.accumulate * self.workers

    @property
    def update_batch(self) -> int:
        """Examples per update: the global batch in sync mode, a worker's batch in async mode."""
        return self.global_batch if self.mode == "sync" else self.per_worker_batch

    @property
    def per_worker_batch(self) -> int:
        """Examples of the largest slice that a worker takes of a full global batch."""
        return math.ceil(self.global_batch / self.workers)

    @property
    def micro_batch(self) -> int:
        """Maximum examples that a worker computes at once; with `batch_tokens` that many tokens."""
        return math.ceil(self.per_worker_batch / self.accumulate)

    @property
    def saved_every(self) -> str | None:
        """How often a checkpoint is saved: see `saved_every`."""
        return saved_every(self.checkpoint_every, self.max_restarts)

    @property
    def saves_intermediate_checkpoints(self) -> bool:
        """Whether checkpoints are saved before the end: at intervals, or of the best evaluations."""
        return self.keep_best is not None or (self.saved_every is not None and Cadence.parse(self.saved_every).unit != "end")

    @property
    def wrapped(self) -> bool:
        """Sync: whether the framework's distributed wrapper is used (always with several workers)."""
        return self.workers > 1 or self.distributed == "always"

    @property
    def bandwidth_bits_per_second(self) -> float | None:
        """The limit of each node's link, or None."""
        return parse_bandwidth(self.bandwidth) if self.bandwidth else None

    def recorded(self) -> dict[str, Any]:
        """Return the values for a run's files, without a tracking URI's user and password."""
        return {**self.model_dump(mode="json"), "mlflow": None if self.mlflow is None else without_password(self.mlflow)}

    def recorded_command(self, command: Sequence[str]) -> list[str]:
        """Return the command line for a run's files."""
        return [part if self.mlflow is None else part.replace(self.mlflow, without_password(self.mlflow)) for part in command]

    def cores_of(self, node: int) -> float | None:
        """Return the CPU limit of a node in cores, None if unlimited."""
        if self.cores_per_node is None:
            return None
        return self.cores_per_node[node if len(self.cores_per_node) > 1 else 0]


def _problems(job: Job) -> Iterator[str]:
    """Yield what is wrong with a job whose fields are valid one by one.

    Later checks rely on the earlier ones having passed.
    """
    return chain(_worker_problems(job), _batch_problems(job), _update_rule_problems(job), _node_problems(job), _micro_batch_problems(job))


def _worker_problems(job: Job) -> Iterator[str]:
    try:
        job.workers_by_node  # noqa: B018 - raises unless there is one number for each node
    except ValueError as error:
        yield f"procs_per_node: {error}"


def _batch_problems(job: Job) -> Iterator[str]:
    if job.batch_size is not None and job.global_batch_size is not None:
        yield "batch_size and global_batch_size: give one of the two"
    if job.batch_tokens is not None and (job.batch_size is not None or job.global_batch_size is not None):
        yield "batch_tokens: instead of batch_size and global_batch_size, which count examples; give one of them"
    if job.batch_tokens is not None and job.scale_lr != "none":
        yield "scale_lr: needs batches of a number of examples (batch_size), and batch_tokens counts tokens"
    budgets = [field for field in ("epochs", "steps", "examples") if getattr(job, field) is not None]
    if len(budgets) > 1:
        yield f"{budgets[0]} and {budgets[1]}: give one of the two"


def _update_rule_problems(job: Job) -> Iterator[str]:
    if job.nesterov and not job.momentum:
        yield "nesterov: needs momentum greater than 0"
    if job.optimizer != "sgd" and job.momentum:
        yield f"momentum: belongs to optimizer sgd, not {job.optimizer} (which has beta1)"
    if SCHEDULES[job.schedule].has_warmup and not job.warmup_steps:
        yield f"schedule: {job.schedule} rises over --warmup-steps updates and falls after them; give at least 1, such as 4000"


def _node_problems(job: Job) -> Iterator[str]:
    if job.mode == "sync" and job.ps != 1:
        yield "ps: parameter servers exist in mode async only"
    if job.deterministic and job.mode == "async":
        yield "deterministic: possible in mode sync only (the order of asynchronous updates is not repeatable)"
    if job.min_nodes is not None and job.min_nodes > job.nodes:
        yield f"min_nodes: at most the {job.nodes} nodes that the run has, got {job.min_nodes}"
    if job.cores_per_node is not None and len(job.cores_per_node) not in (1, job.nodes):
        yield f"cores_per_node: give one number or one for each of the {job.nodes} nodes, not {len(job.cores_per_node)}"
    if job.network == "host" and (job.bandwidth is not None or job.cores_per_node is not None):
        yield "network: 'host' cannot limit nodes; bandwidth and cores_per_node need 'isolated'"


def _micro_batch_problems(job: Job) -> Iterator[str]:
    if job.per_worker_batch < job.accumulate:
        yield f"accumulate: a worker's {job.per_worker_batch} examples of an update cannot be computed in {job.accumulate} micro-batches"
    if job.global_batch > MAX_EXAMPLES:
        yield f"accumulate: an update of {job.global_batch:.3g} examples is more than any data has; give less of each"
    if job.mode == "async" and job.global_batch_size is not None and job.global_batch_size < job.workers:
        yield f"global_batch_size: must be at least the number of workers ({job.workers}) in mode async"
