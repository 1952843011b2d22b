"""The Kubernetes manifest of a run: valid objects, and arguments that arrive unchanged."""

import copy
import os
import re
import tomllib

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from imported_later import ImportedLater

from crosstrain.cli.commands.manifest import manifest
from crosstrain.core.errors import UsageError
from crosstrain.launch.kubernetes_manifest import KubernetesRun, documents, manifest_text, yaml_document

kubeflow = ImportedLater("kubeflow_trainer_api.models")
VERSION = "1.37"
MODELS = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob", "TrainingRuntime": "TrainerV1alpha1TrainingRuntime"}
ARGUMENTS = ["quickstart", "--nodes", "3", "--image", "registry.example/trainer:1"]
KINDS = {
    "job": ["NetworkPolicy", "Service", "Job"],
    "jobset": ["NetworkPolicy", "JobSet"],
    "trainjob": ["NetworkPolicy", "TrainingRuntime", "TrainJob"],
}
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=20)


def shown(*arguments):
    return CliRunner().invoke(manifest, ["kubernetes", *arguments], standalone_mode=False)


def printed(*arguments):
    done = shown(*ARGUMENTS, *arguments)
    assert done.exception is None, done.output
    return list(yaml.safe_load_all(done.stdout))


def refused(document):
    """Whether a strict reader rejects an object; unknown fields count as errors."""
    if document["kind"] not in MODELS:
        try:
            kubernetes_validate.validate(document, VERSION, strict=True)
        except kubernetes_validate.ValidationError:
            return True
        return False
    try:
        return getattr(kubeflow, MODELS[document["kind"]]).from_dict(document).to_dict() != document
    except ValueError:
        return True


