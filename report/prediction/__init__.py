"""How would a job scale to other nodes and links?"""
