"""Comparison of `trainer` with hand-written loops and other trainers that do the same work.

Run it from the repository: ``python -m benchmarks``; docs/benchmarks.md explains each row.
"""
