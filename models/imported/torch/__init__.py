"""Imported models on torch: the user's own module, and its export as a graph."""
