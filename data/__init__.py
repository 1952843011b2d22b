"""Which examples there are, and which worker gets which one when."""
