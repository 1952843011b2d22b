"""Texts with classes: lines of JSON, and saved Hugging Face datasets."""
