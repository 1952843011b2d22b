"""Which backends, models, datasets, forward functions and launchers exist, and where they live.

Built-ins are rows of a table, others come from entry points; a module is imported only when its plugin is used, so that no
framework is loaded by listing names. A broken plugin is reported by name and never hides the others.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, cast

from .errors import MissingPackageError, UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

__all__ = [
    "BUILT_IN",
    "DOWNLOADER",
    "GROUPS",
    "NO_MODULE",
    "Kind",
    "Plugin",
    "available",
    "find",
    "forward_backends",
    "forward_plugin",
    "load",
    "missing_packages",
    "model_base",
    "module_exists",
]

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
    """A name, the object it stands for (``module`` or ``module:attribute``), and how to install what it needs.

    `requires` is the top-level module that has to be importable, and `distributions` are those that it may come in; empty where nothing is
    needed beyond crosstrain itself. `requires_also` are modules that this one needs in turn. `provider` is the distribution whose entry
    point it is, where it is none of ours.
    """

    name: str
    target: str
    requires: str = ""
    install: str = ""
    distributions: tuple[str, ...] = ()
    provider: str = ""
    requires_also: tuple[str, ...] = ()

    @property
    def installed(self) -> bool:
        """Whether the packages that the plugin needs can be found (they are not imported)."""
        return not self.requires or not missing_packages([self.requires, *self.requires_also])


def missing_packages(names: Iterable[str]) -> list[str]:
    """Return those top-level modules that cannot be found; none is imported."""
    return [name for name in names if importlib.util.find_spec(name) is None]


NO_MODULE = "but there is no such module; it has to be installed or to lie on PYTHONPATH."
"""What is said of a model's module path that leads nowhere, after the path."""

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
    target="crosstrain.data.sources.torchvision_download",
    requires="torchvision",
    install="pip install 'crosstrain[torch]'",
    distributions=("torchvision",),
    requires_also=("torch",),
)
"""What downloads original files of datasets: a module that is run in a process of its own."""

_MODELS = ("logreg", "cnn", "alexnet", "resnet18", "transformer")
"""Each is a folder with a forward function for each of our backends."""

BUILT_IN: Mapping[Kind, tuple[Plugin, ...]] = {
    "backend": _BACKENDS,
    "model": tuple(Plugin(name, f"crosstrain.models.{name}:build") for name in _MODELS),
    "dataset": (
        Plugin("digits", "crosstrain.data.sources.digits:DATASET"),
        Plugin("glyphs", "crosstrain.data.sources.glyphs.source:GLYPHS"),
        Plugin("glyphs28", "crosstrain.data.sources.glyphs.source:GLYPHS28"),
        Plugin("synthetic-images", "crosstrain.data.sources.synthetic:DATASET"),
        Plugin("mnist", "crosstrain.data.sources.mnist:DATASET"),
        Plugin("cifar10", "crosstrain.data.sources.cifar10:DATASET"),
        Plugin("svhn", "crosstrain.data.sources.svhn:DATASET"),
        Plugin("image-folder", "crosstrain.data.sources.image_folder:DATASET"),
        Plugin("numbers", "crosstrain.data.sources.translation.numbers_in_words:DATASET"),
        Plugin("debian-text", "crosstrain.data.sources.debian.source:DATASET"),
        Plugin("parallel-text", "crosstrain.data.sources.translation.parallel_text:DATASET"),
    ),
    "forward": tuple(Plugin(f"{name}/{on.name}", f"crosstrain.models.{name}.{on.name}") for name in _MODELS for on in _BACKENDS),
    "launcher": (
        *(Plugin(name, f"crosstrain.launch.launchers.{name}:LAUNCHER") for name in ("rendezvous", "local", "ssh", "slurm")),
        Plugin("ray", "crosstrain.launch.launchers.ray:LAUNCHER", requires="ray", install="pip install 'crosstrain[ray]'"),
    ),
}


