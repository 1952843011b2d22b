"""Models as people have them: nn.Modules, translated to TensorFlow, and Keras models."""
