"""How are records drawn as charts?"""
