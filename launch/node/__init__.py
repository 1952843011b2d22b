"""What happens on one node? Its agent starts, watches and ends the node's tasks."""
