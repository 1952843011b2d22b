"""How do torch's workers train in lockstep? DistributedDataParallel."""
