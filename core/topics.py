"""Topics by which lists of settings are grouped."""

from __future__ import annotations

from enum import Enum


class Topic(Enum):
    """The topic of a setting, in the order of the help; the value is its heading."""

    COMMON = "Most used"
    DATA = "Data and model"
    OPTIMISER = "Optimiser and batch"
    EVALUATION = "Budget, evaluation and targets"
    CLUSTER = "Cluster and launch"
    CHECKPOINTS = "Checkpoints, resumption and restarts"
    SPEED = "Precision, speed and exchange"
    RECORDS = "Measurement and records"
    OUTPUT = "Notices and output"
