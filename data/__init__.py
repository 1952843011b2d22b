"""Which examples are there, and which worker sees which one when? Prepared arrays that need no framework to read."""
