"""Which runs exist, and the series of a run."""
