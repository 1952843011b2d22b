"""Placeholder for a model's forward function, never called, but required by a job."""
