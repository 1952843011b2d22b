"""Accuracy of the predictions of `trainer predict`; docs/scaling.md shows it."""
