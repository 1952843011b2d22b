"""How are several runs of one job made one after another, and gone on with?"""
