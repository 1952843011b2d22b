"""A run is not resumed under another score signature: best checkpoints compare all scores."""

from __future__ import annotations

import pytest
from model_checkpoints import save_model
from test_trained_vocabulary import corpus
from test_translation_orders import OBJECTIVE

from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.data.store.stored_dataset import open_dataset
from crosstrain.engine.translation import described
from crosstrain.launch.driver.resumption import load_resumption, score_problem
from crosstrain.models.build import build_model
from crosstrain.models.objectives import CLASSIFICATION
from crosstrain.records.store.run_directory import RunWriter


def recorded(job, size=700, signatures=None, objective=OBJECTIVE):
    """Return ``job.json`` of a job."""
    return {**job.recorded(), "translation_signatures": signatures or described(job, objective, size)}


def test_other_number_of_sentences_is_named_with_a_remedy():
    (problem,) = score_problem(recorded(Job()), Job(eval_sentences=50), OBJECTIVE, 700)
    assert "greedy,+50|sentences:50', and so far they were by '" in problem
    assert problem.endswith("greedy,+50|sentences:500' (give --eval-sentences 500)")


def test_another_release_of_sacrebleu_is_named():
    signatures = described(Job(), OBJECTIVE, 700)
    release = signatures["training"].split("|version:")[1].split("|")[0]
    before = {name: signature.replace(f"|version:{release}|", "|version:1.5.1|") for name, signature in signatures.items()}
    (problem,) = score_problem(recorded(Job(), signatures=before), Job(), OBJECTIVE, 700)
    assert problem.endswith("(install the release of sacrebleu that it had: pip install sacrebleu==1.5.1)")
    (problem,) = score_problem(recorded(Job(), signatures=before), Job(eval_sentences=50), OBJECTIVE, 700)
    assert "(give --eval-sentences 500, and install the release" in problem


@pytest.mark.parametrize(
    ("before", "job", "objective", "size"),
    [
        (recorded(Job()), Job(beam=1, length_penalty=1.0), OBJECTIVE, 700),  # the final score is computed only once
        (recorded(Job(), 40), Job(eval_sentences=50), OBJECTIVE, 40),  # both use the whole small split
        (Job().recorded(), Job(eval_sentences=50), OBJECTIVE, 700),  # an earlier release without signatures
        (recorded(Job()), Job(), CLASSIFICATION, 700),  # another model, accepted by --force
        (recorded(Job(), objective=CLASSIFICATION), Job(), CLASSIFICATION, 700),
    ],
)
def test_comparable_signatures_are_no_problem(before, job, objective, size):
    assert score_problem(before, job, objective, size) == []


def test_changed_signature_needs_force_to_resume(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "cache"))
    name = corpus(tmp_path / "own", "alpha")
    job = Job(backend="torch", model="transformer:tiny", data=name, steps=300, out=tmp_path, name="run", keep_best="bleu")
    data = open_dataset(name)
    writer = RunWriter.create(job)
    objective = build_model(job.model, data.info).objective
    writer.write_job(recorded(job, data.info.sizes["test"], objective=objective))
    writer.write_status("interrupted", exit_code=130)
    writer.close()
    save_model(tmp_path / "run", job.model, info=data.info, digest=data.digest, job={"seed": job.seed, "data": name, "data_dir": None})

    def resumed(force=False, **flags):
        return load_resumption(tmp_path / "run", flags, {}, None, force=force, trusted=True)

    assert resumed(eval_sentences=400).changed == {"eval_sentences": (500, 400)}  # the test split has 3
    with pytest.raises(
        UsageError, match=r"^resume: .*sentences:2', .*sentences:3' \(give --eval-sentences 500\)\. Use --force to resume anyway"
    ):
        resumed(eval_sentences=2)
    assert any(note.startswith("going on although evaluations would be scored") for note in resumed(force=True, eval_sentences=2).notes)
