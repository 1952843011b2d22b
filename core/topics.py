"""The topics by which settings are grouped where all of them are listed."""

from __future__ import annotations

from enum import Enum

__all__ = ["Topic"]


class Topic(Enum):
    """What a setting is about, in the order in which topics are told; the value is its heading."""

    COMMON = "Most used"
    DATA = "Data and model"
    OPTIMISER = "Optimiser and batch"
    EVALUATION = "Budget, evaluation and targets"
    CLUSTER = "Cluster and launch"
    CHECKPOINTS = "Checkpoints, resumption and restarts"
    SPEED = "Precision, speed and exchange"
    RECORDS = "Measurement and records"
    OUTPUT = "Notices and output"
