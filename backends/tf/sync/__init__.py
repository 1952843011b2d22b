"""MultiWorkerMirroredStrategy."""
