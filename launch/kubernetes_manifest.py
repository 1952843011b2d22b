"""The Kubernetes manifest of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from ..core.errors import UsageError

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})  # words that are not text in YAML 1.1


class _Dumper(yaml.SafeDumper):  # type: ignore[misc] # without types
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow)

    def ignore_aliases(self, data: object) -> bool:
        return True

    def text(self, text: str) -> yaml.ScalarNode:
        """Return several lines as a block, and ambiguous text in quotes."""
        if broken := re.search("[\ud800-\udfff]", text):
            raise UsageError(f"a manifest is text, and cannot hold {broken[0]!r}, which is no character")
        style = None if _PLAIN.fullmatch(text) and text.lower() not in _WORDS else '"'
        if text.endswith("\n") and all(map(str.isprintable, text.split("\n"))):
            style = "|"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.text)


def yaml_document(value: Mapping[str, Any]) -> str:
    """Return an object as YAML. Raises UsageError for text that is not Unicode."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
    return text


KINDS = ("job", "trainjob", "jobset")  # what starts the pods: Kubernetes itself, Kubeflow Trainer 2, JobSet
RUNS_FOLDER = "/runs"  # the mount point of the volume claim, with the run directory
CONFIG_FILE = "/etc/trainer/config.toml"  # the path of the user's configuration in the pods
SECRET_KEY = "TRAINER_SECRET"
NOTIFY_KEY = "TRAINER_NOTIFY"  # optional in the same Secret, as the address gives access
CONTAINER = "node"
REPLICATED_JOB = "node"
RUN_LABEL = "app.kubernetes.io/instance"
GROUP = 1000  # the group of files in the volume: that of docs/docker/Dockerfile's user
SHARED_MEMORY = "1Gi"  # for a pod with several processes, as NCCL copies through /dev/shm; the default is 64 MiB
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")  # a Service's name (RFC 1035); pods' host names are 12 longer, at most 63
_OBJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_CPUS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3}|m)?")
_MEMORY = re.compile(r"[0-9]{1,15}(\.[0-9]{1,3})?(Ki|Mi|Gi|Ti|k|M|G|T)?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,500}")
_HEAD = """\
# The run {name} on {nodes} nodes, by `trainer manifest kubernetes`. Before it is applied, once:
#
#   {command}
#
"""


@dataclass(frozen=True)
class Resources:
    """Requests and limits of each pod, in Kubernetes' notation (``500m``, ``4Gi``); NVIDIA GPUs."""

    cpus: str | None = None
    memory: str | None = None
    gpus: int = 0

    def __post_init__(self) -> None:
        if self.cpus is not None and not _CPUS.fullmatch(self.cpus):
            raise UsageError.of("--cpus", self.cpus, "a number of CPUs, such as 2, 0.5 or 500m")
        if self.memory is not None and not _MEMORY.fullmatch(self.memory):
            raise UsageError.of("--memory", self.memory, "bytes, such as 4Gi or 500M")

    def spec(self) -> dict[str, Any]:
        """Return the resources of a container; empty if none are requested."""
        amounts = {"cpu": self.cpus, "memory": self.memory, "nvidia.com/gpu": str(self.gpus) if self.gpus else None}
        requested = {key: value for key, value in amounts.items() if value is not None}
        return {"requests": requested, "limits": requested} if requested else {}


@dataclass(frozen=True)
class KubernetesRun:
    """A run on Kubernetes.

    `command` is ``trainer run`` with its settings, `config` the text of `CONFIG_FILE`, if any. `claim` is the volume of the run directory,
    required for restarts, as a pod loses its disk. All nodes may fail `restarts` times. A checkpoint must be written within
    `grace_seconds`. `processes` is the largest number on a node.
    """

    name: str
    nodes: int
    image: str
    command: tuple[str, ...]
    kind: Literal["job", "trainjob", "jobset"] = "job"
    namespace: str | None = None
    config: str | None = None
    claim: str | None = None
    secret: str | None = None
    port: int = 29400
    resources: Resources = Resources()
    restarts: int = 0
    grace_seconds: int = 120
    processes: int = 1

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError.of("--name", self.name, "at most 40 of a-z, 0-9 and -, from a letter on, as it is the name of a host too")
        for option, name, form in (
            ("--namespace", self.namespace, _NAMESPACE),
            ("--volume-claim", self.claim, _OBJECT_NAME),
            ("--secret", self.secret, _OBJECT_NAME),
        ):
            if name is not None and not form.fullmatch(name):
                raise UsageError.of(option, name, "a name as Kubernetes has them, of a-z, 0-9 and -")
        if not _IMAGE.fullmatch(self.image):
            raise UsageError.of("--image", self.image, "an image, such as registry.example/trainer:1")
        if self.restarts and self.claim is None:
            raise UsageError(
                f"--restarts: got {self.restarts}, but a pod loses its disk with its end, and with it every checkpoint; "
                "give --volume-claim, a claim that all pods can mount (ReadWriteMany), or leave --restarts out"
            )

    @property
    def first_host(self) -> str:
        """The host name of pod 0, to which the others connect."""
        return f"{self.name}-0.{self.name}" if self.kind == "job" else f"{self.name}-{REPLICATED_JOB}-0-0.{self.name}"

    @property
    def secret_command(self) -> str:
        """The command that creates the Secret, which is not in the manifest."""
        namespace = "" if self.namespace is None else f" --namespace {self.namespace}"
        create = f"kubectl create secret generic {self.secret or self.name}{namespace}"
        return f"openssl rand -hex 16 | {create} --from-file={SECRET_KEY}=/dev/stdin"

    @property
    def labels(self) -> dict[str, str]:
        """The labels of this run's pods."""
        return {"app.kubernetes.io/name": "trainer", RUN_LABEL: self.name}


