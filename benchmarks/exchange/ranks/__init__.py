"""What runs in each rank: scripts, which print what they measured."""
