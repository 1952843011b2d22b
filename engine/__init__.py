"""What does a run do next? One training loop for every backend and mode, and the tasks that execute its commands."""
