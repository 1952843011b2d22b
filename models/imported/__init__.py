"""nn.Module classes as people have them, trained on torch as they are and on TensorFlow translated."""
