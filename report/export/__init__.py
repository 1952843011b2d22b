"""How do records become tables for other programs?"""
