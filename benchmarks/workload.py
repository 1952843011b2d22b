"""Workloads of the rows: model, data, batch and update rule, equal for both sides."""

from __future__ import annotations

from dataclasses import dataclass

SEED = 0


@dataclass(frozen=True)
class Work:
    """One workload: `batch_size` per worker, or `batch_tokens` target tokens of a batch at most.

    Padding is included. `warmup` are the updates before the clock starts (real ones, on both sides). `fewest_steps` bounds how much a
    quick pass may shorten a run. `same_loss` is the maximum relative difference (norm-wise) between the losses of two programs with equal
    updates: rounding grows with the depth of the model. `same_mean` is that of the means over the whole run, where rounding has had
    thousands of updates to grow. `beta2` and `epsilon` are Adam's. `most_repeats` limits the repeats of a run that is long or only
    checks.
    """

    model: str
    data: str
    batch_size: int | None
    learning_rate: float
    warmup: int
    momentum: float = 0.0
    precision: str = "fp32"
    fewest_steps: int = 100
    same_loss: float = 1e-4
    same_mean: float = 1e-4
    batch_tokens: int | None = None
    optimizer: str = "sgd"
    beta2: float = 0.999
    epsilon: float = 1e-8
    most_repeats: int | None = None

    def arguments(self) -> dict[str, object]:
        """Return the options that `trainer run` and the peers' scripts share."""
        return {
            "--model": self.model,
            "--data": self.data,
            **({"--batch-size": self.batch_size} if self.batch_tokens is None else {"--batch-tokens": self.batch_tokens}),
            "--lr": self.learning_rate,
            **({"--momentum": self.momentum} if self.optimizer == "sgd" else self._adam()),
            "--precision": self.precision,
            "--seed": SEED,
        }

    def _adam(self) -> dict[str, object]:
        return {"--optimizer": self.optimizer, "--beta2": self.beta2, "--epsilon": self.epsilon}


LOGREG = Work("logreg", "glyphs28", batch_size=10, learning_rate=0.01, warmup=500)
