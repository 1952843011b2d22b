"""What is to be translated for an evaluation, in which orders to the leading tasks, and what do their answers add up to?"""
