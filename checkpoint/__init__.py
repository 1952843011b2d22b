"""How is the state of a run kept on disk, so that any backend can go on from it and damage is noticed?

A checkpoint is a folder of plain files: arrays by canonical name as safetensors, everything else as JSON, and a manifest with the digest
of each file (docs/checkpoints.md). Nothing here knows a framework.
"""

from .array_index import ArrayEntry
from .folder import CHECKPOINTS, best_checkpoints, find_checkpoint, is_checkpoint, list_checkpoints, newest_sound, prune, read_lock
from .meta import Meta, data_info, described_data, described_model, peek_meta
from .reader import Checkpoint, DamagedCheckpointError, read_checkpoint
from .writer import CheckpointWriter

__all__ = [
    "CHECKPOINTS",
    "ArrayEntry",
    "Checkpoint",
    "CheckpointWriter",
    "DamagedCheckpointError",
    "Meta",
    "best_checkpoints",
    "data_info",
    "described_data",
    "described_model",
    "find_checkpoint",
    "is_checkpoint",
    "list_checkpoints",
    "newest_sound",
    "peek_meta",
    "prune",
    "read_checkpoint",
    "read_lock",
]
