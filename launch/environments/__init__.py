"""Who placed this process, and where does it stand? What torchrun, TF_CONFIG, Slurm, Kubernetes or a person set."""
