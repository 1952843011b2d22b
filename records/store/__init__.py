"""How is a run kept on disk, and read again? The run directory, its lines and the schemas of its documents."""
