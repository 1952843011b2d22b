"""Which variables with our prefix are no settings of a job?"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["RESERVED_VARIABLES"]

RESERVED_VARIABLES: Mapping[str, str] = {
    "TRAINER_DATA_CACHE": "folder of the prepared datasets",
    "TRAINER_PEER_MEMORY": "off: checkpoints are sent by the tasks, not read from their memory",
    "TRAINER_SECRET": "shared secret of nodes that are started by hand",
    "TRAINER_SECRET_FILE": "file with that secret",
    "TRAINER_RENDEZVOUS": "HOST:PORT where nodes that are started by hand meet",
    "TRAINER_NODE_RANK": "number of a node that is started by hand",
    "TRAINER_PROFILE_DIR": "folder for traces, which every task is told",
}
"""Variables with our prefix that are no field of the job."""
