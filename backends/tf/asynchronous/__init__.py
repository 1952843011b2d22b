"""How do TensorFlow's workers train without waiting for each other? ParameterServerStrategy."""
