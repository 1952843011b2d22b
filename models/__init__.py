"""What is trained: names, shapes and initial values in numpy, an objective, a network over `layers`, a forward function per framework."""
