"""``trainer manifest``: cluster manifests that start a run and restart it after failures."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from ...core.console import note
from ...core.errors import UsageError
from ...core.job import Job, without_password
from ...core.settings.job_fields import flag_name
from ...core.settings.personal import resolve_personal
from ...core.settings.sources import Resolved
from ...core.topics import Topic
from ...launch.kubernetes_manifest import CONFIG_FILE, KINDS, NOTIFY_KEY, RUNS_FOLDER, KubernetesRun, Resources, manifest_text
from ..group import GroupedCommand, topic_option
from ..options import IntegerRange
from .batched_run import CHECKPOINTS, check_settings

DECIDED = ("--out", "--bandwidth", "--cores-per-node", "--network", "--python", "--quiet")  # meaningless in pods, or set here
RESTARTS = 3  # default for runs that can resume
START_TIMEOUT = "600"  # seconds that pods wait for each other: Kubernetes takes up to six minutes to restart one, and pulls images
MAX_CONFIG_BYTES = 1_000_000  # Kubernetes' limit of a ConfigMap is a MiB


@click.group("manifest", short_help="Generate Kubernetes manifests.")
def manifest() -> None:
    """Generate manifests for a cluster that starts a run and restarts it after failures."""


@manifest.command(
    "kubernetes",
    cls=GroupedCommand,
    short_help="Print the manifest of a run on Kubernetes.",
    context_settings={"ignore_unknown_options": True},
    epilog="What follows the options is for `trainer run`: trainer manifest kubernetes quickstart --nodes 3 --image IMAGE --batch-size 64",
)
@click.argument("config", metavar="CONFIG")
@click.argument("more", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF RUN]")
@topic_option(Topic.COMMON, "--nodes", type=IntegerRange(1), required=True, help="Number of nodes: one pod each.")
@topic_option(
    Topic.COMMON, "--image", required=True, help="The image with crosstrain and the framework, such as docs/docker/Dockerfile makes."
)
@topic_option(
    Topic.CLUSTER,
    "--kind",
    type=click.Choice(KINDS),
    default="job",
    show_default=True,
    help="Started by Kubernetes, Kubeflow Trainer or JobSet.",
)
@topic_option(Topic.COMMON, "--name", help="Name of the run and of all objects. [default: CONFIG's]")
@topic_option(Topic.CLUSTER, "--namespace", help="Namespace of the objects. [default: kubectl's]")
@topic_option(
    Topic.CHECKPOINTS,
    "--volume-claim",
    "claim",
    metavar="NAME",
    help="The volume claim for the run directory; all pods mount it (ReadWriteMany).",
)
@topic_option(
    Topic.CLUSTER,
    "--secret",
    metavar="NAME",
    help="The Secret shared by the pods; the command that creates it is printed. [default: the name]",
)
@topic_option(Topic.CLUSTER, "--port", type=IntegerRange(1024, 65_535), default=29400, show_default=True, help="Rendezvous port on pod 0.")
@topic_option(Topic.CLUSTER, "--cpus", help="CPUs of each pod, such as 2 or 500m.")
@topic_option(Topic.CLUSTER, "--memory", help="Memory of each pod, such as 4Gi.")
@topic_option(Topic.CLUSTER, "--gpus", type=IntegerRange(0, 1024), default=0, help="GPUs of each pod.")
@topic_option(
    Topic.CHECKPOINTS,
    "--restarts",
    type=IntegerRange(0, 1000),
    help=f"Maximum failures of all pods before the run fails. [default: {RESTARTS} with --volume-claim, else 0]",
)
@topic_option(
    Topic.CHECKPOINTS,
    "--grace",
    "grace_seconds",
    type=IntegerRange(30, 86_400),
    default=120,
    show_default=True,
    help="Seconds from a pod's notice to its end: 20, and those in which a checkpoint is written (5 GB at 50 MB/s).",
)
def manifest_kubernetes(
    config: str, more: tuple[str, ...], nodes: int, name: str | None, cpus: str | None, memory: str | None, gpus: int, **options: Any
) -> None:
    """Print a Kubernetes manifest that trains CONFIG on pods as nodes.

    CONFIG is a file, or the name of a shipped one. With a volume claim the run resumes from its newest checkpoint after the loss of a pod:
    the other pods exit with 75, and the Job restarts all of them. Nothing is sent to a cluster: trainer manifest kubernetes … | kubectl
    apply -f -
    """
    chosen = name if name is not None else re.sub(r"[^a-z0-9-]+", "-", Path(config).stem.lower()).strip("-")
    resolved = check_settings("`trainer manifest kubernetes`", config, more, nodes, chosen, {}, DECIDED)
    _refuse_password(resolved)
    claim, restarts = options["claim"], options.pop("restarts")
    _check_gpus(resolved, gpus)
    run = KubernetesRun(
        chosen,
        nodes,
        command=tuple(_command(config, more, resolved, nodes, chosen, claim, gpus)),
        config=_config_text(config),
        resources=Resources(cpus, memory, gpus),
        restarts=restarts if restarts is not None else RESTARTS if claim is not None else 0,
        processes=max(resolved.job.workers_by_node),
        **options,
    )
    click.echo(manifest_text(run), nl=False)
    if not sys.stdout.isatty():
        note(f"the pods wait for their Secret; once, before the manifest is applied: {run.secret_command}")
    _note_notifications(run)
    for field in Job.model_fields:
        if (variable := f"TRAINER_{field.upper()}") in os.environ:
            note(f"{variable} is set here, and is not in the pods; give {flag_name(field)} where the run is to have it")
    if claim is None:
        note("without --volume-claim the run directory ends with pod 0, and a run that loses a pod cannot go on")
    if nodes > 1 and run.resources.cpus is None:
        note("without --cpus a pod takes all cores of its machine for its own, also those that other pods compute on")


def _check_gpus(resolved: Resolved, gpus: int) -> None:
    job, processes = resolved.job, max(resolved.job.workers_by_node)
    if job.device == "gpu" and gpus == 0:
        raise UsageError(f"--device: got 'gpu', but the pods are given none; give --gpus {processes}")
    if gpus == 0:
        return
    if job.device == "cpu":
        note(f"--gpus {gpus}: the run computes on CPUs (--device cpu), so each pod has GPUs that nothing uses")
    elif processes > gpus:
        raise UsageError(
            f"--procs-per-node: got {processes}, but a pod has {gpus} GPU{'s' if gpus > 1 else ''} (--gpus), and each process takes one; "
            f"give --gpus {processes}, or fewer processes"
        )
    elif processes < gpus:
        counted = f"{processes} process{'es' if processes > 1 else ''}"
        note(f"--gpus {gpus}: a pod has {counted}, one GPU each; --procs-per-node {gpus} uses them all")


def _note_notifications(run: KubernetesRun) -> None:
    personal = resolve_personal(("notify", "on_failure"), {}, os.environ)
    if "notify" in personal:
        note(
            f"{personal['notify'].key} is set here, and is not in the pods, which take it from the key {NOTIFY_KEY} of the Secret "
            f"{run.secret or run.name} where that has one (docs/clusters.md, Notifications)"
        )
    if "on_failure" in personal:
        note(
            f"{personal['on_failure'].key} is set here, and no pod runs it; "
            f"{NOTIFY_KEY} in the Secret {run.secret or run.name} has them post"
        )


def _command(config: str, more: tuple[str, ...], resolved: Resolved, nodes: int, name: str, claim: str | None, gpus: int) -> list[str]:
    file = CONFIG_FILE if Path(config).exists() else config
    command = ["trainer", "run", "--config", file, *more, "--nodes", str(nodes), "--name", name, "--out", RUNS_FOLDER]
    if resolved.sources["start_timeout"].startswith("default"):
        command += ["--start-timeout", START_TIMEOUT]
    if gpus > 0 and resolved.sources["device"].startswith("default"):
        command += ["--device", "gpu"]  # a pod without GPUs fails rather than compute on CPUs
    if claim is not None:
        command += [] if resolved.job.checkpoint_every is not None else ["--checkpoint-every", CHECKPOINTS]
        command += ["--resume", "auto"]
    return command


def _config_text(config: str) -> str | None:
    path = Path(config)
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8")  # it has been read as settings before
    if len(text.encode()) > MAX_CONFIG_BYTES:
        raise UsageError(f"{shlex.quote(config)} has {len(text.encode()):,} bytes; a ConfigMap holds up to {MAX_CONFIG_BYTES:,}")
    return text


def _refuse_password(resolved: Resolved) -> None:
    uri = resolved.job.mlflow
    if uri is not None and without_password(uri) != uri:
        raise UsageError("mlflow: has a password, which would stand in the manifest; give MLflow's own variables to the pods by a Secret")
