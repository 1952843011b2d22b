"""The agent of a node: starts, watches and ends its tasks."""
