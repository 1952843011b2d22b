"""Models: shapes and initial values in numpy, an objective, forward functions."""
