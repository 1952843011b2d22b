"""How fast is `trainer` beside hand-written loops and other trainers that do the same work, measured side by side?

Run it from the repository: ``python -m benchmarks``; docs/benchmarks.md explains each row.
"""
