"""Which figures compare, and their tables."""
