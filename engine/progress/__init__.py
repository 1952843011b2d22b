"""How does a person follow a run that goes on?"""
