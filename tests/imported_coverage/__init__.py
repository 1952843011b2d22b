"""Coverage of imported models: named models train equally on both frameworks, random modules compute equally.

``make translations MINUTES=60`` runs what is missing in the results and prints the table.
"""
