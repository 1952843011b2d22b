"""What do the shipped experiments show, and do they agree with what was measured elsewhere? docs/experiments.md."""
