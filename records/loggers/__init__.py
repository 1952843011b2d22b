"""Which other programs are told of a run while it goes on? TensorBoard, MLflow and MLLOG, fed from the same records."""
