"""Greedy decoding at a length of 50 by CTranslate2, with the product's weights in its format.

Its attention has biases, which are zero here. Positions are given as a table. Off the clock the product's decoder translates the same, and
the script fails where too few translations are equal: now and then rounding chooses another piece.
"""

from __future__ import annotations

import os
from pathlib import Path

import ctranslate2
import numpy as np
from ctranslate2.specs import TransformerSpec
from ctranslate2.specs.common_spec import Activation
from decoded_sentences import LENGTH, NEVER, SENTENCES, Cached, sentences
from numpy.typing import NDArray
from workload import Timer, Workload, read_workload

from crosstrain.data.text import BEGIN, END, PADDING, UNKNOWN
from crosstrain.models.layers.position_codes import position_codes

EPSILON = 1e-6
LONGEST = 512
LEAST_EQUAL = 0.9
BEGINNINGS = {PADDING: "<blank>", BEGIN: "<s>", END: "</s>", UNKNOWN: "<unk>"}


def convert(work: Workload, folder: Path) -> None:
    """Write the model."""
    own, values = work.spec.settings, work.initial
    spec = TransformerSpec.from_config(own.layers, own.heads, pre_norm=True, activation=Activation.RELU)
    table = values["embedding.weight"]
    encoder, decoder = spec.encoder, spec.decoder
    for side, embedding in ((encoder, encoder.embeddings[0]), (decoder, decoder.embeddings)):
        embedding.weight = table
        embedding.multiply_by_sqrt_depth = True
        side.scale_embeddings = True
        side.position_encodings.encodings = position_codes(LONGEST, own.width)
    decoder.projection.weight = table
    decoder.projection.bias = np.zeros(len(table), np.float32)
    for name, side in (("encoder", encoder), ("decoder", decoder)):
        _norm(side.layer_norm, values, f"{name}.norm")
        for number, layer in enumerate(side.layer):
            mine = f"{name}.{number}"
            _attention(layer.self_attention, values, f"{mine}.self_attention", ("query_key_value", "output"))
            if name == "decoder":
                _attention(layer.attention, values, f"{mine}.cross_attention", ("query", "key_value", "output"))
            _norm(layer.ffn.layer_norm, values, f"{mine}.feed_forward_norm")
            for theirs, part in ((layer.ffn.linear_0, "inner"), (layer.ffn.linear_1, "output")):
                theirs.weight, theirs.bias = (values[f"{mine}.feed_forward.{part}.{kind}"] for kind in ("weight", "bias"))
    words = [BEGINNINGS.get(piece, f"p{piece}") for piece in range(len(table))]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.layer_norm_epsilon = EPSILON
    spec.validate()
    spec.optimize(quantization="float32")
    spec.save(str(folder))


def _norm(spec: object, values: dict[str, NDArray[np.float32]], name: str) -> None:
    """Set a normalisation."""
    spec.gamma, spec.beta = values[f"{name}.weight"], values[f"{name}.bias"]


def _attention(spec: object, values: dict[str, NDArray[np.float32]], name: str, parts: tuple[str, ...]) -> None:
    _norm(spec.layer_norm, values, f"{name}_norm")
    for linear, part in zip(spec.linear, parts, strict=True):
        linear.weight = values[f"{name}.{part}.weight"]
        linear.bias = np.zeros(len(linear.weight), np.float32)


def _words(pieces: NDArray[np.int64]) -> list[str]:
    return [BEGINNINGS.get(int(piece), f"p{piece}") for piece in pieces]


def main() -> None:
    """Decode."""
    work, timer = read_workload(), Timer()
    folder = Path(os.environ["BENCHMARK_FOLDER"]) / "ctranslate2"
    folder.mkdir()
    convert(work, folder)
    translator = ctranslate2.Translator(str(folder), device="cpu", inter_threads=1, intra_threads=work.threads)
    first, *batches = [[_words(sentence) for sentence in batch] for batch in sentences(work)]
    never = [[BEGINNINGS[piece]] for piece in NEVER]
    options = {"beam_size": 1, "min_decoding_length": LENGTH, "max_decoding_length": LENGTH, "suppress_sequences": never}

    translator.translate_batch(first, **options)
    timer.first_step()
    timer.begin()
    found = [translator.translate_batch(batch, **options) for batch in batches]
    timer.end()
    product = Cached(work)
    expected = [[_words(pieces) for pieces in product.translate(batch)] for batch in sentences(work)[1:]]
    pairs = [
        (mine.hypotheses[0], other) for one, others in zip(found, expected, strict=True) for mine, other in zip(one, others, strict=True)
    ]
    if sum(mine == other for mine, other in pairs) < LEAST_EQUAL * len(pairs):
        raise SystemExit(f"only {sum(mine == other for mine, other in pairs)} of {len(pairs)} translations are the product's")
    timer.report_mean(work, 0.0, work.steps, tokens=len(batches) * SENTENCES * LENGTH)


main()
