"""How is a figure written for people?"""
