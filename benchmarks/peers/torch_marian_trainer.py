"""transformers' Trainer with a MarianMTModel of the same size from random weights: what a user of that library trains translation with.

Marian normalises behind each sublayer and has biases in attention and its own initial weights, so that its losses are others.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import MarianConfig, MarianMTModel, Trainer, TrainerCallback, TrainingArguments
from translation_batches import padded_batches
from workload import Timer, Workload, read_workload

from crosstrain.data.text import BEGIN, END

LONGEST = 512
IGNORED = -100


class Batches(Dataset[dict[str, torch.Tensor]]):
    """Each example is a whole batch, padded beforehand."""

    def __init__(self, work: Workload) -> None:
        self._batches = padded_batches(work)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return a batch."""
        batch = self._batches[index]
        source, target = torch.from_numpy(batch.source_bs), torch.from_numpy(batch.target_bt)
        return {
            "input_ids": source,
            "attention_mask": (source != 0).long(),
            "decoder_input_ids": torch.from_numpy(np.ascontiguousarray(batch.decoder_bt)),
            "labels": target.masked_fill(target == 0, IGNORED),
        }


class Ordered(Trainer):
    """A Trainer that takes the batches in their order."""

    def get_train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        """Return them one by one."""
        return DataLoader(self.train_dataset, batch_size=None, shuffle=False)


class Clock(TrainerCallback):
    """Starts the clock behind the warm-up, and ends it behind the last update."""

    def __init__(self, work: Workload, timer: Timer) -> None:
        self._work, self._timer = work, timer

    def on_step_end(self, args: object, state: object, control: object, **others: object) -> None:
        """Look at the number of updates that are done."""
        done = state.global_step
        if done == 1:
            self._timer.first_step()
        if done == self._work.warmup:
            self._timer.begin()
        if done == self._work.updates:
            self._timer.end()


def build(work: Workload) -> MarianMTModel:
    """Return Marian's network in the size of the product's."""
    own = work.spec.settings
    sides = {}
    for side in ("encoder", "decoder"):
        sides |= {f"{side}_layers": own.layers, f"{side}_attention_heads": own.heads, f"{side}_ffn_dim": own.inner}
    return MarianMTModel(
        MarianConfig(
            vocab_size=len(work.initial["embedding.weight"]),
            d_model=own.width,
            max_position_embeddings=LONGEST,
            activation_function="relu",
            dropout=own.dropout_residual,
            attention_dropout=own.dropout_attention,
            activation_dropout=own.dropout_relu,
            scale_embedding=True,
            pad_token_id=0,
            bos_token_id=BEGIN,
            eos_token_id=END,
            forced_eos_token_id=END,
            decoder_start_token_id=BEGIN,
            **sides,
        )
    )


def main() -> None:
    """Train in one process."""
    work, timer = read_workload(), Timer()
    torch.set_num_threads(work.threads)
    arguments = TrainingArguments(
        output_dir=os.environ["BENCHMARK_FOLDER"],
        max_steps=work.updates,
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        adam_beta2=work.beta2,
        adam_epsilon=work.epsilon,
        optim="adamw_torch_fused",
        max_grad_norm=0.0,
        label_smoothing_factor=work.spec.settings.smoothing,
        bf16=work.precision == "bf16",
        use_cpu=True,
        seed=work.seed,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Ordered(model=build(work), args=arguments, train_dataset=Batches(work), callbacks=[Clock(work, timer)])
    trained = trainer.train()
    timer.report_mean(work, float(trained.training_loss), work.steps)


main()
