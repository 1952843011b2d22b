"""Chief and workers of an async run, for any framework."""
