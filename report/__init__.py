"""What do finished runs say side by side? Reads run directories only; needs no framework."""
