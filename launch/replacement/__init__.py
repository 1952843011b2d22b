"""How does one lost task come back into a cluster that goes on meanwhile?"""
