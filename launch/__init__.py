"""How do the processes of a run start, talk to each other, and end? Driver, agents, their channel, and virtual nodes."""
