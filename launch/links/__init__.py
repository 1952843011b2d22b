"""Do the nodes of a run reach each other? Agents probe each other when the driver asks, the driver says which node is cut off."""
