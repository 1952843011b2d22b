import tensorflow as tf


def forward(parameters, inputs, context):
    tokens_bt = inputs["tokens"]
    before_bt = tf.pad(tokens_bt, [[0, 0], [1, 0]])[:, : tf.shape(tokens_bt)[1]]
    return tf.gather(parameters["own"], tokens_bt) + tf.gather(parameters["before"], before_bt)


def inside(targets):
    return tf.sequence_mask(targets["tags_lengths"], tf.shape(targets["tags"])[1])


def tagging_loss(logits_btk, targets, context):
    losses_bt = tf.nn.sparse_softmax_cross_entropy_with_logits(targets["tags"], logits_btk)
    return tf.reduce_sum(tf.where(inside(targets), losses_bt, 0.0), axis=1)


def example_sums(logits_btk, targets, context):
    right_bt = (tf.argmax(logits_btk, axis=2, output_type=tf.int32) == targets["tags"]) & inside(targets)
    return {"correct_tags": tf.reduce_sum(tf.cast(right_bt, tf.int32), axis=1)}
