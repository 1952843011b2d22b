"""Plants the fault that TRAINER_PLANTED_FAULT names, as modules are imported."""

import importlib.machinery
import os
import sys
from pathlib import Path

if os.environ.get("TRAINER_PLANTED_FAULT"):
    sys.path.append(str(Path(__file__).parent))
    import patches

    _original = importlib.machinery.SourceFileLoader.exec_module

    def _exec_module(self, module):
        _original(self, module)
        patches.plant(os.environ["TRAINER_PLANTED_FAULT"], module)

    importlib.machinery.SourceFileLoader.exec_module = _exec_module
