"""What do a node's tasks use? CPU, memory, traffic, disk and GPUs of a node, sampled from outside the frameworks."""
