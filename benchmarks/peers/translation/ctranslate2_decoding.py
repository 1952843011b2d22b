"""CTranslate2 with equal weights on the sentences of `torch_decoding.py`, greedy, float32.

The weights are converted by its own specification. It also excludes from the softmax the two pieces that are never output, so its
log-probabilities are larger, by 2 in 8,000 for each piece.
"""

from __future__ import annotations

import tempfile
from typing import Any

import ctranslate2
import numpy as np
from ctranslate2.specs import TransformerSpec
from decoding_sentences import LENGTH, SENTENCES, sentences
from text_batches import positions
from workload import Timer, Workload, read_workload

SPECIAL = ("<blank>", "<s>", "</s>", "<unk>")
"""CTranslate2's names of the first four pieces."""

EPSILON = 1e-6


def specification(work: Workload) -> TransformerSpec:
    """Return the model as CTranslate2 describes one."""
    settings, weights = work.spec.settings, work.initial
    spec = TransformerSpec.from_config(settings.layers, settings.heads, pre_norm=True)
    spec.config.layer_norm_epsilon = EPSILON
    for name, side in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        embeddings = side.embeddings[0] if name == "encoder" else side.embeddings
        embeddings.weight = weights["embedding.weight"]
        side.position_encodings.encodings = positions(work)
        _norm(side.layer_norm, weights, f"{name}.norm")
        for number, layer in enumerate(side.layer):
            of = f"{name}.{number}"
            _attention(layer.self_attention, weights, f"{of}.self_attention", ("query_key_value", "output"))
            if name == "decoder":
                _attention(layer.attention, weights, f"{of}.cross_attention", ("query", "key_value", "output"))
            _norm(layer.ffn.layer_norm, weights, f"{of}.feed_forward_norm")
            for linear, part in ((layer.ffn.linear_0, "inner"), (layer.ffn.linear_1, "output")):
                linear.weight, linear.bias = (weights[f"{of}.feed_forward.{part}.{kind}"] for kind in ("weight", "bias"))
    spec.decoder.projection.weight = weights["embedding.weight"]
    pieces = [*SPECIAL, *(str(number) for number in range(len(SPECIAL), work.spec.logits_per_position))]
    spec.register_source_vocabulary(pieces)
    spec.register_target_vocabulary(pieces)
    spec.validate()
    return spec


def _norm(norm: Any, weights: dict[str, np.ndarray], name: str) -> None:
    norm.gamma, norm.beta = weights[f"{name}.weight"], weights[f"{name}.bias"]


def _attention(attention: Any, weights: dict[str, np.ndarray], name: str, parts: tuple[str, ...]) -> None:
    _norm(attention.layer_norm, weights, f"{name}_norm")
    for linear, part in zip(attention.linear, parts, strict=True):
        linear.weight = weights[f"{name}.{part}.weight"]


def main() -> None:
    """Translate in one process."""
    work, timer = read_workload(), Timer()
    sources = [[SPECIAL[piece] if piece < len(SPECIAL) else str(piece) for piece in sentence.tolist()] for sentence in sentences(work)]
    losses: list[float] = []
    pieces = 0
    with tempfile.TemporaryDirectory() as folder:
        specification(work).save(folder)
        translator = ctranslate2.Translator(folder, device="cpu", compute_type="float32", intra_threads=work.threads, inter_threads=1)
        for step in range(work.updates):
            if step == work.warmup:
                timer.begin()
                pieces = 0
            translations = translator.translate_batch(
                sources[step * SENTENCES : (step + 1) * SENTENCES],
                beam_size=1,
                length_penalty=0.0,
                max_decoding_length=LENGTH,
                suppress_sequences=[[SPECIAL[0]], [SPECIAL[1]]],
                return_scores=True,
                return_end_token=True,
            )
            losses.append(-float(np.mean([translation.scores[0] for translation in translations])))
            pieces += sum(len(translation.hypotheses[0]) for translation in translations)
        timer.end()
    timer.report_text(work, pieces, np.array(losses))


main()
