"""A hand-written torch loop for the Transformer: batches padded beforehand, a fused Adam, autocast for bf16.

Variant `modules` is torch's nn.Transformer; otherwise attention is `scaled_dot_product_attention` by hand.
"""

from __future__ import annotations

import torch
from torch_translator import build, optimizer, smoothed_loss, tensors
from translation_batches import padded_batches
from workload import Timer, read_workload


def main() -> None:
    """Train in one process, on the GPU where there is one to see."""
    work, timer = read_workload(), Timer()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(work.threads)
    torch.manual_seed(work.seed)  # dropout
    batches = [tensors(batch, device) for batch in padded_batches(work)]
    model = build(work).to(device)
    adam, smoothing = optimizer(model, work), work.spec.settings.smoothing
    low, losses = work.precision == "bf16", []

    def run(begin: int, end: int) -> None:
        for source, decoder, target in batches[begin:end]:
            adam.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=low):
                logits = model(source, decoder)
            loss = smoothed_loss(logits, target, smoothing)
            loss.backward()
            adam.step()
            losses.append(loss.detach())
        if device == "cuda":
            torch.cuda.synchronize()

    run(0, 1)
    timer.first_step()
    run(1, work.warmup)
    timer.begin()
    run(work.warmup, work.updates)
    timer.end()
    timer.report(work, torch.stack(losses).cpu().numpy())


main()
