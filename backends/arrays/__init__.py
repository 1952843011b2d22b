"""How is a job carried out by a framework that takes and gives numpy arrays? In both modes, from its gradients alone."""
