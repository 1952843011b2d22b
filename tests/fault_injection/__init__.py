"""Does a run that goes on by itself come to the same end, whatever is done to it? Faults at random steps of long runs, kept in a file.

``make faults`` runs all of them, ``make faults KIND=worker SEED=7`` one kind of another seed. What is in the file of results is not done
again.
"""
