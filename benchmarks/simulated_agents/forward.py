"""Stands for a model's forward function, which the backend of simulated nodes never calls; without one no job begins."""
