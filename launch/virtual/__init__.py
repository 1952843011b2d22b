"""One machine as several nodes."""
