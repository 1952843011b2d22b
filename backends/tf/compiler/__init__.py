"""How does XLA compile what TensorFlow computes in a step?"""
