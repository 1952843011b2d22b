"""What is trained in the rows: model, data, batch and rule, the same for both sides."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LOGREG", "SEED", "Work"]

SEED = 0


@dataclass(frozen=True)
class Work:
    """One workload. `batch_size` is a worker's; `warmup` are the updates before the clock starts (real ones, on both sides).

    `fewest_steps` bounds how much a quick pass may shorten a run. `same_loss` is the largest relative difference (norm-wise) between the
    losses of two programs that do the same updates: rounding grows with the depth of the model. `same_mean` is that of the means over
    the whole run, where rounding has had thousands of updates to grow. With `batch_tokens` a worker's batch is of sentences with so many
    target tokens at most, instead of `batch_size` examples; `optimizer` is "adam" then, with `beta2` and `epsilon`.
    `most_repeats` bounds the repeats of what takes long.
    """

    model: str
    data: str
    batch_size: int
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
        batch = {"--batch-size": self.batch_size} if self.batch_tokens is None else {"--batch-tokens": self.batch_tokens}
        adam = {"--optimizer": self.optimizer, "--beta2": self.beta2, "--epsilon": self.epsilon} if self.optimizer == "adam" else {}
        return {
            "--model": self.model,
            "--data": self.data,
            **batch,
            **adam,
            "--lr": self.learning_rate,
            "--momentum": self.momentum,
            "--precision": self.precision,
            "--seed": SEED,
        }


LOGREG = Work("logreg", "glyphs28", batch_size=10, learning_rate=0.01, warmup=500)
