"""Runs, sweeps and comparisons from Python: ``import crosstrain as ct``."""
