"""Prepared datasets on disk."""
