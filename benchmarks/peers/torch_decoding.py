"""Greedy decoding at a length of 50 on torch: variant `cached` by the product's decoder, `anew` by hand without a cache of keys and values.

Without a cache the decoder computes the whole beginning again for each piece; the encoder computes once in both. The script that decodes
anew decodes with the cache as well, off the clock, and fails where the translations are not the same.
"""

from __future__ import annotations

import torch
from decoded_sentences import LENGTH, SENTENCES, Cached, Tokens, chosen, sentences
from torch_translator import ByHand
from workload import Timer, Workload, read_workload

from crosstrain.data.text import BEGIN


class Anew:
    """The hand-written model without a cache."""

    def __init__(self, work: Workload) -> None:
        self._model = ByHand(work).eval()

    def translate(self, sources: list[Tokens]) -> Tokens:
        """Return the pieces, [batch, LENGTH]."""
        padded_bs = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(source) for source in sources], batch_first=True)
        with torch.inference_mode():
            memory, mask = self._model.encoded(padded_bs)
            pieces = torch.full((len(sources), 1), BEGIN)
            for _ in range(LENGTH):
                logits_bv = self._model.decoded(pieces, memory, mask, last=1)[:, 0]
                pieces = torch.cat((pieces, torch.from_numpy(chosen(logits_bv.numpy()))[:, None]), 1)
        return pieces[:, 1:].numpy()


def main() -> None:
    """Decode."""
    work, timer = read_workload(), Timer()
    torch.set_num_threads(work.threads)
    first, *batches = sentences(work)
    decoder = Cached(work) if work.variant == "cached" else Anew(work)
    decoder.translate(first)
    timer.first_step()
    timer.begin()
    found = [decoder.translate(batch) for batch in batches]
    timer.end()
    if work.variant != "cached":
        cached = Cached(work)
        different = sum(int((mine != cached.translate(batch)).any(1).sum()) for mine, batch in zip(found, batches, strict=True))
        if different:
            raise SystemExit(f"{different} of {len(batches) * SENTENCES} translations differ with a cache")
    timer.report_mean(work, 0.0, work.steps, tokens=len(batches) * SENTENCES * LENGTH)


main()
