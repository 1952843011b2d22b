"""The training loop, and the process that executes its commands."""
