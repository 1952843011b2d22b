"""Is this process the command of a Ray job (``ray job submit``)?"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["in_ray_job"]

JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""What Ray's supervisor of a job gives the command, and the processes that it starts here; those on nodes have it not."""


def in_ray_job(environment: Mapping[str, str]) -> bool:
    """Return whether a Ray job's command, or a process that it has started, has this environment."""
    return bool(environment.get(JOB_VARIABLE))
