"""Custom dataset and model: sequences of different lengths with a tag for each token."""
