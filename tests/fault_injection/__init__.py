"""Fault injection: automatically restarted runs must end with the same result.

Faults happen at random steps of long runs, and results are stored in a file. ``make faults`` runs all of them, ``make faults KIND=worker
SEED=7`` one kind of another seed. Results in the file are not repeated.
"""
