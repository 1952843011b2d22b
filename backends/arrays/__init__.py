"""Both modes for a framework that exchanges numpy arrays, from its gradients alone."""
