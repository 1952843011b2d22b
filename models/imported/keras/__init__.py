"""Keras 3 models on both frameworks: the user's layers, with a run's parameters and buffers."""
