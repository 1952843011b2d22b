"""How do torch's workers train without waiting for each other? A parameter server on plain TCP."""
