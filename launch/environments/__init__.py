"""Who placed this process, and where does it stand? What torchrun, TF_CONFIG, Slurm or a person set."""
