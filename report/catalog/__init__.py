"""Which runs are there, and what is each called?"""
