"""The formats that torch exports to. Imports no torch: the command line asks for their names."""

from __future__ import annotations

from collections.abc import Mapping

from ..export import ExportFormat

__all__ = ["EXPORT_FORMATS"]

EXPORT_FORMATS: Mapping[str, ExportFormat] = {
    "torch": ExportFormat(
        "a state_dict and a program of torch.export that plain torch runs with any batch size",
        "import torch\n\n"
        'program = torch.export.load("program.pt2").module()\n'
        "logits = program(torch.zeros(IMAGES))  # normalised images, float32\n\n"
        'weights = torch.load("state_dict.pt", weights_only=True)  # by canonical name: torchvision\'s for its models\n'
        "# your_module.load_state_dict(weights)  # a module with these names",
    )
}
