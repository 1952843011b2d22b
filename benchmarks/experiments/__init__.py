"""The shipped experiments and their comparison with results published elsewhere.

docs/experiments.md shows them.
"""
