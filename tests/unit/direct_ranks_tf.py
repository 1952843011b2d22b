"""Check all-reduce of random gradients in graphs; two functions alternate on each rank.

``python direct_ranks_tf.py SEED``
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import tensorflow as tf
from mesh_ranks import in_rank_order, tasks_of, vectors_of

from crosstrain.backends.tf.sync.direct import TcpCollectives
from crosstrain.exchange.all_reduce import BUCKET_BYTES, cut_into_buckets
from crosstrain.exchange.mesh import Mesh

RANKS = 3
STEPS = 4


def _cut(vector, shapes, elements):
    pieces = np.split(vector, np.cumsum(elements)[:-1])
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def check(shapes, drawn):
    """Check that sums are bit-identical on every rank and that functions share bucket memory."""
    elements = [int(np.prod(shape)) for shape in shapes]
    vectors = vectors_of(RANKS, STEPS * sum(elements), np.float32, int(drawn.integers(2**32)))
    gradients = [[_cut(vector, shapes, elements) for vector in np.split(vectors[rank], STEPS)] for rank in range(RANKS)]
    buckets = len(cut_into_buckets([4 * size for size in elements]))
    memories = buckets if buckets > 1 else 0

    def train(task):
        ranks = TcpCollectives(Mesh(task, 20.0, 10.0), "CPU:0", sequential=False)
        try:
            signature = [tf.TensorSpec(shape, tf.float32) for shape in shapes]
            functions = [ranks.traced(lambda *vectors_tf: tuple(ranks.all_reduce(vectors_tf)), *signature) for _ in range(2)]
            totals = [[total.numpy() for total in functions[step % 2](*gradients[task.rank][step])] for step in range(STEPS)]
            assert len(ranks._rooms) == memories, f"{len(ranks._rooms)} memories for {buckets} buckets"
        finally:
            ranks.leave()
        return totals

    with ThreadPoolExecutor(RANKS) as pool:
        everything = list(pool.map(train, tasks_of(RANKS)))
    for step in range(STEPS):
        for place in range(len(shapes)):
            expected = in_rank_order([gradients[rank][step][place] for rank in range(RANKS)])
            for rank in range(RANKS):
                assert np.array_equal(everything[rank][step][place], expected), (shapes, rank, step, place)


def main(seed):
    tf.config.threading.set_inter_op_parallelism_threads(2 * RANKS)  # each rank waits in an op for the others
    drawn = np.random.default_rng(seed)
    check([(3,), (5, 7), ()], drawn)
    check([(BUCKET_BYTES // 8, 3), (BUCKET_BYTES // 8, 3)], drawn)  # two buckets of the same shape in one step
    for _ in range(4):
        check([tuple(drawn.integers(1, 900, int(drawn.integers(0, 3)))) for _ in range(int(drawn.integers(1, 9)))], drawn)


if __name__ == "__main__":
    main(int(sys.argv[1]))
