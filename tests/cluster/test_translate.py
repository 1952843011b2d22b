"""A translating model: a run on two nodes, translations by both backends, scores, exports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from digit_pairs import DIGITS, NUMBERS, lines, text

from crosstrain.conformance.runs import environment_of_runs, run_job
from crosstrain.data.store.location import CACHE_VARIABLE

pytestmark = [pytest.mark.cluster, pytest.mark.thorough]

TRAINER = [sys.executable, "-m", "crosstrain.cli.main"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("translate")
    for language in DIGITS:
        (folder / f"digits.{language}").write_text(text(lines(language)))
    return run_job(
        folder, backend="torch", model="transformer:tiny?dropout=0", nodes=2, network="host", batch_size=32, optimizer="adam", lr=0.002,
        data=f"parallel-text:{folder}/digits:en-de?vocabulary=320,held-out=51", warmup_steps=20, steps=80, eval_every="40steps",
        eval_sentences=20, calibrate=False, tensorboard=False, threads=1,
    )  # fmt: skip


def command(*arguments, stdin="", code=0, **environment):
    done = subprocess.run(
        [*TRAINER, *map(str, arguments)], input=stdin, capture_output=True, text=True, timeout=500, env=environment_of_runs() | environment
    )
    assert done.returncode == code, done.stderr
    return done


def translations(run, numbers, *options):
    nowhere = run.path.parent / "no data are read"
    done = command("translate", run.path, "--json", *options, stdin=text(lines("en", numbers)), **{CACHE_VARIABLE: str(nowhere)})
    assert not nowhere.exists()
    return [json.loads(line)["translations"] for line in done.stdout.splitlines()]


def equal_fraction(ours, theirs):
    """The fraction of sentences with equal translations; the others have close scores."""
    pairs = [(our[0], their[0]) for our, their in zip(ours, theirs, strict=True)]
    difference = max(abs(our["score"] - their["score"]) for our, their in pairs)
    share = np.mean([our["text"] == their["text"] for our, their in pairs])
    print(f"{len(pairs)} sentences: {share:.2%} equal, scores within {difference:.1e}")
    assert difference <= 1e-4
    return share


def test_a_run_on_two_nodes_scores_each_sentence_once(run):
    *_, last = run.evals
    assert list(last.metrics)[:3] == ["bleu", "chrf", "exact"]
    exact = last.metrics["exact"] * 20
    assert exact == pytest.approx(round(exact), abs=1e-9)
    assert exact > 5
    end, signatures = run.summary["translated"], json.loads((run.path / "job.json").read_text())["translation_signatures"]
    assert (end["sentences"], end["step"], end["signature"]) == (51, 80, signatures["end"])
    assert signatures["training"].endswith("|greedy,+50|sentences:20")
    assert signatures["end"].endswith("|beam4,penalty0.6,+50|sentences:51")


def on_both(run, numbers, *options):
    """Translate with both backends concurrently."""
    with ThreadPoolExecutor() as pool:
        torch, tf = pool.map(lambda backend: translations(run, numbers, "--backend", backend, *options), ("torch", "tf"))
    return torch, tf


def test_translations_equal_on_both_backends_batched_and_single(run):
    numbers = NUMBERS[:20]
    with ThreadPoolExecutor() as pool:
        torch = pool.submit(translations, run, numbers, "--backend", "torch")
        one_by_one, tf = translate_one_by_one_and_together(run, numbers, "--backend", "tf")
    assert equal_fraction(torch.result(), tf) == 1.0
    assert equal_fraction(tf, one_by_one) == 1.0


@pytest.mark.slow
def test_other_backend_computes_equal_score(run):
    evaluated = json.loads(command("evaluate", run.path, "--backend", "tf", "--json", "--trust-run").stdout)
    end = run.summary["translated"]
    assert [evaluated[name] for name in ("bleu", "chrf", "exact")] == pytest.approx(
        [end[name] for name in ("bleu", "chrf", "exact")], abs=1.5
    )
    assert evaluated["translation_signature"] == end["signature"]


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("beam", [1, 4])
def test_2000_translations_equal_on_both_backends(run, beam):
    numbers = np.random.default_rng(1).permutation(9000)[:2000] + 1000
    torch, tf = on_both(run, numbers, "--beam", beam)
    one_by_one = translate_one_by_one(run, numbers, "--beam", beam)
    assert equal_fraction(torch, tf) >= 0.995
    assert equal_fraction(torch, one_by_one) >= 0.995


def translate_one_by_one(run, numbers, *options):
    """Translations in batches of one: a line is written when the previous one is translated."""
    return translate_one_by_one_and_together(run, numbers, *options)[0]


def translate_one_by_one_and_together(run, numbers, *options):
    """Translations in batches of one, then of one batch of all, by the same process."""
    sentences, translations = lines("en", numbers), []
    with subprocess.Popen(
        [*TRAINER, "translate", str(run.path), "--json", *map(str, options)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        for part in (*([line] for line in sentences), sentences):
            process.stdin.write(text(part))
            process.stdin.flush()
            translations += [json.loads(process.stdout.readline())["translations"] for _ in part]
        process.stdin.close()
    return translations[: len(sentences)], translations[len(sentences) :]


@pytest.mark.slow
def test_lines_that_cannot_be_translated_keep_their_place(run):
    source = b"one two\n\n\xff\n" + b"seven " * 40_000 + b"\nthree four five six\r\nnine"
    done = subprocess.run([*TRAINER, "translate", str(run.path)], input=source, capture_output=True, timeout=200)
    assert done.returncode == 1
    output = done.stdout.decode().split("\n")
    assert [bool(line) for line in output] == [True, False, False, False, True, True, False]
    messages = done.stderr.decode()
    assert "line 3: not UTF-8 (byte 0xff at 0)" in messages
    assert "line 4: longer than 65,536 bytes" in messages
    assert "2 of 6 lines could not be translated" in messages


def test_translate_answers_each_line_and_ends_quietly(run):
    process = subprocess.Popen(
        [*TRAINER, "translate", str(run.path), "--n-best", "2"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    process.stdin.write("one two three four\n")
    best = [process.stdout.readline().split("\t") for _ in range(2)]
    assert [row[0] for row in best] == ["1", "1"]
    assert float(best[0][1]) >= float(best[1][1])
    process.stdout.close()  # as `head` does
    process.stdin.write("five six seven eight\n")
    assert process.wait(60) == 1
    assert process.stderr.read() == ""
    process.stdin.close()
    process.stderr.close()


@pytest.mark.slow
def test_translate_interrupt_while_waiting_for_line_ends_it(run):
    process = subprocess.Popen(
        [*TRAINER, "translate", str(run.path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    process.stdin.write("one two three four\n")
    process.stdout.readline()
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130  # nothing has arrived, and the input has not ended
    assert time.monotonic() - began < 15
    assert process.communicate() == ("", "error: interrupted by the user\n")


PLAIN = {
    "savedmodel": """
