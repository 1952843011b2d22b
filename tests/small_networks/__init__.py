"""Models for tests that need one kind of layer and no large network."""
