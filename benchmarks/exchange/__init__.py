"""Cost of an all-reduce over several nodes without training, and its parts.

Run from the repository: ``python -m benchmarks.exchange`` compares the direct exchange, gloo and TensorFlow's ring with the bound that the
network sets; ``python -m benchmarks.exchange.constants`` tries other sizes of pieces and buckets; ``python -m benchmarks.exchange.anatomy``
counts system calls, wake-ups and copies of one all-reduce. docs/benchmarks.md and docs/synchronous-steps.md have what they measured.
"""
