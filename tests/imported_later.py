"""Slow imports, made by the process that runs a test, not by each that collects it."""

import importlib


class ImportedLater:
    """Placeholder of a module: attributes are looked up when they are used."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith("_"):  # pytest looks for them in whatever it collects
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
