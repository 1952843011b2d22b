"""How do the processes of a run come to life, and how do they end? Driver, agents, their channel, and virtual nodes."""
