"""What is learned from, and who sees which example, when? Prepared arrays that need no framework to read."""
