"""Start, communication and end of processes."""
