"""Sentence pairs from the packages of a Debian archive."""
