"""The environment that a task is started in: without what would mislead its framework, and with the GPU that it is to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...engine.protocol.messages import Message

__all__ = ["NO_GPU", "expected_gpus", "task_environment"]

FOREIGN_VARIABLES = frozenset(
    {
        *("TF_CONFIG", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TRAINER_SECRET", "TRAINER_NOTIFY", "TRAINER_ON_FAILURE"),
    }
)
"""What tasks must not see: where another launcher placed this process, and secrets that only agents and driver need."""

NO_GPU = "-1"
"""For CUDA_VISIBLE_DEVICES of a task that is to see no GPU, as frameworks that look for one are told elsewhere too."""


def task_environment(own: Mapping[str, str], scratch: Path | None, visible_as: str | None) -> dict[str, str]:
    """Return the agent's `own` environment without the contracts of others, which would tell the frameworks of another cluster.

    Temporary files go to a folder of the run's own, `scratch`: both frameworks leave some behind. None: not known yet. `visible_as` is the
    GPU that the task may see, as CUDA names it; None where nothing is done about that. Indices count as nvidia-ml counts, in PCI order,
    unless whoever started the node has chosen another order for those that he gave.
    """
    kept = {key: value for key, value in own.items() if key not in FOREIGN_VARIABLES}
    changed = {} if scratch is None else {"TMPDIR": str(scratch)}
    if visible_as is not None:
        changed |= {"CUDA_VISIBLE_DEVICES": visible_as, "CUDA_DEVICE_ORDER": own.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}
    return {**kept, **changed}


def expected_gpus(prepare: Message, visible: Sequence[Mapping[str, Any]] | None) -> list[str | None]:
    """Guess which GPUs the workers of a node will see, from the driver's first message, so that they can start before it has decided.

    A wrong guess costs time alone: such a process is not taken for a task.
    """
    workers, before, on_machine = prepare["tasks"], prepare["workers_before"], prepare["workers_on_machine"]
    if not visible:
        return [None] * workers
    if prepare["job"]["device"] == "cpu" or len(visible) < on_machine:
        return [NO_GPU] * workers
    return [str(gpu["visible_as"]) for gpu in visible[before : before + workers]]
