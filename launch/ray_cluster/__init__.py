"""How does a Ray cluster give a run its nodes? A client asks for them, and an actor on each starts what is to run there."""
