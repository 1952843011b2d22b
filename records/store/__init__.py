"""The run directory and its schemas."""
