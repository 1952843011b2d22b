"""A tag's logits: a row for its token plus a row for the token before it.

Losses are summed over tokens, and divided by their number.
"""

import math

from crosstrain.metrics import Metric
from crosstrain.models.base import ModelSpec, ParameterSpec
from crosstrain.models.objectives import Objective

ACCURACY = Metric("tag_accuracy", "tags found", "higher", lambda sums: sums["correct_tags"] / sums["tags_tokens"], bounds=(0.0, 1.0))
PERPLEXITY = Metric("perplexity", "perplexity", "lower", lambda sums: math.exp(min(sums["loss_sum"] / sums["tags_tokens"], 700.0)))
TAGGING = Objective(
    "tagging",
    "tagging_loss",
    ("loss_sum", "correct_tags", "tags_tokens", "examples"),
    (ACCURACY, PERPLEXITY),
    weight="tags_tokens",
)


def build(data):
    for column in ("tokens", "tags"):
        data.column(column)  # data without it are refused, with those that they have
    sizes = data.text.vocabulary_sizes
    shape = (sizes["tokens"], sizes["tags"])
    parameters = ParameterSpec("own", shape, bound=0.1), ParameterSpec("before", shape, bound=0.1)
    return ModelSpec("tagger", parameters, objective=TAGGING, inputs=("tokens",), target="tags")
