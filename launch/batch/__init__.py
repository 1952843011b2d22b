"""What does a batch system run, so that a run takes as many of its jobs as it needs?"""
