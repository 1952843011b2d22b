"""What holds a run back, and what would help?"""
