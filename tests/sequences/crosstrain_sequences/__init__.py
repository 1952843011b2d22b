"""Sequences of different lengths with a tag for each token, and a model that tags them: a dataset and a model of one's own."""
