"""How does a run stand right now?"""