def job_of(manifest):
    """Return the Job of a manifest as an object of its own, also one inside another kind."""
    last = next(document for document in manifest if document["kind"] in ("Job", "JobSet", "TrainingRuntime"))
    if last["kind"] == "Job":
        return last
    spec = last["spec"] if last["kind"] == "JobSet" else last["spec"]["template"]["spec"]
    (replicated,) = spec["replicatedJobs"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inner"}, "spec": replicated["template"]["spec"]}


def container_of(manifest):
    (container,) = job_of(manifest)["spec"]["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize("more", [[], ["--volume-claim", "runs", "--namespace", "ml", "--gpus", "2", "--procs-per-node", "2"]])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_passes_strict_validation(kind, more):
    manifest = printed("--kind", kind, "--cpus", "500m", "--memory", "1.5Gi", *more)
    assert [document["kind"] for document in manifest] == KINDS[kind]
    for document in [*manifest, job_of(manifest)]:
        assert not refused(document)
    assert {document["metadata"].get("namespace") for document in manifest} == {"ml" if more else None}


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_copy_is_refused(kind):
    manifest = printed("--kind", kind)
    for path, value in [
        (("spec", "completions"), "three"),
        (("spec", "complections"), 3),
        (("spec", "podFailurePolicy", "rules", 0, "onExitCodes", "values"), "2"),
        (("spec", "template", "spec", "containers", 0, "comand"), ["trainer"]),
        (("spec", "template", "spec", "containers", 0, "env", 0, "value"), 29400),
    ]:
        job = copy.deepcopy(job_of(manifest))
        place = job
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        assert refused(job), path
    for document in manifest:
        if document["kind"] in MODELS:
            assert refused({**document, "spec": {**document["spec"], "unheard": 1}})
            assert refused({**document, "spec": {**document["spec"], "suspend": "maybe"}} if kind == "jobset" else {**document, "spec": 3})


@pytest.mark.parametrize(
    ("kind", "host"),
    [("job", "quickstart-0.quickstart"), ("jobset", "quickstart-node-0-0.quickstart"), ("trainjob", "quickstart-node-0-0.quickstart")],
)
def test_pods_are_nodes_that_join_the_first(kind, host):
    manifest = printed("--kind", kind, "--port", "4711")
    spec = job_of(manifest)["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    variables = {entry["name"]: entry for entry in container_of(manifest)["env"]}
    assert variables["TRAINER_RENDEZVOUS"]["value"] == f"{host}:4711"
    assert variables["TRAINER_SECRET"]["valueFrom"] == {"secretKeyRef": {"name": "quickstart", "key": "TRAINER_SECRET"}}
    if kind == "job":
        service = manifest[1]
        assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (spec["template"]["spec"]["subdomain"], "None")
        assert service["spec"]["publishNotReadyAddresses"] is True
        assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    else:
        job_set = manifest[1]["spec"] if kind == "jobset" else manifest[1]["spec"]["template"]["spec"]
        assert job_set["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": "quickstart"}
        assert job_set["replicatedJobs"][0]["name"] == "node"
    if kind == "trainjob":
        assert manifest[2]["spec"]["runtimeRef"]["name"] == manifest[1]["metadata"]["name"]
        assert manifest[2]["spec"]["trainer"]["numNodes"] == manifest[1]["spec"]["mlPolicy"]["numNodes"] == 3


def test_only_pods_of_the_run_reach_each_other():
    manifest = printed()
    fence, labels = manifest[0]["spec"], job_of(manifest)["spec"]["template"]["metadata"]["labels"]
    assert fence["podSelector"]["matchLabels"] == labels
    assert fence["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]


def action(policy, exit_code=None, *, disrupted=False):
    """Return the action of the first pod failure rule that matches, or Count."""
    for rule in policy["rules"]:
        codes = rule.get("onExitCodes")
        if codes is not None and codes["operator"] == "In" and exit_code in codes["values"] and codes["containerName"] == "node":
            return rule["action"]
        if disrupted and any(condition["type"] == "DisruptionTarget" for condition in rule.get("onPodConditions", ())):
            return rule["action"]
    return "Count"


@pytest.mark.parametrize("kind", KINDS)
def test_run_with_volume_resumes_by_exit_code(kind):
    manifest = printed("--kind", kind, "--volume-claim", "runs")
    spec = job_of(manifest)["spec"]
    policy = spec["podFailurePolicy"]
    assert [action(policy, code) for code in (1, 2, 75, 137)] == ["Count", "FailJob", "Ignore", "Count"]
    assert [action(policy, code, disrupted=True) for code in (2, 137, None)] == ["FailJob", "Ignore", "Ignore"]
    assert spec["backoffLimit"] == 3 * 3
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 120)
    assert pod["volumes"] == [{"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}]
    container = container_of(manifest)
    assert container["volumeMounts"] == [{"name": "runs", "mountPath": "/runs"}]
    command = ["trainer", "run", "--config", "quickstart", "--nodes", "3", "--name", "quickstart", "--out", "/runs"]
    assert container["command"] == [*command, "--start-timeout", "600", "--checkpoint-every", "600s", "--resume", "auto"]


def test_run_without_volume_is_not_restarted():
    manifest = printed()
    spec = job_of(manifest)["spec"]
    assert spec["backoffLimit"] == 0
    assert [action(spec["podFailurePolicy"], code) for code in (1, 2, 75)] == ["Count", "FailJob", "Count"]
    assert "--resume" not in container_of(manifest)["command"]
    assert "cannot go on" in shown(*ARGUMENTS).stderr


def test_settings_of_the_job_are_kept():
    command = container_of(printed("--volume-claim", "runs", "--checkpoint-every", "100steps", "--start-timeout", "30"))["command"]
    assert command[4:8] == ["--checkpoint-every", "100steps", "--start-timeout", "30"]
    assert command.count("--checkpoint-every") == command.count("--start-timeout") == 1


def test_configuration_file_is_mounted_in_the_pods(tmp_path):
    path = tmp_path / "My Run.toml"
    path.write_text('# mine\nlr = 0.25\n\nname = "other"\n')
    done = shown(str(path), "--nodes", "2", "--image", "trainer")
    assert done.exception is None, done.output
    manifest = list(yaml.safe_load_all(done.stdout))
    assert [document["kind"] for document in manifest] == ["NetworkPolicy", "ConfigMap", "Service", "Job"]
    assert not any(map(refused, manifest))
    assert manifest[1]["data"] == {"config.toml": path.read_text()}
    assert tomllib.loads(manifest[1]["data"]["config.toml"])["lr"] == 0.25
    container = container_of(manifest)
    assert container["command"][2:4] == ["--config", "/etc/trainer/config.toml"]
    assert {"name": "config", "mountPath": "/etc/trainer", "readOnly": True} in container["volumeMounts"]
    assert manifest[0]["metadata"]["name"] == "my-run"


def test_pods_have_shared_memory_and_requested_gpus():
    pod = job_of(printed("--gpus", "2", "--procs-per-node", "2"))["spec"]["template"]["spec"]
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in pod["volumes"]
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}


def test_secret_is_referenced_and_never_written(monkeypatch):
    monkeypatch.setenv("TRAINER_SECRET", "0123456789abcdef0123456789abcdef")
    done = shown(*ARGUMENTS, "--secret", "shared", "--namespace", "ml")
    assert "0123456789abcdef" not in done.output
    assert "kubectl create secret generic shared --namespace ml --from-file=TRAINER_SECRET=/dev/stdin" in done.stdout
    assert "kind: Secret" not in done.stdout


def test_notification_address_may_be_in_the_secret(monkeypatch):
    monkeypatch.setenv("TRAINER_NOTIFY", "https://me:pass@hooks.example/SECRET")
    monkeypatch.setenv("TRAINER_ON_FAILURE", "mail me@example.org")
    done = shown(*ARGUMENTS, "--secret", "shared")
    variables = {entry["name"]: entry for entry in container_of(list(yaml.safe_load_all(done.stdout)))["env"]}
    reference = {"name": "shared", "key": "TRAINER_NOTIFY", "optional": True}
    assert variables["TRAINER_NOTIFY"]["valueFrom"] == {"secretKeyRef": reference}
    assert "notify (from environment TRAINER_NOTIFY) is set here, and is not in the pods, which take it from the key" in done.stderr
    assert "on_failure (from environment TRAINER_ON_FAILURE) is set here, and no pod runs it" in done.stderr
    assert "hooks.example" not in done.output
    assert "me@example.org" not in done.output


def test_required_objects_are_listed_in_piped_manifest():
    done = shown(*ARGUMENTS, "--namespace", "ml")
    made = "openssl rand -hex 16 | kubectl create secret generic quickstart --namespace ml --from-file=TRAINER_SECRET=/dev/stdin"
    assert f"#   {made}\n" in done.stdout
    assert f"once, before the manifest is applied: {made}\n" in done.stderr


def test_gpus_are_required_and_unused_ones_reported():
    assert container_of(printed("--gpus", "1"))["command"][-2:] == ["--device", "gpu"]
    assert "--device" not in container_of(printed())["command"]
    done = shown(*ARGUMENTS, "--gpus", "4", "--procs-per-node", "2")
    assert "--gpus 4: a pod has 2 processes, one GPU each; --procs-per-node 4 uses them all" in done.stderr
    done = shown(*ARGUMENTS, "--gpus", "1", "--device", "cpu")
    assert "computes on CPUs (--device cpu), so each pod has GPUs that nothing uses" in done.stderr
    (command,) = [container_of(list(yaml.safe_load_all(done.stdout)))["command"]]
    assert command.count("--device") == 1


def test_variables_missing_in_the_pods_are_reported(monkeypatch):
    monkeypatch.setenv("TRAINER_LR", "0.5")
    done = shown(*ARGUMENTS)
    assert done.exception is None
    assert "TRAINER_LR is set here, and is not in the pods; give --lr" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--restarts", "2"], "a pod loses its disk"),
        (["--gpus", "1", "--procs-per-node", "2"], "--procs-per-node: got 2, but a pod has 1 GPU (--gpus), and each process takes one"),
        (["--gpus", "2", "--procs-per-node", "1,3,2"], "--procs-per-node: got 3, but a pod has 2 GPUs (--gpus)"),
        (["--device", "gpu"], "--device: got 'gpu', but the pods are given none; give --gpus 1"),
        (["--name", "My_Run"], "--name: got 'My_Run'"),
        (["--name", "a" * 41], "--name: got"),
        (["--namespace", "a.b"], "--namespace: got 'a.b'"),
        (["--volume-claim", "x\n---"], "--volume-claim: got"),
        (["--secret", "$(id)"], "--secret: got"),
        (["--image", "a b"], "--image: got 'a b'"),
        (["--cpus", "many"], "--cpus: got 'many'"),
        (["--memory", "4 GB"], "--memory: got '4 GB'"),
        (["--out", "/x"], "--out: decided by `trainer manifest kubernetes`"),
        (["--hosts", "a,b"], "--hosts: decided by"),
        (["--resume=auto"], "--resume: decided by"),
        (["--batch-size", "none"], "--batch-size: got 'none'"),
        (["--mlflow", "https://me:pass@example.org"], "mlflow: has a password"),
    ],
)
def test_invalid_request_is_refused_immediately(arguments, message):
    done = shown(*ARGUMENTS, *arguments)
    assert isinstance(done.exception, UsageError)
    assert message in str(done.exception)
    assert done.stdout == ""


def expanded(word, variables):
    """Expand a command word as Kubernetes does: $$ is one $, $(NAME) a known variable's value."""

    def replacement(match):
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replacement, word)


HOSTILE = st.sampled_from(
    ["$(TRAINER_SECRET)", "$$(TRAINER_SECRET)", "$", "$$", "no", "~", "1e3", "- x", "# x", "'", '"', "\\", "---", "a: b", " ", ""]
)


@pytest.mark.thorough
@given(words=st.lists(TEXT | HOSTILE, max_size=4), kind=st.sampled_from(sorted(KINDS)))
@settings(deadline=None)
def test_every_argument_reaches_the_container(words, kind):
    run = KubernetesRun("mine", 2, "trainer", command=("trainer", "run", *words), kind=kind)
    command = container_of(list(yaml.safe_load_all(manifest_text(run))))["command"]
    variables = {"TRAINER_SECRET": "secret", "TRAINER_RENDEZVOUS": "host"}
    assert [expanded(word, variables) for word in command] == ["trainer", "run", *words]


@given(config=TEXT.flatmap(lambda line: st.lists(st.just(line) | TEXT, max_size=4).map("\n".join)) | st.text("a \n\t#:", max_size=12))
def test_configuration_arrives_unchanged(config):
    run = KubernetesRun("mine", 2, "trainer", command=("trainer",), config=config)
    config_map = next(document for document in yaml.safe_load_all(manifest_text(run)) if document["kind"] == "ConfigMap")
    assert config_map["data"]["config.toml"] == config


PARTS = st.recursive(
    TEXT | HOSTILE | st.booleans() | st.integers(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
)


@given(st.dictionaries(TEXT | HOSTILE, PARTS, max_size=3))
def test_yaml_document_round_trips(document):
    assert yaml.safe_load(yaml_document(document)) == document


def test_invalid_text_is_refused():
    with pytest.raises(UsageError, match="no character"):
        manifest_text(KubernetesRun("mine", 2, "trainer", command=("trainer", "\udcff")))


def test_documents_are_the_printed_manifest():
    run = KubernetesRun("mine", 2, "trainer", command=("trainer", "run"), claim="runs", restarts=1)
    assert list(yaml.safe_load_all(manifest_text(run))) == documents(run)


def test_documentation_shows_the_printed_manifest(repository, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('backend = "torch"\n')
    text = (repository / "docs/clusters.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^trainer manifest kubernetes (mine\.toml .*) \| kubectl apply -f -$", text, re.MULTILINE)
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    left = shown(*command.split()).stdout
    for part in filter(None, block.split("…\n")):
        assert part in left
        left = left.partition(part)[2]


def test_image_installs_existing_extras(repository):
    dockerfile = (repository / "docs/docker/Dockerfile").read_text(encoding="utf-8")
    extras = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (named,) = re.findall(r"^# EXTRA   (.*?)\.", dockerfile, re.MULTILINE)
    assert {*re.split(r", | or ", named), "gpu"} <= extras.keys()
    (case,) = re.findall(r'case "\$DEVICE:\$EXTRA" in(.*?)esac', dockerfile, re.DOTALL)
    assert {f"{device}:{extra}" for device in ("cpu", "gpu") for extra in re.split(r", | or ", named)} <= set(
        re.findall(r"[a-z]+:[a-z]+", case)
    )
    assert 'ENTRYPOINT ["trainer"]' in dockerfile


def test_settings_from_a_pipe_are_refused(tmp_path):
    pipe = tmp_path / "a.toml"
    os.mkfifo(pipe)
    done = shown(str(pipe), *ARGUMENTS[1:])
    assert isinstance(done.exception, UsageError)
    assert "a.toml' is no regular file" in str(done.exception)
