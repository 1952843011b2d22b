"""Coverage of imported models: named ones and random modules on both frameworks.

``make translations MINUTES=60`` runs what is missing in the results and prints the table.
"""
