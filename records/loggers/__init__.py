"""TensorBoard, MLflow and MLLOG."""
