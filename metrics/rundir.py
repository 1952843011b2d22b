"""The run directory: written by the driver as the run goes, read by everything else."""
