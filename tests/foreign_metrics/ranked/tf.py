import tensorflow as tf

from crosstrain.models.logreg.tf import forward

__all__ = ["example_sums", "forward"]


def example_sums(logits_bk, y_b, context):
    own_b1 = tf.gather(logits_bk, y_b, axis=1, batch_dims=1)[:, None]
    rank_b = 1 + tf.reduce_sum(tf.cast(logits_bk > own_b1, tf.int32), axis=1)
    return {"rank": rank_b, "correct_in_5": rank_b <= 5}
