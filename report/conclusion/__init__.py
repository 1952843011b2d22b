"""Which set-up is best, by how much, how sure is that, why, and what is to be tried next?"""
