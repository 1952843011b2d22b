"""How does a run go on from a checkpoint, and what of its files is trusted?"""
