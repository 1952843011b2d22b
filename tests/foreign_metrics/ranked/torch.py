from crosstrain.models.logreg.torch import forward

__all__ = ["example_sums", "forward"]


def example_sums(logits_bk, y_b, context):
    own_b1 = logits_bk.gather(1, y_b[:, None])
    rank_b = 1 + (logits_bk > own_b1).sum(1)
    return {"rank": rank_b, "correct_in_5": rank_b <= 5}
