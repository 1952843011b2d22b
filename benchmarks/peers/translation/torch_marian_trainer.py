"""Hugging Face's Trainer and a MarianMTModel of the same size, on the same batches.

Its formulas differ from the product's: normalisation is after each sublayer, attention has biases, and its random initial weights differ.
So only the level of its losses is comparable. bf16 is Trainer's option of that name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import numpy as np
import torch
from text_batches import BEGIN, PADDING, TextBatch, text_batches
from torch.utils.data import DataLoader
from transformers import MarianConfig, MarianMTModel, Trainer, TrainerCallback, TrainingArguments
from workload import Timer, Workload, read_workload

NO_LABEL = -100
"""The label that Hugging Face's models exclude from the loss."""

END = 2


def build(work: Workload) -> MarianMTModel:
    """Return the model with weights drawn by its own rule."""
    settings, pieces = work.spec.settings, work.spec.logits_per_position
    layers = {f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in _of_side(work).items()}
    return MarianMTModel(
        MarianConfig(
            vocab_size=pieces,
            d_model=settings.width,
            **layers,
            dropout=settings.dropout_residual,
            attention_dropout=settings.dropout_attention,
            activation_dropout=settings.dropout_relu,
            activation_function="relu",
            scale_embedding=True,
            share_encoder_decoder_embeddings=True,
            pad_token_id=PADDING,
            bos_token_id=BEGIN,
            eos_token_id=END,
            forced_eos_token_id=END,
            decoder_start_token_id=BEGIN,
            use_cache=False,
        )
    )


def _of_side(work: Workload) -> dict[str, int]:
    settings = work.spec.settings
    return {"layers": settings.layers, "attention_heads": settings.heads, "ffn_dim": settings.inner}


class Clock(TrainerCallback):
    """Starts the clock after the warm-up, and stops it after the last step."""

    def __init__(self, work: Workload, timer: Timer) -> None:
        self._work, self._timer = work, timer

    def on_step_end(self, args: TrainingArguments, state: object, control: object, **kwargs: object) -> None:
        """Called after each update."""
        step = state.global_step
        if step == self._work.warmup:
            self._timer.begin()
        if step == self._work.updates:
            self._timer.end()


class FixedBatches(Trainer):
    """Trainer on batches that were made before."""

    def __init__(self, batches: list[TextBatch], **options: object) -> None:
        super().__init__(**options)
        self._batches = batches
        self.losses: list[torch.Tensor] = []

    def get_train_dataloader(self) -> DataLoader:
        """Return the batches in their order."""
        return DataLoader(list(_fed(self._batches)), batch_size=None, shuffle=False, collate_fn=None)

    def compute_loss(self, *arguments: object, **options: object) -> torch.Tensor:
        """Keep the loss."""
        loss = super().compute_loss(*arguments, **options)
        self.losses.append((loss[0] if isinstance(loss, tuple) else loss).detach())
        return loss


def _fed(batches: list[TextBatch]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield each batch as the model takes it."""
    for batch in batches:
        source, target = torch.from_numpy(batch.source), torch.from_numpy(batch.target)
        yield {
            "input_ids": source,
            "attention_mask": (source != PADDING).long(),
            "decoder_input_ids": torch.from_numpy(batch.shifted),
            "labels": target.masked_fill(target == PADDING, NO_LABEL),
        }


def main() -> None:
    """Train in one process."""
    work, timer = read_workload(), Timer()
    torch.set_num_threads(work.threads)
    batches = text_batches(work)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=work.updates,
            learning_rate=work.learning_rate,
            lr_scheduler_type="constant",
            adam_beta2=work.beta2,
            adam_epsilon=work.epsilon,
            max_grad_norm=0.0,
            label_smoothing_factor=work.spec.settings.smoothing,
            bf16=work.precision == "bf16",
            use_cpu=True,
            seed=work.seed,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = FixedBatches(batches, model=build(work), args=arguments, callbacks=[Clock(work, timer)])
        trainer.train()
    losses = np.array([float(loss) for loss in trainer.losses], dtype=np.float32)
    timer.report_text(work, sum(batch.tokens for batch in batches[work.warmup :]), losses)


main()
