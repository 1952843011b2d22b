"""Does a process get on, and do those that it waits for?"""
