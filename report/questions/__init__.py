"""What do people ask of a run beside what holds it back: how long, still learning, what is busy, what is in it?

Each answer is one line with its figures (docs/explain.md has the rules); `answers.py` gathers them.
"""
