"""How do TensorFlow's workers train in lockstep? MultiWorkerMirroredStrategy."""
