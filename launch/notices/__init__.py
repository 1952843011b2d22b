"""Who hears what becomes of a run, when nobody looks? An address that the user names, and a command of his."""
