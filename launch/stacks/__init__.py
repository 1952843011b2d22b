"""Where does each task stand when a run does not get on? An agent has its tasks' stacks written, the driver says what they come to."""