def manifest_text(run: KubernetesRun) -> str:
    """Return the manifest as YAML, headed by the command that creates the secret."""
    head = _HEAD.format(name=run.name, nodes=run.nodes, command=run.secret_command)
    return head + "---\n".join(map(yaml_document, documents(run)))


def documents(run: KubernetesRun) -> list[dict[str, Any]]:
    """Return the objects in the order of their creation."""
    pods = {"matchLabels": run.labels}
    among_themselves = [{"from": [{"podSelector": pods}]}]
    fence = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": among_themselves}
    made = [_object(run, "networking.k8s.io/v1", "NetworkPolicy", spec=fence)]
    if run.config is not None:
        made.append(_object(run, "v1", "ConfigMap", data={CONFIG_FILE.rpartition("/")[2]: run.config}))
    if run.kind == "job":
        service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": run.labels}
        ports = [{"name": "rendezvous", "port": run.port, "protocol": "TCP"}]
        made.append(_object(run, "v1", "Service", spec={**service, "ports": ports}))
        made.append(_object(run, "batch/v1", "Job", spec=_job(run)))
    elif run.kind == "jobset":
        made.append(_object(run, "jobset.x-k8s.io/v1alpha2", "JobSet", spec=_job_set(run)))
    else:
        template = {"mlPolicy": {"numNodes": run.nodes}, "template": {"spec": _job_set(run)}}
        reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": run.name}
        made.append(_object(run, "trainer.kubeflow.org/v1alpha1", "TrainingRuntime", spec=template))
        made.append(
            _object(run, "trainer.kubeflow.org/v1alpha1", "TrainJob", spec={"runtimeRef": reference, "trainer": {"numNodes": run.nodes}})
        )
    return made


def _object(run: KubernetesRun, version: str, kind: str, **parts: Mapping[str, Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": run.name}
    if run.namespace is not None:
        metadata["namespace"] = run.namespace
    return {"apiVersion": version, "kind": kind, "metadata": {**metadata, "labels": run.labels}, **parts}


def _job_set(run: KubernetesRun) -> dict[str, Any]:
    ancestor = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"} if run.kind == "trainjob" else {}
    template = {"metadata": {"labels": {**run.labels, **ancestor}}, "spec": _job(run)}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": run.name},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": template}],
    }


def _job(run: KubernetesRun) -> dict[str, Any]:
    again = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [75]}},
    ]
    never = {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [2]}}
    return {
        "completionMode": "Indexed",
        "completions": run.nodes,
        "parallelism": run.nodes,
        "backoffLimit": run.restarts * run.nodes,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [never, *(again if run.restarts else [])]},
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "template": {"metadata": {"labels": run.labels}, "spec": _pod(run)},
    }


def _pod(run: KubernetesRun) -> dict[str, Any]:
    volumes, mounts = _volumes(run)
    secret = {"name": run.secret or run.name}
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": run.image,
        "command": [word.replace("$", "$$") for word in run.command],  # $(NAME) is a variable there, $$ is one $
        "env": [
            {"name": "TRAINER_RENDEZVOUS", "value": f"{run.first_host}:{run.port}"},
            {"name": SECRET_KEY, "valueFrom": {"secretKeyRef": {**secret, "key": SECRET_KEY}}},
            {"name": NOTIFY_KEY, "valueFrom": {"secretKeyRef": {**secret, "key": NOTIFY_KEY, "optional": True}}},
        ],
        "ports": [{"name": "rendezvous", "containerPort": run.port, "protocol": "TCP"}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if resources := run.resources.spec():
        container["resources"] = resources
    if mounts:
        container["volumeMounts"] = mounts
    pod: dict[str, Any] = {"restartPolicy": "Never", "terminationGracePeriodSeconds": run.grace_seconds}
    if run.kind == "job":
        pod["subdomain"] = run.name
    pod |= {"automountServiceAccountToken": False, "enableServiceLinks": False, "securityContext": {"fsGroup": GROUP}}
    return {**pod, "containers": [container], **({"volumes": volumes} if volumes else {})}


def _volumes(run: KubernetesRun) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    runs = {"emptyDir": {}} if run.claim is None else {"persistentVolumeClaim": {"claimName": run.claim}}
    volumes: list[Mapping[str, Any]] = [{"name": "runs", **runs}]
    mounts: list[Mapping[str, Any]] = [{"name": "runs", "mountPath": RUNS_FOLDER}]
    if run.config is not None:
        volumes.append({"name": "config", "configMap": {"name": run.name}})
        mounts.append({"name": "config", "mountPath": CONFIG_FILE.rpartition("/")[0], "readOnly": True})
    if run.processes > 1:
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}})
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    return volumes, mounts
