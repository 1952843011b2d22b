"""One's own data and models train on both frameworks."""

import json
from pathlib import Path

import pytest

from crosstrain.conformance.runs import trainer

pytestmark = [pytest.mark.cluster, pytest.mark.thorough]
EXAMPLES = Path(__file__).parents[2] / "examples"
NET = """
from torch import nn


class Reviews(nn.Module):
    def __init__(self, vocab_size=100, classes=2):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, tokens, mask):
        weights = mask.unsqueeze(2).float()
        return self.head((self.embedding(tokens) * weights).sum(1) / weights.sum(1))
"""


def summary(*arguments):
    done = trainer("run", *map(str, arguments), "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("backend", ["torch", "tf"])
def test_texts_of_json_lines_are_learned(tmp_path, monkeypatch, backend):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "cache"))
    words = ("good", "bad", "fine", "awful", "nice", "poor")
    rows = [{"text": f"a {words[number % 6]} film, number {number}", "label": ("pos", "neg")[number % 2]} for number in range(400)]
    (tmp_path / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "net.py").write_text(NET)
    ended = summary(
        "--model", f"{tmp_path / 'net.py'}:Reviews", "--data", f"jsonl:{tmp_path / 'reviews.jsonl'}", "--backend", backend,
        "--optimizer", "adam", "--lr", "0.05", "--epochs", "5", "--out", tmp_path / "runs",
    )  # fmt: skip
    assert ended["eval"]["accuracy"] > 0.95


@pytest.mark.parametrize("backend", ["torch", "tf"])
def test_keras_model_predicts_numbers_of_a_table(tmp_path, backend):
    ended = summary(
        "--model", f"{EXAMPLES / 'own_keras/net.py'}:table", "--data", f"csv:{EXAMPLES / 'own_torch/table.csv'}?target=y&task=regression",
        "--backend", backend, "--optimizer", "adam", "--lr", "0.01", "--epochs", "20", "--out", tmp_path,
    )  # fmt: skip
    assert ended["eval"]["r2"] > 0.9
