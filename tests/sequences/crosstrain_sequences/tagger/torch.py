import torch
from torch.nn.functional import cross_entropy, embedding, pad


def forward(parameters, inputs, context):
    tokens_bt = inputs["tokens"]
    before_bt = pad(tokens_bt, (1, 0))[:, : tokens_bt.shape[1]]
    return embedding(tokens_bt, parameters["own"]) + embedding(before_bt, parameters["before"])


def inside(targets):
    return torch.arange(targets["tags"].shape[1], device=targets["tags"].device) < targets["tags_lengths"][:, None]


def tagging_loss(logits_btk, targets, context):
    losses_bt = cross_entropy(logits_btk.transpose(1, 2), targets["tags"], reduction="none")
    return (losses_bt * inside(targets)).sum(1)


def example_sums(logits_btk, targets, context):
    return {"correct_tags": ((logits_btk.argmax(2) == targets["tags"]) & inside(targets)).sum(1)}
