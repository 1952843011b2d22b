"""The registry of backends, models, datasets, forward functions and launchers.

Modules are imported only when used, and a broken plugin hides no other.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, cast

from .errors import MissingPackageError, TrainerError, UsageError, raised

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

Kind = Literal["backend", "model", "dataset", "forward", "launcher"]
GROUPS: Mapping[Kind, str] = {
    "backend": "crosstrain.backends",
    "model": "crosstrain.models",
    "dataset": "crosstrain.datasets",
    "forward": "crosstrain.forwards",
    "launcher": "crosstrain.launchers",
}


@dataclass(frozen=True, slots=True)
class Plugin:
    """A name, its object, and how to install what it needs."""

    name: str
    target: str  # ``module`` or ``module:attribute``
    requires: str = ""  # top-level module
    install: str = ""
    distributions: tuple[str, ...] = ()  # packages that may contain it
    provider: str = ""  # distribution of an entry point
    requires_also: tuple[str, ...] = ()  # modules that it needs in turn

    @property
    def described(self) -> str:
        """Its name, object and package, for messages."""
        return f"{self.name!r} ({self.target}{f', of the package {self.provider!r}' if self.provider else ''})"

    @property
    def installed(self) -> bool:
        """Whether the needed modules can be found; none is imported."""
        return not self.requires or not missing_packages([self.requires, *self.requires_also])


MOVED = {  # documented modules before 0.3 and their successors, as plugins may import them
    "core.liveness.startup_watchdog": "core.liveness",
    "core.untrusted.listener": "core.listener",
    "data.statistics": "data.preprocessing",
    "launch.launchers.carrier": "launch.launchers.ssh",
    "launch.launchers.remote": "launch.launchers.ssh",
    "launch.launchers.request": "launch.launchers.registry",
    "launch.node.identity": "launch.node.scratch",
    "metrics.language": "metrics.base",
    "models.alexnet.spec": "models.alexnet",
    "models.cnn.spec": "models.cnn",
    "models.decoding.quality": "models.decoding",
    "models.layers.tf.sequence": "models.layers.tf",
    "models.layers.torch.sequence": "models.layers.torch",
    "models.resnet18.spec": "models.resnet18",
    "models.transformer.spec": "models.transformer",
    "report.series.arrays": "report.runs.series_arrays",
}


class MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of `MOVED` by their successors, and their removed parents as empty packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's spec, None for other modules."""
        short = fullname.removeprefix("crosstrain.")
        if short in MOVED or (short != fullname and any(old.startswith(f"{short}.") for old in MOVED)):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=short not in MOVED)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module."""
        successor = MOVED.get(module.__name__.removeprefix("crosstrain."))
        if successor is not None:
            names = vars(importlib.import_module(f"crosstrain.{successor}"))
            vars(module).update({name: value for name, value in names.items() if not name.startswith("_")})


sys.meta_path.append(MovedModules())


def missing_packages(names: Iterable[str]) -> list[str]:
    """Return the top-level modules that cannot be found; none is imported."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def installed_release(distribution: str) -> str | None:
    """Return a distribution's release by its metadata; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # loaded on demand, as for plug-ins

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


NO_MODULE = "but there is no such module; it has to be installed or to lie on PYTHONPATH."  # for a model's module path
_BACKENDS = (
    Plugin(
        name="tf",
        target="crosstrain.backends.tf:BACKEND",
        requires="tensorflow",
        install="pip install 'crosstrain[tf]'",
        distributions=("tensorflow", "tensorflow-cpu", "tf-nightly"),
    ),
    Plugin(
        name="torch",
        target="crosstrain.backends.torch:BACKEND",
        requires="torch",
        install="pip install 'crosstrain[torch]'",
        distributions=("torch",),
    ),
)
DOWNLOADER = Plugin(
    name="torchvision",
    target="crosstrain.data.sources.download",
    requires="torchvision",
    install="pip install 'crosstrain[torch]'",
    distributions=("torchvision",),
    requires_also=("torch",),
)
_MODELS = ("logreg", "cnn", "alexnet", "resnet18", "transformer")  # folders with a forward function per built-in backend
IMPORTED = "imported"  # forward functions of references
_PARQUET = "pip install 'crosstrain[parquet]'"
BUILT_IN: Mapping[Kind, tuple[Plugin, ...]] = {
    "backend": _BACKENDS,
    "model": tuple(Plugin(name, f"crosstrain.models.{name}:build") for name in _MODELS),
    "dataset": (
        Plugin("digits", "crosstrain.data.sources.digits:DATASET"),
        Plugin("glyphs", "crosstrain.data.sources.glyphs:GLYPHS"),
        Plugin("glyphs28", "crosstrain.data.sources.glyphs:GLYPHS28"),
        Plugin("synthetic-images", "crosstrain.data.sources.synthetic:DATASET"),
        Plugin("mnist", "crosstrain.data.sources.mnist:DATASET"),
        Plugin("cifar10", "crosstrain.data.sources.cifar10:DATASET"),
        Plugin("svhn", "crosstrain.data.sources.svhn:DATASET"),
        Plugin("image-folder", "crosstrain.data.sources.image_folder:DATASET"),
        Plugin("csv", "crosstrain.data.sources.tables.source:CSV"),
        Plugin("npz", "crosstrain.data.sources.arrays.source:NPZ"),
        Plugin("torch-dataset", "crosstrain.data.sources.arrays.python_datasets:DATASET"),
        Plugin("jsonl", "crosstrain.data.sources.texts.source:JSON_LINES"),
        Plugin("hf-dataset", "crosstrain.data.sources.texts.source:SAVED_DATASET", requires="pyarrow", install=_PARQUET),
        Plugin("parquet", "crosstrain.data.sources.tables.source:PARQUET", requires="pyarrow", install=_PARQUET),
        Plugin("numbers", "crosstrain.data.sources.translation.numbers_in_words:DATASET"),
        Plugin("parallel-text", "crosstrain.data.sources.translation.parallel_text:DATASET"),
    ),
    "forward": (
        *(Plugin(f"{name}/{on.name}", f"crosstrain.models.{name}.{on.name}") for name in _MODELS for on in _BACKENDS),
        *(Plugin(f"{IMPORTED}/{on.name}", f"crosstrain.models.imported.{on.name}.forward") for on in _BACKENDS),
    ),
    "launcher": (
        *(Plugin(name, f"crosstrain.launch.launchers.{name}:LAUNCHER") for name in ("rendezvous", "local", "ssh", "slurm")),
        Plugin("ray", "crosstrain.launch.launchers.ray:LAUNCHER", requires="ray", install="pip install 'crosstrain[ray]'"),
    ),
}

SEPARATE: Mapping[Kind, Mapping[str, str]] = {  # installation of what has a package of its own in this repository
    "dataset": {"debian-text": "pip install ./examples/debian_text, in a clone of trainer's repository"}
}


def available(kind: Kind) -> dict[str, Plugin]:
    """Return all plugins of one kind by name, built-ins first; none is imported."""
    plugins = dict(_built_in(kind))
    for point in _entry_points(tuple(sys.path)).select(group=GROUPS[kind]):
        plugins.setdefault(point.name, Plugin(point.name, point.value, provider=point.dist.name if point.dist else ""))
    return plugins


@cache
def _entry_points(path: tuple[str, ...]) -> EntryPoints:
    """Return the entry points of a search path, which takes a tenth of a second."""
    from importlib.metadata import entry_points

    return cast("EntryPoints", entry_points())  # before Python 3.12 of another type, which selects in the same way


def _built_in(kind: Kind) -> dict[str, Plugin]:
    return {plugin.name: plugin for plugin in BUILT_IN[kind]}


def module_exists(name: str) -> bool:
    """Return whether a module can be found; imports its parents. Raises UsageError."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
    except (Exception, SystemExit) as error:  # an import of external code may raise anything
        problem = f"{type(error).__name__}: {error}"
        raise UsageError(f"model: got {name!r}, but {name.rpartition('.')[0]!r} cannot be imported: {problem}") from error


