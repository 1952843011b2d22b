"""How state is stored, so that any backend can resume from it."""

from .folder import CHECKPOINTS, best_checkpoints, find_checkpoint, is_checkpoint, list_checkpoints, newest_sound, prune, read_lock
from .meta import Meta, data_info, described_data, described_model, peek_meta
from .reader import ArrayEntry, Checkpoint, DamagedCheckpointError, read_checkpoint
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
