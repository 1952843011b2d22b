"""``python direct_ranks_tf.py SEED``: sums of random gradients, in graphs, over ranks of a mesh; two functions take turns on each rank."""

import os
import secrets
import sys
from concurrent.futures import ThreadPoolExecutor

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import tensorflow as tf
from processes import free_ports

from crosstrain.backends.tf.sync.direct import DirectRanks
from crosstrain.core.cluster import Cluster, Task, TaskSpec
from crosstrain.exchange.mesh.bucket_layout import BUCKET_BYTES, buckets_of
from crosstrain.exchange.mesh.mesh import Mesh

RANKS = 3
STEPS = 4


def tasks():
    first = free_ports(RANKS)
    placed = tuple(TaskSpec("worker", rank, rank, leading=True) for rank in range(RANKS))
    cluster = Cluster(placed, ("127.0.0.1",) * RANKS, {spec.name: first + spec.index for spec in placed}, secrets.token_hex(32))
    return [Task(spec, cluster, threads=1) for spec in placed]


def gradients(drawn, rank, step, shapes):
    """Numbers of very different sizes, so that another order of summation gives another sum."""
    made = [drawn.standard_normal(shape) * 10.0 ** drawn.integers(-6, 6, shape) * (1 + rank) * (1 + step) for shape in shapes]
    return [array.astype(np.float32) for array in made]


def in_rank_order(arrays):
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = total + array
    return total


def check(shapes, drawn):
    """Every sum is the same to the bit on every rank, and buckets have memory once, however many functions send from it."""
    given = [[gradients(drawn, rank, step, shapes) for step in range(STEPS)] for rank in range(RANKS)]
    sizes = [4 * int(np.prod(shape)) for shape in shapes]
    several = len(buckets_of(sizes)) if len(buckets_of(sizes)) > 1 else 0

    def train(task):
        ranks = DirectRanks(Mesh(task, 20.0, 10.0), "CPU:0", sequential=False)
        try:
            signature = [tf.TensorSpec(shape, tf.float32) for shape in shapes]
            functions = [ranks.traced(lambda *own: tuple(ranks.add_up(own)), *signature) for _ in range(2)]
            found = [[total.numpy() for total in functions[step % 2](*given[task.rank][step])] for step in range(STEPS)]
            assert len(ranks._rooms) == several, f"{len(ranks._rooms)} memories for {several} buckets"
        finally:
            ranks.leave()
        return found

    with ThreadPoolExecutor(RANKS) as pool:
        everything = list(pool.map(train, tasks()))
    for step in range(STEPS):
        for place in range(len(shapes)):
            expected = in_rank_order([given[rank][step][place] for rank in range(RANKS)])
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
