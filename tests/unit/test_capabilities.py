"""A job that exceeds its backend's capabilities is refused by field name; no other is."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.backends.capabilities import COMPLETE, Capabilities, refuse_unsupported
from crosstrain.backends.loading import declared_capabilities
from crosstrain.conformance.cases import OPTIONAL_CAPABILITIES
from crosstrain.conformance.suite import BackendConformance
from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.core.plugins import find

TOYS = [str(Path(__file__).parent.parent / folder) for folder in ("toy", "least_toy")]

MODES, PRECISIONS, DEVICES = ("sync", "async"), ("fp32", "bf16", "fp16"), ("auto", "cpu", "gpu")
AUGMENTS, PROFILES, EXCHANGES = ("none", "crop", "flip", "crop+flip"), (0, 1, 100), ("native", "direct")

FIELDS = ("mode", "precision", "device", "augment", "deterministic", "profile", "exchange")
FIELDS += ("compile", "loss", "weight_decay_except", "accumulate", "clip_norm", "ema_decay")
TRAINING = (
    ("off", None, None, 1, 0.0, 0.0),
    ("off", "multi_label", "*.bias", 4, 0.0, 0.0),
    ("auto", None, "*.bias", 1, 0.5, 0.0),
    ("off", None, None, 1, 0.0, 0.99),
    ("on", "multi_label", None, 4, 0.5, 0.99),
    ("on", None, None, 1, 0.0, 0.0),
)

EVERY_JOB = [
    dict(zip(FIELDS, (*values, *training), strict=True))
    for *values, training in itertools.product(MODES, PRECISIONS, DEVICES, AUGMENTS, (False, True), PROFILES, EXCHANGES, TRAINING)
    if (values[0] == "sync" or not values[4]) and not (values[6] == "direct" and values[2] == "gpu")
]

declarations = st.builds(
    Capabilities,
    modes=st.frozensets(st.sampled_from(MODES)),
    precisions=st.frozensets(st.sampled_from(PRECISIONS)),
    devices=st.frozensets(st.sampled_from(DEVICES[1:])),
    exchanges=st.frozensets(st.sampled_from(EXCHANGES)),
    compiling=st.booleans(),
    augmentation=st.booleans(),
    deterministic=st.booleans(),
    profiling=st.booleans(),
    accumulation=st.booleans(),
    clipping=st.booleans(),
    weight_averaging=st.booleans(),
    losses=st.booleans(),
    decay_exceptions=st.booleans(),
)


def undeclared_fields(job, can):
    """Return the fields by which a job exceeds the declared capabilities, one rule per field."""
    fields = set()
    if job["mode"] not in can.modes:
        fields.add("mode")
    if job["precision"] not in can.precisions:
        fields.add("precision")
    if job["device"] != "auto" and job["device"] not in can.devices:
        fields.add("device")
    if job["augment"] != "none" and not can.augmentation:
        fields.add("augment")
    if job["deterministic"] and not can.deterministic:
        fields.add("deterministic")
    if job["profile"] and not can.profiling:
        fields.add("profile")
    if job["exchange"] not in can.exchanges:
        fields.add("exchange")
    if job["compile"] != "off" and not can.compiling:
        fields.add("compile")
    if job["accumulate"] > 1 and not can.accumulation:
        fields.add("accumulate")
    if job["clip_norm"] and not can.clipping:
        fields.add("clip_norm")
    if job["ema_decay"] and not can.weight_averaging:
        fields.add("ema_decay")
    if job["loss"] and not can.losses:
        fields.add("loss")
    if job["weight_decay_except"] and not can.decay_exceptions:
        fields.add("weight_decay_except")
    return fields


def check(fields, can):
    job, wanted = Job.model_validate({"backend": "some", **fields}), undeclared_fields(fields, can)
    if not wanted:
        refuse_unsupported(job, "some", can)
        return
    with pytest.raises(UsageError) as refusal:
        refuse_unsupported(job, "some", can)
    field, _, what = str(refusal.value).partition(": ")
    assert field in wanted
    value = f"{fields[field]:g}" if field in FIELDS[-3:] else str(fields[field]).lower()
    assert what.startswith(f"got {value!r}, which backend some does not support; supported there: ")


@given(fields=st.sampled_from(EVERY_JOB), can=declarations)
def test_exactly_undeclared_capabilities_are_refused(fields, can):
    check(fields, can)


@pytest.mark.parametrize("backend", ["tf", "torch", "least-toy"])
def test_every_job_is_checked_on_every_backend(backend, monkeypatch):
    for folder in TOYS:
        monkeypatch.syspath_prepend(folder)
    can = declared_capabilities(find("backend", backend))
    for fields in EVERY_JOB:
        check(fields, can)
    refused = {field for fields in EVERY_JOB for field in undeclared_fields(fields, can)}
    assert refused == (set(FIELDS) if backend == "least-toy" else set())


def test_default_capabilities_are_minimal():
    refuse_unsupported(Job(), "some", Capabilities())


def test_every_capability_is_in_suite_and_docs(repository):
    least = Capabilities()
    optional = {field.name for field in dataclasses.fields(Capabilities)} - {"packages", "install", "gpu_install", "host_network_warning"}
    optional -= {"survives", "export_formats"}  # built-in backends survive no lost task and list their formats elsewhere
    assert {name for name in optional if getattr(COMPLETE, name) == getattr(least, name)} == set()
    assert set(OPTIONAL_CAPABILITIES) == set(FIELDS)
    for field in OPTIONAL_CAPABILITIES:
        with pytest.raises(UsageError, match=rf"^{field}: "):
            refuse_unsupported(Job.model_validate({"backend": "some", **OPTIONAL_CAPABILITIES[field]}), "some", least)
    guide = (repository / "docs/adding-a-backend.md").read_text(encoding="utf-8").partition("### What a job may ask for")[2]
    assert set(OPTIONAL_CAPABILITIES) - {"mode"} <= set(re.findall(r"^\| `(\w+)`", guide.partition("\n### ")[0], re.MULTILINE))


def test_suite_expects_refusals_of_command(tmp_path, monkeypatch):
    monkeypatch.setenv("CROSSTRAIN_CONFORMANCE", "full")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*TOYS, os.environ.get("PYTHONPATH", "")]))
    for folder in TOYS:
        monkeypatch.syspath_prepend(folder)
    suite = type("LeastToy", (BackendConformance,), {"backend": "least-toy"})()
    suite.test_what_it_does_not_declare_is_refused(tmp_path)