import tensorflow as tf
model = tf.saved_model.load(".")
translate = lambda rows: model.signatures["serving_default"](pieces=tf.constant(rows, tf.int32))["pieces"].numpy().tolist()
""",
    "torch": """
import torch
program = torch.export.load("program.pt2").module()
translate = lambda rows: program(torch.tensor(rows)).tolist()
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["savedmodel", "torch"])
def test_an_export_translates_without_trainer(run, name):
    folder = run.path.parent / f"export-{name}"
    command("export", run.path, "--format", name, "--output", folder, "--trust-run")
    numbers = [*NUMBERS[:4].tolist(), 12345, 7]
    script = (
        PLAIN[name]
        + f"""
import json, sys
import sentencepiece
vocabulary = sentencepiece.SentencePieceProcessor(model_file="vocabulary.model")
rows = [vocabulary.encode(line, add_eos=True) for line in {lines("en", numbers)!r}]
longest = max(map(len, rows))
found = translate([row + [0] * (longest - len(row)) for row in rows])
assert not any(name.partition(".")[0] == "crosstrain" for name in sys.modules)
assert {{len(row) for row in found}} == {{longest + 50}}
print(json.dumps([vocabulary.decode([piece for piece in row if piece > 3]) for row in found]))
"""
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    ours = [candidates[0]["text"] for candidates in translations(run, numbers, "--beam", "1")]
    assert json.loads(done.stdout.splitlines()[-1]) == ours
