"""Sentence pairs from text files, and their vocabulary."""
