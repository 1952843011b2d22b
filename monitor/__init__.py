"""A node's use of CPU, memory, network and GPUs."""
