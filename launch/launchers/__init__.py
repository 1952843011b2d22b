"""Who starts the agents, and how do they reach the driver?"""
