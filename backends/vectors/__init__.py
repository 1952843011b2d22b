"""What do backends keep in numpy, whatever they compute in? States, flat vectors, examples, and update rules for those who bring none."""
