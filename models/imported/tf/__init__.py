"""Imported models on TensorFlow, from their exported graphs."""
