"""What do driver, agents and tasks say to each other, and how does it travel?"""