def model_base(text: str) -> str:
    """Return NAME of a model ``NAME[:SIZE][?key=value&key=value]``.

    It may be a module's path, or a reference (`is_reference`).
    """
    before = text.partition("?")[0]
    return before if is_reference(before) else before.partition(":")[0]


def is_reference(base: str) -> bool:
    """Return whether a model, without arguments, names a class or function.

    ``FILE.py:NAME``, ``module:NAME``, ``torchvision:NAME`` and ``hf:CONFIG.json`` do. After an installed model's name, or a module with
    forward functions, the colon precedes a size. Imports nothing.
    """
    place, colon, _ = base.rpartition(":")
    if not colon or place.endswith(".py") or base.startswith("hf:"):
        return bool(colon)
    if place in available("model") or not all(part.isidentifier() for part in place.split(".")):
        return False
    return not _has_forward_functions(place)


def _has_forward_functions(module: str) -> bool:
    """Return whether a module's package has files named like backends.

    True also for a top-level module that cannot be found: its name is then reported as unknown.
    """
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return not rest
    folders = spec.submodule_search_locations or []
    return any(os.path.isfile(Path(folder, *rest, f"{backend}.py")) for folder in folders for backend in available("backend"))


def find(kind: Kind, name: str) -> Plugin:
    """Return the named plugin, or a model's module.

    Raises UsageError with the nearest name, MissingPackageError for a `SEPARATE` one.
    """
    if kind == "dataset":
        name = name.partition(":")[0]
    elif kind == "model":
        name = model_base(name)
    known = _built_in(kind)
    if name not in known:
        known = available(kind)
    if name in known:
        return known[name]
    if kind == "model" and is_reference(name):
        return Plugin(name, "crosstrain.models.imported.importing:IMPORTER")
    if kind == "model" and "." in name and not name.endswith(".py") and all(name.split(".")):
        return Plugin(name, f"{name}:build")
    if kind == "model" and name.endswith(".py"):
        raise UsageError(f"model: got {name!r}; write {name}:NAME, with the name of a class or function in it.")
    key = "data" if kind == "dataset" else kind
    if install := SEPARATE.get(kind, {}).get(name):
        raise MissingPackageError(f"{key}: {name!r} has a package of its own, which is not installed. Install it with: {install}")
    allowed = ["auto", *known] if kind == "launcher" else [*known]
    raise UsageError.of(key, name, ", ".join(allowed), allowed)


