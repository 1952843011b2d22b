"""Sources of a job's values: flags, variables, files, grids."""
