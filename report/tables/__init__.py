"""How are runs laid out in rows and columns of text?"""
