"""How does a framework carry out a job? The only folder whose code runs TensorFlow or torch."""
