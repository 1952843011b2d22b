"""How do the ranks of a synchronous run add up their vectors over connections of their own?"""
