"""How do workers train without waiting for each other, whatever they compute in? A parameter server on plain TCP."""
