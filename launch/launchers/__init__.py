"""Launchers of the agents, and the transports to the driver."""
