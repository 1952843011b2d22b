"""How gradients are summed and parameters served, without a framework."""
