"""Which variables with our prefix are no settings of a job?"""

from __future__ import annotations

from collections.abc import Mapping

from .personal_options import PERSONAL_OPTIONS

__all__ = ["RESERVED_VARIABLES", "TOLD_VARIABLES"]

TOLD_VARIABLES: Mapping[str, str] = {
    "TRAINER_RUN_EVENT": "failed",
    "TRAINER_RUN_TEXT": "all of it in a sentence",
    "TRAINER_RUN_NAME": "the run's name",
    "TRAINER_RUN_PATH": "its directory",
    "TRAINER_RUN_HOST": "the host of its driver",
    "TRAINER_RUN_CAUSE": "what ended it, in a line",
    "TRAINER_RUN_TASK": "the task that failed first",
    "TRAINER_RUN_STEPS": "updates that were done",
    "TRAINER_RUN_SECONDS": "what it has taken",
    "TRAINER_RUN_EXIT_CODE": "its exit code",
    "TRAINER_RUN_RESTARTS": "number of restarts so far",
}
"""Variables of a command that is told how a run has ended; what is not known is empty."""

RESERVED_VARIABLES: Mapping[str, str] = {
    "TRAINER_DATA_CACHE": "folder of the prepared datasets",
    "TRAINER_PEER_MEMORY": "off: checkpoints are sent by the tasks, not read from their memory",
    "TRAINER_SECRET": "shared secret of nodes that are started by hand",
    "TRAINER_SECRET_FILE": "file with that secret",
    "TRAINER_RENDEZVOUS": "HOST:PORT where nodes that are started by hand meet",
    "TRAINER_NODE_RANK": "number of a node that is started by hand",
    "TRAINER_PROFILE_DIR": "folder for traces, for every task",
    **{option.variable: option.help for option in PERSONAL_OPTIONS.values()},
    **{name: f"for the command of --on-failure: {what}" for name, what in TOLD_VARIABLES.items()},
}
"""Variables with our prefix that are no field of the job."""
