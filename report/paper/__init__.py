"""What of some runs goes into a paper?"""
