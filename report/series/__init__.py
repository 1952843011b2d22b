"""How do records become curves?"""
