"""Greedy decoding on torch of batches of 32 sentences, to 50 pieces, with initial weights.

The variant `cached` is the product's own search and decoder, which caches keys and values of previous positions. The variant `uncached` is
the same search over a hand-written decoder that recomputes all positions for each piece. In place of a step's loss it reports
minus the mean log-probability of its translations: equal ones mean equal translations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from decoding_sentences import LENGTH, SENTENCES, SOURCE_LENGTH, sentences
from numpy.typing import NDArray
from torch_transformer import ByHand
from workload import Timer, Workload, read_workload

from crosstrain.backends.torch.model import Model
from crosstrain.core.job import Job
from crosstrain.models.decoding import Decoding, Stepper, decode


class Uncached:
    """Implements the search's `Stepper` without a cache: only what the encoder gave is kept."""

    def __init__(self, work: Workload) -> None:
        self._model = ByHand(work).eval()
        self._model.use(fused=True)

    @torch.inference_mode()
    def begin(self, sources: Sequence[NDArray[np.integer]]) -> None:
        """See `Stepper.begin`. The sentences have one length."""
        source = torch.from_numpy(np.stack([np.asarray(sentence, np.int64) for sentence in sources]))
        self._mask = torch.ones(len(sources), 1, 1, source.shape[1], dtype=torch.bool)
        self._memory = self._model.encoder(self._model.embedded(source), None, self._mask)
        self._tokens = torch.zeros(len(sources), 0, dtype=torch.int64)

    @torch.inference_mode()
    def advance(self, tokens_n: NDArray[np.int64], rows_n: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Stepper.advance`."""
        rows = torch.from_numpy(rows_n)
        if len(rows) != len(self._memory) or not np.array_equal(rows_n, np.arange(len(rows_n))):
            self._memory, self._mask, self._tokens = self._memory[rows], self._mask[rows], self._tokens[rows]
        self._tokens = torch.cat((self._tokens, torch.from_numpy(tokens_n)[:, None]), 1)
        decoded = self._model.decoder(self._model.embedded(self._tokens), self._memory, self._mask)
        logits = torch.nn.functional.linear(decoded[:, -1], self._model.embedding.weight)
        return torch.log_softmax(logits, 1).numpy()


def of_the_product(work: Workload, job: Job) -> Stepper:
    """Return what the product decodes with."""
    return Model.initial(job, work.spec, 0, torch.device("cpu")).stepper()


def main() -> None:
    """Decode in one process."""
    work, timer = read_workload(), Timer()
    torch.set_num_threads(work.threads)
    job = Job(backend="torch", model=work.model, data=work.data.info.name, seed=work.seed)
    stepper = of_the_product(work, job) if work.variant == "cached" else Uncached(work)
    sources, decoding = sentences(work), Decoding(beam=1, extra_length=LENGTH - SOURCE_LENGTH)
    losses: list[float] = []
    pieces = 0
    for step in range(work.updates):
        if step == work.warmup:
            timer.begin()
            pieces = 0
        translations = [best for (best,) in decode(stepper, sources[step * SENTENCES : (step + 1) * SENTENCES], decoding)]
        losses.append(-float(np.mean([translation.log_probability for translation in translations])))
        pieces += sum(len(translation.pieces) + translation.ended for translation in translations)
    timer.end()
    timer.report_text(work, pieces, np.array(losses))


main()
