"""How does a run proceed? One training loop for every backend and mode, and the tasks that execute its commands."""
