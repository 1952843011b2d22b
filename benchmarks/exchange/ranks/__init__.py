"""Scripts that run in each rank and print their measurements."""
