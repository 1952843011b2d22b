"""The process that the user started."""