def load(plugin: Plugin, kind: Kind) -> Any:
    """Import and return a plugin's object. Raises MissingPackageError, or UsageError if broken."""
    if not plugin.installed:
        raise MissingPackageError(
            f"{kind} {plugin.name!r} needs the package {plugin.requires!r}, which is not installed. Install it with: {plugin.install}"
        )
    module_name, _, attribute = plugin.target.partition(":")
    if kind == "model" and plugin.name == module_name and not module_exists(module_name):
        raise UsageError(f"model: got {module_name!r}, {NO_MODULE}")
    package = module_name.partition(".")[0]
    if plugin not in BUILT_IN[kind] and package != __name__.partition(".")[0]:
        _third_party[package] = plugin, kind
    try:
        module: ModuleType = importlib.import_module(module_name)
        loaded = getattr(module, attribute) if attribute else module
    except (Exception, SystemExit) as error:  # a plugin may raise anything while it is imported
        problem = f"{kind} {plugin.name!r} could not be loaded from {plugin.target!r}: {type(error).__name__}: {error}"
        remedy = f" It comes with the package {plugin.provider!r}, whose documentation says what else it needs." if plugin.provider else ""
        raise UsageError(f"{problem}{'.' if remedy else ''}{remedy}") from error
    if kind == "model" and not callable(loaded):
        raise UsageError(f"model: {plugin.name!r} ({plugin.target}) is {type(loaded).__name__}, not a function that builds a model.")
    return loaded


@contextmanager
def plugin_code(plugin: Plugin, kind: Kind, part: str) -> Iterator[None]:
    """Report an exception of a plugin's `part`, also ``sys.exit``, with the plugin's name.

    Raises UsageError.
    """
    try:
        yield
    except TrainerError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(_error_message(plugin, kind, error, part)) from error


def _error_message(plugin: Plugin, kind: Kind, error: BaseException, part: str) -> str:
    return f"{kind}: {plugin.described} has raised {raised(error)} in {part}; that is for its authors to mend"


_third_party: dict[str, tuple[Plugin, Kind]] = {}  # loaded plugins of other packages, by their top-level module


def plugin_problem(error: BaseException) -> str | None:
    """Return the message about an exception that passed through a third-party plugin, or None."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        behind = _third_party.get(frame.f_globals.get("__name__", "").partition(".")[0])
        if behind is not None:
            return _error_message(*behind, error, f"`{frame.f_code.co_name}`")
    return None


def forward_plugin(model: str, backend: str) -> Plugin:
    """Return a model's forward function on a backend, ``<path>.<backend>``. Raises UsageError."""
    model = IMPORTED if is_reference(model_base(model)) else model_base(model)
    key = f"{model}/{backend}"
    known = _built_in("forward")
    if key not in known:
        known = available("forward")
    if key in known:
        return known[key]
    if "." in model and module_exists(f"{model}.{backend}"):
        return Plugin(key, f"{model}.{backend}")
    on = forward_backends(model)
    choose = f" Choose --backend {on[0]}." if on else ""
    raise UsageError(f"model: {model!r} has no forward function on backend {backend!r}; it has one on: {', '.join(on) or 'none'}.{choose}")


def forward_backends(model: str) -> list[str]:
    """Return the backends with a model's forward function. Raises UsageError for a bad path."""
    model = IMPORTED if is_reference(model_base(model)) else model_base(model)
    known = available("forward")
    is_module = "." in model and model not in available("model")
    if is_module and not module_exists(model):
        raise UsageError(f"model: got {model!r}, {NO_MODULE}")
    return [name for name in available("backend") if f"{model}/{name}" in known or (is_module and module_exists(f"{model}.{name}"))]
