"""Classes and functions of Python as models of a job."""

from __future__ import annotations

import dis
import hashlib
import importlib
import inspect
import os
import re
import sys
import sysconfig
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ..core.drafts import replacing
from ..core.errors import MissingPackageError, UsageError
from ..data.store.location import cache_root
from ..models.imported.importing import framework_of

MODELS = ".models"  # folder of the data cache
_FILE = "notebook.py"
_PICKLE = "notebook.pickle"
_CODE = f'''"""A class or function of a notebook, as cloudpickle wrote it; reading it executes it."""

from pathlib import Path

import cloudpickle
{{imports}}
{{name}} = cloudpickle.loads(Path(__file__).with_name("{_PICKLE}").read_bytes())
'''


def model_name(model: Any) -> str:
    """Return a model as a job names it.

    Classes and functions of files are named by their file, of packages by their module. Those of a notebook are pickled into a folder by
    their content, which runs from elsewhere load only with trust. Raises UsageError for other objects.
    """
    if isinstance(model, str):
        return model
    if not (inspect.isclass(model) or inspect.isfunction(model)):
        raise UsageError(
            f"model: got an object of {type(model).__name__}; give its class or a function that makes it, as each worker makes its own"
        )
    name = model.__qualname__
    if model.__module__ == "__main__" or not name.isidentifier():
        return _pickled(model, re.sub(r"\W", "_", model.__name__))
    module = sys.modules.get(model.__module__) or importlib.import_module(model.__module__)
    path = getattr(module, "__file__", None)
    return f"{model.__module__}:{name}" if path is None or "." in model.__module__ else f"{os.path.abspath(path)}:{name}"


def _local_modules() -> list[ModuleType]:
    """Return the modules of the working directory, which no other process finds."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folder, packages = os.getcwd() + os.sep, tuple(f"{path}{os.sep}" for path in (sys.prefix, Path(__file__).parents[1], *installed))
    known = [(module, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()) if name != "__main__"]
    return [
        module
        for module, path in known
        if isinstance(module, ModuleType)
        and isinstance(path, str)
        and path.startswith(folder)
        and not path.startswith(packages)
        and "-packages" not in path
    ]


def _packages(model: Any) -> set[str]:
    """Return the packages of a class's bases, or of a function's imports and globals."""
    if inspect.isclass(model):
        return {kind.__module__.partition(".")[0] for kind in model.__mro__}
    function, codes, names = model, [model.__code__], set[str]()
    while codes:
        code = codes.pop()
        names |= {step.argval.partition(".")[0] for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"}
        held = [function.__globals__.get(name) for name in code.co_names]
        owners = [getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in held if value is not None]
        names |= {str(owner).partition(".")[0] for owner in owners}
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return names


def _pickled(model: Any, name: str) -> str:
    try:
        import cloudpickle
    except ImportError as error:
        raise MissingPackageError("model: a class of a notebook needs cloudpickle; pip install cloudpickle") from error
    local = _local_modules()
    try:
        for module in local:
            cloudpickle.register_pickle_by_value(module)
        content = cloudpickle.dumps(model)
    except Exception as error:  # whatever an object's own code raises
        raise UsageError(f"model: {name} cannot be pickled: {error}") from error
    finally:
        for module in local:
            cloudpickle.unregister_pickle_by_value(module)
    imports = f"import {framework_of(_packages(model))}\n"  # by which the file's framework is known
    folder = Path(cache_root(), MODELS, f"{name}-{hashlib.sha256(content).hexdigest()[:16]}")
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in ((_PICKLE, content), (_FILE, _CODE.format(name=name, imports=imports).encode())):
        with replacing(folder / file) as draft:
            Path(draft).write_bytes(data)
    return f"{folder / _FILE}:{name}"
