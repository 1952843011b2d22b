"""How is a trained state used without a run: one task that is started and ended as a run's are, and of which nothing is recorded?"""
