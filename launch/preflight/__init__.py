"""Are these hosts ready for a run? What each says of itself, how they reach each other, and what is wrong where."""