def available(kind: Kind) -> dict[str, Plugin]:
    """Return every known plugin of one kind by name: built-ins first, then entry points; no plugin is imported."""
    found = dict(_built_in(kind))
    for point in _entry_points(tuple(sys.path)).select(group=GROUPS[kind]):
        found.setdefault(point.name, Plugin(point.name, point.value, provider=point.dist.name if point.dist else ""))
    return found


@cache
def _entry_points(path: tuple[str, ...]) -> EntryPoints:
    """Return those of all packages on a search path; finding them reads a file of each package, which takes a tenth of a second."""
    from importlib.metadata import entry_points

    return cast("EntryPoints", entry_points())  # before Python 3.12 of another type, which selects in the same way


def _built_in(kind: Kind) -> dict[str, Plugin]:
    """Return our own plugins by name. They win over entry points, and finding one spares the reading of every package's metadata."""
    return {plugin.name: plugin for plugin in BUILT_IN[kind]}


def module_exists(name: str) -> bool:
    """Whether a module can be found by its dotted path; its parents are imported, the module itself is not.

    Raises UsageError where a parent is there but cannot be imported.
    """
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
    except Exception as error:  # somebody else's module may raise anything while it is imported
        problem = f"{type(error).__name__}: {error}"
        raise UsageError(f"model: got {name!r}, but {name.rpartition('.')[0]!r} cannot be imported: {problem}") from error


def model_base(text: str) -> str:
    """Return a model's name, or the path of its module, without the arguments behind it: NAME of ``NAME[:SIZE][?key=value&key=value]``."""
    return re.split("[:?]", text, maxsplit=1)[0]


def find(kind: Kind, name: str) -> Plugin:
    """Return the plugin called `name`; for a model also a dotted module path, whose ``build`` is the model.

    Arguments that follow the name are not looked at: those of a dataset its source reads, those of a model `models.arguments`.

    Raises UsageError, naming what exists and the nearest name, where there is none.
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
    if kind == "model" and _is_module_path(name):
        return Plugin(name, f"{name}:build")
    allowed = ["auto", *known] if kind == "launcher" else [*known]
    raise UsageError.of(kind if kind != "dataset" else "data", name, ", ".join(allowed), allowed)


def _is_module_path(name: str) -> bool:
    """Return whether a name has the form of an absolute dotted path to a module within a package."""
    return "." in name and all(name.split("."))


def load(plugin: Plugin, kind: Kind) -> Any:
    """Import what the plugin stands for.

    Raises MissingPackageError with the command to install it, or UsageError where the plugin itself is broken.
    """
    if not plugin.installed:
        raise MissingPackageError(
            f"{kind} {plugin.name!r} needs the package {plugin.requires!r}, which is not installed. Install it with: {plugin.install}"
        )
    module_name, _, attribute = plugin.target.partition(":")
    if kind == "model" and plugin.name == module_name and not module_exists(module_name):
        raise UsageError(f"model: got {module_name!r}, {NO_MODULE}")
    try:
        module: ModuleType = importlib.import_module(module_name)
        return getattr(module, attribute) if attribute else module
    except Exception as error:  # a plugin may raise anything while it is imported
        problem = f"{kind} {plugin.name!r} could not be loaded from {plugin.target!r}: {type(error).__name__}: {error}"
        told = f" It comes with the package {plugin.provider!r}, whose documentation says what else it needs." if plugin.provider else ""
        raise UsageError(f"{problem}{'.' if told else ''}{told}") from error


def forward_plugin(model: str, backend: str) -> Plugin:
    """Return the row of the (model, backend) table that names the module with the model's forward function, whatever its arguments.

    A model given as a module path supplies ``<path>.<backend>``. Raises UsageError where the model has no forward on the backend, or
    where there is no such module.
    """
    model = model_base(model)
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
    """Return the backends, installed or not, on which a model has a forward function.

    Raises UsageError where the model is named by a module path and there is no such module, or its package cannot be imported.
    """
    model = model_base(model)
    known = available("forward")
    own = "." in model and model not in available("model")
    if own and not module_exists(model):
        raise UsageError(f"model: got {model!r}, {NO_MODULE}")
    return [name for name in available("backend") if f"{model}/{name}" in known or (own and module_exists(f"{model}.{name}"))]
