"""Speed of one's own data, and of calls from Python."""
