"""Whether a model computes the same on every framework, and where it begins to differ."""
