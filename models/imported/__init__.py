"""Models written as nn.Modules: native on torch, translated to TensorFlow."""
