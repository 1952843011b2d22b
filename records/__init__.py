"""Records of a run, figures from them, and their formatting."""
