"""Where does each value of a job come from, and is it a sensible one? Flags, variables, files and grids, laid over each other."""
