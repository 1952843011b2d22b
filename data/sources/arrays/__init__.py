"""Datasets of arrays in files of numpy."""
