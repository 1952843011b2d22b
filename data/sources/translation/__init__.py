"""Which pairs of sentences are there to learn a translation from, and how do they become numbers?"""
