"""What is trained? One folder a model: spec.py in numpy, one file with the forward function per backend."""
